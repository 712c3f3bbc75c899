"""Heads over the other families: seven drafts a step, across the edges of pages of four and of windows."""

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


@pytest.fixture(scope="module")
def load():
    engines = {}

    def load(target, drafter=None):
        key = (target, drafter and drafter["source"])
        if key not in engines:
            engines[key] = jaxspec.load(
                golden_folder(target),
                drafter=drafter and {**drafter, "num_speculative_tokens": 7},
                sampling_modes=("greedy",),
                progress=False,
                batch_size=2,
                max_model_len=96,
                page_size=4,
                prefill_chunk=16,
            )
        return engines[key]

    return load


@pytest.mark.parametrize(("target", "head"), PAIRS)
def test_drafting_changes_no_token_and_the_host_driven_loop_does_the_same(
    load, tmp_path, monkeypatch, target, head
):
    source = HEADS[head](tmp_path / "head", golden_folder(target))
    drafter = {"kind": head.split()[0], "source": str(source)}
    prompts = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, *range(20, 37), 9], [40, 41]]
    ask = {"max_new_tokens": 40, "ignore_eos": True}
    plain = load(target).generate(prompts, **ask)
    engine, ran, results = load(target, drafter), None, []
    for is_driven in (False, True):
        if is_driven:
            ran = drive_from_python(engine, monkeypatch)
        start_afresh(engine)
        generations = engine.generate(prompts, **ask)
        assert tokens_of(generations) == tokens_of(plain)
        cache = [np.asarray(layer)[1:] for layer in engine.core.state.draft_cache]
        results.append(([g.stats.accepted_at for g in generations], cache))
    assert ran
    (accepted, cache), (host_accepted, host_cache) = results
    assert accepted == host_accepted
    assert sum(map(sum, accepted)) > 0
    for one, other in zip(cache, host_cache, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * np.abs(other).max())
