"""Where an answer ends, also inside an accepted block."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from tiny_engines import SIZES, assert_idle, compile_all

import jaxspec
from jaxspec import SamplingParams
from jaxspec.engine.api.requests import num_new_tokens
from jaxspec.files import Tokenizer


@pytest.fixture(scope="module")
def folder(tiny_engines, tmp_path_factory):
    """The tiny target, with words."""
    folder = tmp_path_factory.mktemp("words")
    for file in tiny_engines.folders["target"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    words = {f"w{i}": i for i in range(48)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}), "utf-8")
    return folder


def load(folder, **options):
    """A target that drafts for itself, so that every block of K + 1 tokens is accepted."""
    drafter = {"kind": "draft_model", "source": str(folder), "num_speculative_tokens": 5}
    engine = jaxspec.load(folder, drafter=drafter, progress=False, **SIZES, mixed_prefill_tokens=8, **options)
    compile_all(engine)
    return engine


@pytest.fixture(scope="module")
def engine(folder):
    return load(folder)


@pytest.fixture(scope="module")
def one_step(folder):
    """One step a dispatch: the device still decodes when the host ends an answer, and a piece of a stream
    holds one block."""
    return load(folder, steps_per_dispatch=1)


PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def answer(engine):
    generation = engine.generate(PROMPT, max_new_tokens=30)
    assert generation.stats.acceptance_length == 6.0
    assert len(set(generation.token_ids)) > 8
    return generation.token_ids


def first_of_its_kind(tokens):
    """Places whose token did not occur before, so that stopping at it stops there."""
    return [i for i, token in enumerate(tokens) if token not in tokens[:i]]


@pytest.mark.parametrize("count", [1, 2, 6, 7, 8, 12, 13])
def test_the_limit_cuts_exactly(engine, answer, count):
    generation = engine.generate(PROMPT, max_new_tokens=count)
    assert generation.token_ids == answer[:count]
    assert generation.finish_reason == "length"


def test_a_stop_token_ends_wherever_it_stands_in_a_block(engine, answer):
    for place in first_of_its_kind(answer):
        generation = engine.generate(PROMPT, max_new_tokens=30, stop_token_ids=[answer[place]])
        assert generation.token_ids == answer[: place + 1]
        assert generation.finish_reason == "stop"


def test_a_stop_token_at_the_limit_counts_as_a_stop(engine, answer):
    place = first_of_its_kind(answer)[4]
    generation = engine.generate(PROMPT, max_new_tokens=place + 1, stop_token_ids=[answer[place]])
    assert generation.finish_reason == "stop"
    assert len(generation.token_ids) == place + 1


def test_a_stop_string_is_cut_off_wherever_it_begins(engine, answer):
    for place in first_of_its_kind(answer)[1:]:
        text = engine.generate(PROMPT, max_new_tokens=30).text
        stop = text.split(" ")[place]
        expected = text[: text.find(stop)]
        generation = engine.generate(PROMPT, max_new_tokens=30, stop=stop)
        assert generation.text == expected
        assert generation.finish_reason == "stop"
        assert generation.token_ids == answer[: len(generation.token_ids)]


def test_a_slot_is_free_for_others_after_a_stop_string(one_step, answer):
    """Prompts are read beside the slots that decode; the device has not heard that theirs was given up."""
    engine = one_step
    stop = engine.generate(PROMPT, max_new_tokens=30).text.split(" ")[3]
    requests = [engine.make_request(PROMPT, SamplingParams(max_new_tokens=30, stop=stop)) for _ in range(4)]
    requests += [engine.make_request(PROMPT, SamplingParams(max_new_tokens=30)) for _ in range(4)]
    answers = dict(engine.run(requests))
    assert all(answers[i].finish_reason == "stop" for i in range(4))
    assert all(answers[i].token_ids == answer for i in range(4, 8))


def test_ignore_eos_goes_on(engine, answer, monkeypatch):
    monkeypatch.setattr(engine, "eos_token_ids", (answer[3],))
    assert engine.generate(PROMPT, max_new_tokens=30).token_ids == answer[: answer.index(answer[3]) + 1]
    assert engine.generate(PROMPT, max_new_tokens=30, ignore_eos=True).token_ids == answer


def test_an_answer_runs_to_the_models_limit_and_no_further(engine):
    prompt = (np.arange(80) % 48).tolist()
    room = engine.max_model_len - 80
    for asked in ({}, {"max_new_tokens": room}):
        generation = engine.generate(prompt, **asked)
        assert len(generation.token_ids) == room
        assert generation.finish_reason == "length"
    with pytest.raises(
        ValueError, match=f"max_new_tokens: 17 do not fit: .* max_model_len 96 .* for {room}$"
    ):
        engine.generate(prompt, max_new_tokens=room + 1)


@pytest.mark.parametrize(
    ("pages", "asked", "length"),
    [
        (64, {}, 256),
        (64, {"min_tokens": 300}, 300),
        (2, {}, 22),
        (2, {"min_tokens": 20}, 22),
        (64, {"min_tokens": 300, "max_new_tokens": 310}, 310),
    ],
)
def test_a_length_that_was_not_given_fits_what_is_asked_and_the_space_there_is(pages, asked, length):
    config = SimpleNamespace(max_model_len=1000, num_pages=pages, page_size=16)
    assert num_new_tokens(SamplingParams(**asked), 10, config) == length


@pytest.mark.parametrize(
    ("pages", "asked", "problem"),
    [
        (2, {"max_new_tokens": 23}, "10 tokens and 23 new ones need more than the cache's 2 pages of 16"),
        (2, {"min_tokens": 23}, "^min_tokens: 23 do not fit: after a prompt of 10 tokens .* room for 22$"),
        (64, {"min_tokens": 991}, "^min_tokens: 991 do not fit: .* room for 990$"),
        (0, {}, "10 tokens and 1 new ones need more than"),
    ],
)
def test_a_length_that_does_not_fit_is_refused(pages, asked, problem):
    config = SimpleNamespace(max_model_len=1000, num_pages=pages, page_size=16)
    with pytest.raises(ValueError, match=problem):
        num_new_tokens(SamplingParams(**asked), 10, config)


@pytest.fixture
def special(engine, monkeypatch):
    """The engine's tokenizer, to which some words are special."""

    def make(*words):
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(engine.tokenizer.backend.to_str()))
        tokenizer.backend.add_special_tokens(list(words))
        monkeypatch.setattr(engine, "tokenizer", tokenizer)

    return make


