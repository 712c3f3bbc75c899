"""Heads over the other families: seven drafts a step, across the edges of pages of four and of windows."""

from functools import cache

import numpy as np
import pytest
from golden_files import golden_folder
from tiny_engines import drive_from_python, start_afresh, tokens_of
from tiny_models import write_dflash, write_eagle1, write_eagle3, write_peagle

import jaxspec

HEADS = {
    "eagle3": lambda folder, target: write_eagle3(folder, target),
    "eagle3 qwen3": lambda folder, target: write_eagle3(folder, target, style="qwen3"),
    "eagle3 windowed": lambda folder, target: write_eagle3(folder, target, window=6),
    "eagle1": lambda folder, target: write_eagle1(folder, target),
    "peagle": lambda folder, target: write_peagle(folder, target),
    "dflash": lambda folder, target: write_dflash(folder, target),
}
PAIRS = [
    ("qwen3-windowed", "eagle3 qwen3"),
    ("qwen3-moe-windowed", "dflash"),
    ("gpt-oss", "peagle"),
    ("gemma3", "eagle3 windowed"),
    ("qwen2-windowed", "eagle1"),
    ("deepseek-v3-direct", "eagle3"),
]
DRIVEN = [pair for pair in PAIRS if pair[1] in ("eagle3 qwen3", "eagle3 windowed")]
"""Pairs that the host drives too: windows; `test_pairs.py` has the other heads."""
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, *range(20, 37), 9], [40, 41]]


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """The engine over a target without a drafter, or with a head; equal arguments return the same one."""

    @cache
    def load(target, head=None):
        drafter = None
        if head:
            source = HEADS[head](tmp_path_factory.mktemp("heads") / "head", golden_folder(target))
            drafter = {"kind": head.split()[0], "source": str(source), "num_speculative_tokens": 7}
        return jaxspec.load(
            golden_folder(target),
            drafter=drafter,
            sampling_modes=("greedy",),
            progress=False,
            batch_size=2,
            max_model_len=96,
            page_size=4,
            prefill_chunk=16,
        )

    return load


def answered(engine):
    """Answers, and what the drafter's cache holds after them."""
    start_afresh(engine)
    answers = engine.generate(PROMPTS, max_new_tokens=40, ignore_eos=True)
    return answers, [np.asarray(layer)[1:] for layer in engine.core.state.draft_cache]


@pytest.mark.parametrize(("target", "head"), PAIRS)
def test_drafting_changes_no_token(load, target, head):
    plain = load(target).generate(PROMPTS, max_new_tokens=40, ignore_eos=True)
    answers, _ = answered(load(target, head))
    assert tokens_of(answers) == tokens_of(plain)
    assert sum(each.stats.accepted for each in answers) > 0


@pytest.mark.parametrize(("target", "head"), DRIVEN)
def test_the_host_driven_loop_does_the_same(load, monkeypatch, target, head):
    engine = load(target, head)
    answers, cache = answered(engine)
    ran = drive_from_python(engine, monkeypatch)
    host_answers, host_cache = answered(engine)
    assert ran
    assert tokens_of(host_answers) == tokens_of(answers)
    assert [each.stats.accepted_at for each in host_answers] == [each.stats.accepted_at for each in answers]
    for one, other in zip(cache, host_cache, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * np.abs(other).max())
