"""Bodies of answers, made of answers that no engine gave."""

import json

import pytest
from golden_files import FOLDER

from jaxspec import AcceptanceStats, Delta, Generation
from jaxspec.files import Tokenizer
from jaxspec.service.openai import CHAT, COMPLETIONS, Chunks, Head, answer_body, counts, read_body
from jaxspec.service.openai.answers import Reporter

STATS = AcceptanceStats.of([(3, 1), (3, 0), (0, 0)])


def answer(text="a b", prompt=(1, 2, 3), **more):
    return Generation(text, [7, 8], "stop", list(prompt), STATS, cached_tokens=2, **more)


def asked(endpoint=CHAT, **fields):
    prompt = {"messages": [{"role": "user", "content": "x"}]} if endpoint == CHAT else {"prompt": ["x", "y"]}
    return read_body({"model": "m", **prompt, **fields}, endpoint)


def test_usage_counts_a_prompt_once_and_every_answer():
    assert counts([[answer(), answer()], [answer(prompt=[5])]])["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"drafted_tokens": 18, "accepted_tokens": 3},
    }


def test_speculation_of_one_answer_is_told_as_benchmarks_read_it():
    """In the words that AIPerf 0.13 reads at `metrics.speculative_decoding`, with the sums that it checks."""
    verified = [(3, 1), (3, 3), (2, 0), (0, 0), (3, 1), (4, 4)]
    made = Generation("a", [7], "stop", [1], AcceptanceStats.of(verified))
    told = answer_body(asked(), [[made]])["metrics"]["speculative_decoding"]
    assert told == {
        "mean_acceptance_length": pytest.approx(1 + 9 / 5),
        "draft_acceptance_rate": pytest.approx(9 / 15),
        "acceptance_histogram": [1, 2, 0, 1, 1],
        "num_spec_steps": 5,
        "num_draft_tokens": 15,
        "num_accepted_draft_tokens": 9,
        "num_spec_tokens": 4,
    }
    histogram = told["acceptance_histogram"]
    assert all(type(count) is int for count in histogram)
    assert sum(histogram) == told["num_spec_steps"]
    assert sum(j * count for j, count in enumerate(histogram)) == told["num_accepted_draft_tokens"]
    assert len(histogram) == told["num_spec_tokens"] + 1
    plain = Generation("a", [7], "stop", [1], AcceptanceStats.of([(0, 0)]))
    # Of several answers together it would be of none.
    for answers in ([[plain]], [[made, made]], [[made], [made]]):
        assert counts(answers)["metrics"] == {"speculative_decoding": None}


def test_choices_are_numbered_through_all_prompts():
    body = answer_body(asked(COMPLETIONS, n=2), [[answer("a"), answer("b")], [answer("c"), answer("d")]])
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == list(enumerate("abcd"))
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
def test_every_number_is_one_of_json(endpoint):
    """What cannot be drawn has no finite log-probability."""
    fields = {"logprobs": True, "top_logprobs": 1} if endpoint == CHAT else {"logprobs": 1}
    told = answer(logprobs=[-0.5, -float("inf")], top_logprobs=[{7: -0.5}, {8: -0.25}])
    text = json.dumps(answer_body(asked(endpoint, **fields), [[told]]), allow_nan=False)
    assert "-9999.0" in text


def test_tokens_of_one_text_are_told_apart():
    tokenizer = Tokenizer.from_folder(FOLDER / "tokenizers" / "llama")
    letter, byte, part = (tokenizer.vocabulary[text] for text in ("o", "<0x6F>", "<0xC3>"))
    top = [{letter: -0.5, byte: -1.0, part: -2.0}]
    for chosen, keys in {
        letter: ["o", f"token_id:{byte}", "bytes:\\xc3"],
        byte: [f"token_id:{letter}", "o", "bytes:\\xc3"],
        part: ["o", f"token_id:{byte}", "bytes:\\xc3"],
    }.items():
        told = Reporter(tokenizer, is_chat=False).report([chosen], [top[0][chosen]], top)
        assert told["top_logprobs"] == [dict(zip(keys, (-0.5, -1.0, -2.0), strict=True))]
        assert told["top_logprobs"][0][told["tokens"][0]] == told["token_logprobs"][0]
    (entry,) = Reporter(tokenizer, is_chat=True).report([byte], [-1.0], top)["content"]
    assert [(each["token"], each["logprob"]) for each in entry["top_logprobs"]][:2] == [
        ("o", -0.5),
        ("o", -1.0),
    ]


def test_chunks_of_a_chat_begin_with_the_role_and_end_with_the_reason():
    chunks = Chunks(asked(), Head(True, "m"), 1, None)
    pieces = [Delta("", [7]), Delta("", [8]), Delta("a", [9]), Delta("b", [1], answer())]
    found = [body["choices"][0] for piece in pieces for body in chunks.of(piece)]
    assert [choice["delta"] for choice in found] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert [choice["finish_reason"] for choice in found] == [None, None, None, "stop"]
    assert {choice["index"] for choice in found} == {1}


def test_no_log_probability_of_a_piece_without_text_is_lost():
    asks = asked(COMPLETIONS, logprobs=0)
    chunks = Chunks(asks, Head(False, "m"), 0, None)
    pieces = [Delta("", [7], logprobs=[-1.0]), Delta("ab", [8, 9], answer(), logprobs=[-2.0, -3.0])]
    found = [body["choices"][0]["logprobs"] for piece in pieces for body in chunks.of(piece)]
    assert [entry["token_logprobs"] for entry in found] == [[-1.0], [-2.0, -3.0]]
    assert [entry["tokens"] for entry in found] == [["7"], ["8", "9"]]