def test_the_text_of_a_special_token_ends_an_answer_there(engine, answer, special):
    """Though no text of an answer has it."""
    for place in first_of_its_kind(answer)[:9]:
        special(f"w{answer[place]}")
        generation = engine.generate(PROMPT, max_new_tokens=30, stop=["nothing", f"w{answer[place]}"])
        assert generation.token_ids == answer[: place + 1]
        assert generation.finish_reason == "stop"
        assert f"w{answer[place]}" not in generation.text.split()


def test_a_stop_string_that_no_text_can_hold_is_refused(engine, special):
    special("w7")
    with pytest.raises(ValueError, match="stop: 'w6 w7' has the special token 'w7', which is not part of"):
        engine.generate(PROMPT, stop="w6 w7")


@pytest.mark.parametrize(("place", "num_pieces"), [(4, 2), (6, 3)])
def test_a_stream_shows_no_part_of_a_stop_string(one_step, place, num_pieces):
    """Inside a block of six tokens, and begun by one and ended by the next: the first comes by itself."""
    engine = one_step
    whole = engine.generate(PROMPT, max_new_tokens=30).text
    words = whole.split(" ")
    stop = f"{words[place]} {words[place + 1]}"
    pieces = list(engine.stream(PROMPT, max_new_tokens=30, stop=stop))
    assert "".join(piece.text for piece in pieces) == whole[: whole.find(stop)]
    assert [piece.generation is not None for piece in pieces] == [False] * (num_pieces - 1) + [True]


def test_streams_can_be_read_in_turn_and_dropped(engine, answer):
    streams = [engine.stream(PROMPT, max_new_tokens=30) for _ in range(2)]
    first = [next(stream) for stream in streams]
    assert first[0].token_ids == first[1].token_ids
    streams[0].close()
    rest = list(streams[1])
    assert first[1].token_ids + [t for piece in rest for t in piece.token_ids] == answer
    assert engine.generate(PROMPT, max_new_tokens=30).token_ids == answer
    assert_idle(engine)
