"""Heads over the other families: seven drafts a step, across the edges of pages of four and of windows."""

import pytest
from golden_files import golden_folder
from tiny_engines import tokens_of
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
"""`test_pairs.py` has EAGLE-1 over a window, and EAGLE-3 over latent attention and driven by the host."""
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, *range(20, 37), 9], [40, 41]]


@pytest.mark.parametrize(("target", "head"), PAIRS)
def test_drafting_changes_no_token(tmp_path, target, head):
    folder = golden_folder(target)
    source = HEADS[head](tmp_path / "head", folder)
    drafter = {"kind": head.split()[0], "source": str(source), "num_speculative_tokens": 7}
    sizes = {"batch_size": 2, "max_model_len": 96, "page_size": 4, "prefill_chunk": 16}

    def answers(drafter):
        options = {"sampling_modes": ("greedy",), "progress": False, **sizes}
        with jaxspec.load(folder, drafter=drafter, **options) as engine:
            return engine.generate(PROMPTS, max_new_tokens=40, ignore_eos=True)

    drafted = answers(drafter)
    assert tokens_of(drafted) == tokens_of(answers(None))
    assert sum(each.stats.accepted for each in drafted) > 0
