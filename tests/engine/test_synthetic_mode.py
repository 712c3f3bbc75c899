"""Synthetic acceptance, the benchmark mode, through the engine."""

import pytest
from tiny_engines import SIZES

import jaxspec


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_mean_acceptance_length_is_the_one_asked_for_and_the_mode_says_what_it_is(
    tiny_engines, prompts, temperature
):
    drafter = {"kind": "eagle1", "source": str(tiny_engines.folders["random eagle1"])}
    mode = "sampled" if temperature else "greedy"
    with pytest.warns(UserWarning, match="for benchmarks: .* the text is worthless"):
        engine = jaxspec.load(
            tiny_engines.folders["target"],
            drafter=drafter,
            synthetic_acceptance_length=2.75,
            sampling_modes=(mode,),
            progress=False,
            **SIZES,
        )
    stats = jaxspec.AcceptanceStats()
    for seed in range(6):
        for generation in engine.generate(prompts, max_new_tokens=60, temperature=temperature, seed=seed):
            stats.add(generation.stats)
    assert stats.steps > 800
    assert stats.acceptance_length == pytest.approx(2.75, abs=0.06)
    assert stats.acceptance_per_position[0] == 1.0
    assert stats.acceptance_per_position[2] == 0.0
