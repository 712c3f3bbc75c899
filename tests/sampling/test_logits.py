from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels import op
from jaxspec_kernels import process_logits as kernels

from jaxspec.sampling import SamplingMode, process_logits

KERNELS = ("triton", "numba")


@pytest.fixture(params=["xla", "kernel"])
def process(request, monkeypatch):
    """`process_logits` with every implementation that runs here."""
    if request.param == "kernel" and all(map(kernels.process_logits.why_not, KERNELS)):
        pytest.skip("no kernel")
    if request.param == "xla":
        monkeypatch.setattr(kernels.process_logits, "_only_by_name", KERNELS)
    return jax.jit(partial(process_logits, mode=SamplingMode.TRUNCATED))


def test_ties_with_the_last_one_kept_are_kept(sampling_state, process):
    logits = jnp.array([[[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]]])
    kept = [True, False, True, True, True, False]
    for state in (sampling_state(1, top_k=2), sampling_state(1, top_p=0.5)):
        np.testing.assert_array_equal(jnp.isfinite(process(logits, state))[0, 0], kept)


def test_the_best_token_survives_the_harshest_setting(sampling_state, process):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 50)) * 40, jnp.float32)
    found = process(logits, sampling_state(1, temperature=1e-3, top_k=1, top_p=1e-30, min_p=1.0))
    np.testing.assert_array_equal(jnp.isfinite(found).sum(-1), [[1, 1, 1]])
    np.testing.assert_array_equal(found.argmax(-1), logits.argmax(-1))


def test_zero_and_minus_zero_tie(sampling_state, process):
    found = process(jnp.array([[[0.0, -0.0, -1.0]]]), sampling_state(1, top_k=1))
    np.testing.assert_array_equal(jnp.isfinite(found)[0, 0], [True, True, False])


def test_a_slot_without_truncation_keeps_all_beside_one_with(sampling_state, process):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 50)), jnp.float32)
    found = process(logits, sampling_state(2, top_k=[0, 3], top_p=[1.0, 0.4]))
    assert jnp.isfinite(found[0]).all()
    assert 1 <= jnp.isfinite(found[1]).sum() <= 3


def test_masked_logits_stay_masked(sampling_state, process):
    logits = jnp.full((1, 1, 50), -jnp.inf).at[0, 0, 7].set(1.0)
    for state in (sampling_state(1), sampling_state(1, top_k=10, top_p=0.9)):
        np.testing.assert_array_equal(jnp.isfinite(process(logits, state))[0, 0], np.arange(50) == 7)


def test_nan_is_not_hidden(sampling_state, process):
    logits = jnp.zeros((1, 1, 50)).at[0, 0, 7].set(jnp.nan)
    found = process(logits, sampling_state(1, top_k=3, top_p=0.5, min_p=0.1))
    assert jnp.isnan(found[0, 0, 7])


def test_bfloat16_logits_become_float32(sampling_state, process):
    assert process(jnp.zeros((1, 2, 9), jnp.bfloat16), sampling_state(1)).dtype == jnp.float32


def test_of_many_small_weights_as_many_are_kept_as_float64_keeps(sampling_state, process):
    """Some 100,000 sums of float32 would drift."""
    logits = np.random.default_rng(0).normal(size=(1, 1, 100_000)).astype(np.float32)
    kept = int(jnp.isfinite(process(logits, sampling_state(1, top_p=0.9))).sum())
    mass = np.cumsum(-np.sort(-np.exp(logits[0, 0].astype(np.float64))))
    expected = 1 + int((mass < np.float32(0.9) * mass[-1]).sum())
    assert abs(kept - expected) <= 20


def test_on_a_gpu_nothing_branches(monkeypatch, sampling_state):
    """The condition of a branch would be copied to the host there."""
    monkeypatch.setattr(kernels.process_logits, "_only_by_name", KERNELS)
    monkeypatch.setattr(op, "device", lambda: SimpleNamespace(platform="cpu"))
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 50)), jnp.float32)
    state = sampling_state(2, top_k=[0, 9], top_p=[0.7, 0.8])
    on_cpu = jax.jit(lambda: process_logits(logits, state, mode=SamplingMode.TRUNCATED))
    assert "stablehlo.case" in on_cpu.lower().as_text()
    expected = on_cpu()
    monkeypatch.setattr(op, "device", lambda: SimpleNamespace(platform="gpu"))
    on_gpu = jax.jit(lambda: process_logits(logits, state, mode=SamplingMode.TRUNCATED))
    assert "stablehlo.case" not in on_gpu.lower().as_text()
    np.testing.assert_array_equal(on_gpu(), expected)


def test_without_truncation_no_search_is_needed(monkeypatch, sampling_state):
    """Nor is one in the program, where the greater mode's always runs two."""
    monkeypatch.setattr(kernels.process_logits, "_only_by_name", KERNELS)
    monkeypatch.setattr(op, "device", lambda: SimpleNamespace(platform="gpu"))
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 50)), jnp.float32)
    state = sampling_state(4, temperature=[0, 0.7, 1, 2], min_p=[0.5, 0, 0.1, 0.4])
    without, with_searches = (
        jax.jit(partial(process_logits, mode=mode))
        for mode in (SamplingMode.TEMPERATURE, SamplingMode.TRUNCATED)
    )
    found = without(logits, state)
    assert jnp.isinf(found[2:]).any()
    np.testing.assert_array_equal(found, with_searches(logits, state))
    for operation, searches in (("while", 2), ("sort", 0), ("case", 0)):
        assert without.lower(logits, state).as_text().count(f"stablehlo.{operation}") == 0
        assert with_searches.lower(logits, state).as_text().count(f"stablehlo.{operation}") == searches
