"""Rows rounded to 8 bits carry every last bit on, so nothing of a row may depend on the rows beside it."""

from tiny_engines import tokens_of

import jaxspec

PROMPTS = [
    "Compose an engaging travel blog post about a recent trip to Hawaii.",
    "Write a persuasive email to a friend who is afraid of speaking in public.",
    "Count from 1 to 20.",
]


def test_the_real_model_answers_the_same_alone_and_with_drafts_among_eight():
    sizes = {"max_model_len": 256, "slot_sizes": (), "sampling_modes": ("greedy",), "progress": False}
    answers = []
    for kind, slots in (("none", 1), ("ngram", 8)):
        with jaxspec.load("smollm2-135m", drafter={"kind": kind}, batch_size=slots, **sizes) as engine:
            answers.append(tokens_of(engine.generate(PROMPTS, max_new_tokens=24)))
    assert answers[0] == answers[1]
