"""Prompts: held-out ones left out, and a target that writes its own."""

import json

import pytest
from tiny_run import SPECIAL, write_run, write_target

from jaxspec.checkpoints import open_checkpoint
from jaxspec.training.config import load_training_run
from jaxspec.training.held_out import HeldOut
from jaxspec.training.pipeline import Pipeline
from jaxspec.training.prompts import encode_turn, user_turn_prefix
from jaxspec.training.token_rows import TokenRows

LONG = "the quick brown fox jumps over the lazy dog and then goes home to sleep"


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("what is BLUE", True),
        ("what is blue and green", False),
        (f"Translate: {LONG.upper()}!", True),
        (f"Translate: {LONG[:40]}", False),
    ],
)
def test_held_out_prompts_are_found(text, held):
    assert (text in HeldOut(["What is blue?", LONG])) is held


def test_repeated_held_out_and_long_prompts_are_dropped(tmp_path):
    config = write_run(tmp_path)
    rows = ["What is blue?", "and what is NOT", "red one", "Red, one!", "x" * 200, "sun"]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    run = Pipeline(load_training_run(config), tmp_path / "out", data=tmp_path)
    report = run.run_stage("prompts")
    assert report == {
        "from_files": 6,
        "synthetic": 0,
        "repeated": 1,
        "held_out": 2,
        "too_long": 1,
        "prompts": 2,
    }
    kept = TokenRows.load(tmp_path / "out" / "prompts" / "prompts.npz").sequences()
    wanted = [encode_turn(run.tokenizer, turn) for turn in ("Red, one!", "sun")]
    assert sorted(ids.tolist() for ids in kept) == sorted(wanted)


def test_the_users_turn_starts_where_the_template_puts_it(tmp_path):
    tokenizer = open_checkpoint(write_target(tmp_path / "target")).tokenizer
    prefix = user_turn_prefix(tokenizer)
    assert tokenizer.decode(prefix, skip_special_tokens=False) == f"{SPECIAL[1]}u "
    assert encode_turn(tokenizer, "sun")[: len(prefix)] == prefix
