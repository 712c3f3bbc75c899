"""Grammars beside other requests that leave little or nothing to say: one batch, as in plain decoding."""

import pytest
from test_grammars import TOKENIZER, C, D, E, load  # noqa: F401
from tiny_engines import assert_idle, tokens_of
from tiny_grammars import END, SCHEMA

A, B, K = (TOKENIZER.vocabulary[letter] for letter in "abk")
L = TOKENIZER.vocabulary["l"]
ODD = [
    (
        {
            "regex": "[a-h]{4,20}",
            "repetition_penalty": 1.3,
            "presence_penalty": 0.4,
            "bad_words": [[D], [C, E]],
            "logit_bias": {C: 3.0},
            "min_tokens": 5,
            "logprobs": 2,
        },
        "stop",
    ),
    ({"regex": "[ab](klij){3}", "bad_words": [[K, L]]}, "failed"),  # across tokens without an alternative
    ({"choice": ["abc"], "min_tokens": 10}, "failed"),
    ({"regex": "[ab]c", "logit_bias": {A: -100.0, B: -100.0}}, "stop"),  # all that may come, so alike
    ({"regex": "a{0}"}, "stop"),
    ({"regex": "(ab){6}", "no_repeat_ngram_size": 2}, "failed"),
    ({"json_schema": SCHEMA, "max_new_tokens": 1}, "length"),
]
"""For each of the prompts: what it asks for, and how the answer ends."""


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_in_one_batch(load, prompts, sampling):  # noqa: F811
    params = [{"max_new_tokens": 30, "stop_token_ids": [END], **sampling, **asked} for asked, _ in ODD]
    engine = load("eagle3", 7, sampling_modes=("sampled",))  # whose programs answer greedily, too
    together = engine.generate(prompts, params)
    assert [answer.finish_reason for answer in together] == [reason for _, reason in ODD]
    assert [answer.token_ids[-1] == END for answer in together] == [reason == "stop" for _, reason in ODD]
    alone = [engine.generate(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    assert tokens_of(alone) == tokens_of(together)
    if not sampling:
        assert tokens_of(load("none").generate(prompts, params)) == tokens_of(together)
    for answer in together:
        assert answer.finish_reason != "failed" or "the constraints allow no token" in answer.error
    assert_idle(engine)
