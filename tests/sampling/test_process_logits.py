import itertools
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


def by_sorting(logits, temperature, top_k, top_p, min_p):
    """One row by a sort in float64."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    keep = p >= min_p
    if top_k:
        keep &= scaled >= np.sort(scaled)[-min(top_k, len(scaled))]
    if top_p < 1:
        order = np.argsort(-scaled, kind="stable")
        left = np.where(keep, p, 0)[order]
        before = np.cumsum(left) - left
        last = np.flatnonzero(before < top_p * left.sum())[-1]
        keep &= scaled >= scaled[order[last]]
    return np.where(keep, scaled, -np.inf)


SETTINGS = list(itertools.product([0.6, 1.7], [0, 1, 5, 5000], [0.05, 0.83, 1.0], [0.0, 0.02, 1.0]))


@pytest.mark.parametrize("vocabulary", [1, 17, 1003])
def test_equals_a_sort(vocabulary, sampling_state, process):
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(size=(len(SETTINGS), 2, vocabulary)).astype(np.float32) * 3
    temperature, top_k, top_p, min_p = zip(*SETTINGS, strict=True)
    state = sampling_state(len(SETTINGS), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = process(jnp.asarray(logits), state)
    for (b, q), setting in zip(np.ndindex(logits.shape[:2]), np.repeat(SETTINGS, 2, axis=0), strict=True):
        temperature, top_k, top_p, min_p = setting
        expected = by_sorting(logits[b, q], temperature, int(top_k), top_p, min_p)
        np.testing.assert_allclose(found[b, q], expected, rtol=1e-6, atol=1e-6, err_msg=str(setting))


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


def test_temperature_0_rows_are_raw(sampling_state, process):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 50)), jnp.float32)
    found = process(logits, sampling_state(2, temperature=[0.0, 2.0], top_k=3, top_p=0.5, min_p=0.5))
    np.testing.assert_array_equal(found[0], logits[0])
    assert jnp.isinf(found[1]).any()


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


def test_rows_are_shared_between_threads(sampling_state, process):
    logits = np.random.default_rng(0).normal(size=(7, 3, 5000)).astype(np.float32)
    state = sampling_state(7, temperature=1.3, top_k=[0, 1, 2, 40, 4999, 5000, 6000], top_p=0.9)
    found = process(logits, state)
    for b, k in enumerate([0, 1, 2, 40, 4999, 5000, 6000]):
        for q in range(3):
            expected = by_sorting(logits[b, q], np.float32(1.3), k, np.float32(0.9), 0.0)
            np.testing.assert_allclose(found[b, q], expected, rtol=1e-6, atol=1e-6)


def test_of_many_small_weights_as_many_are_kept_as_float64_keeps(sampling_state, process):
    """Some 100,000 sums of float32 would drift."""
    logits = np.random.default_rng(0).normal(size=(1, 1, 100_000)).astype(np.float32)
    kept = int(jnp.isfinite(process(logits, sampling_state(1, top_p=0.9))).sum())
    expected = int(np.isfinite(by_sorting(logits[0, 0], 1.0, 0, np.float32(0.9), 0.0)).sum())
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
