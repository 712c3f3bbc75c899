"""Heads over the other families: seven drafts a step, across the edges of pages of four and of windows."""

import numpy as np
import pytest
from golden_files import golden_folder
from tiny_engines import drive_from_python, start_afresh, tokens_of
from tiny_models import write_dflash, write_eagle3, write_peagle

import jaxspec

HEADS = {
    "eagle3 qwen3": lambda folder, target: write_eagle3(folder, target, style="qwen3"),
    "eagle3 windowed": lambda folder, target: write_eagle3(folder, target, window=6),
    "peagle": lambda folder, target: write_peagle(folder, target),
    "dflash": lambda folder, target: write_dflash(folder, target),
}
PAIRS = [
    ("qwen3-windowed", "eagle3 qwen3"),
    ("qwen3-moe-windowed", "dflash"),
    ("gpt-oss", "peagle"),
    ("gemma3", "eagle3 windowed"),
]
"""`test_pairs.py` has EAGLE-1 over a window, and EAGLE-3 over latent attention."""
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, *range(20, 37), 9], [40, 41]]


def load(folder, target, head=None):
    """The engine over a target without a drafter, or with a head."""
    drafter = None
    if head:
        source = HEADS[head](folder / "head", golden_folder(target))
        drafter = {"kind": head.split()[0], "source": str(source), "num_speculative_tokens": 7}
    sizes = {"batch_size": 2, "max_model_len": 96, "page_size": 4, "prefill_chunk": 16}
    options = {"sampling_modes": ("greedy",), "progress": False, **sizes}
    return jaxspec.load(golden_folder(target), drafter=drafter, **options)


def answered(engine):
    """Answers, and what the drafter's cache holds after them."""
    start_afresh(engine)
    answers = engine.generate(PROMPTS, max_new_tokens=40, ignore_eos=True)
    return answers, [np.asarray(layer)[1:] for layer in engine.core.state.draft_cache]


@pytest.mark.parametrize(("target", "head"), PAIRS)
def test_drafting_changes_no_token(tmp_path, monkeypatch, target, head):
    """A head with a window of its own is driven by the host, too: no pair of `test_pairs.py` has one."""
    with load(tmp_path, target) as engine:
        plain = tokens_of(engine.generate(PROMPTS, max_new_tokens=40, ignore_eos=True))
    with load(tmp_path, target, head) as engine:
        answers, cache = answered(engine)
        assert tokens_of(answers) == plain
        assert sum(each.stats.accepted for each in answers) > 0
        if head == "eagle3 windowed":
            ran = drive_from_python(engine, monkeypatch)
            driven, driven_cache = answered(engine)
            assert ran
            assert tokens_of(driven) == plain
            assert [each.stats.accepted_at for each in driven] == [each.stats.accepted_at for each in answers]
            for one, other in zip(cache, driven_cache, strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * np.abs(other).max())
