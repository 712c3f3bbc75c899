from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels import random
from jaxspec_kernels.argmax import argmax, gumbel_argmax, row_max
from jaxspec_kernels.random import Purpose
from op_base import OpTest

OP = gumbel_argmax
draw = jax.jit(gumbel_argmax, static_argnames="implementation")


class Case(NamedTuple):
    """Logits, whose last axis is the vocabulary."""

    name: str
    x: np.ndarray


def with_ties(vocabulary):
    return np.random.default_rng(vocabulary).integers(-3, 3, (4, 3, vocabulary)).astype(np.float32)


def with_nan(vocabulary):
    """XLA's maximum on a CPU misses some."""
    places = np.unique(np.linspace(0, vocabulary - 1, 23).astype(int))
    x = np.random.default_rng(0).normal(size=(len(places), vocabulary)).astype(np.float32)
    x[np.arange(len(places)), places] = np.nan
    x[::2, vocabulary // 2 - 1] = np.inf
    x[1, -1] = -np.nan
    return x


CASES = (
    *(Case(f"ties, {size}", with_ties(size)) for size in (1, 2, 31, 33, 127, 128, 129, 1000)),
    Case("every place", np.eye(77, dtype=np.float32)),
    Case("many rows", np.random.default_rng(0).integers(-40, 40, (37, 1500)).astype(np.float32)),
    Case("all masked", np.full((2, 130), -np.inf, np.float32)),
    *(Case(f"nan, {size}", with_nan(size)) for size in (7, 128, 300, 1000, 49_152)),
)


class RowsTest(OpTest):
    cases = CASES
    usual = ("ties, 31", "ties, 129")
    by_row = (0,)
    exact = ("xla", "numba")

    def arguments(self, case):
        return (jnp.asarray(case.x),)


class TestArgmax(RowsTest):
    op = argmax

    def definition(self, case, x):
        return np.argmax(x, axis=-1).astype(np.int32)


class TestRowMax(RowsTest):
    op = row_max

    def definition(self, case, x):
        return np.max(x, axis=-1)


class TestGumbelArgmax(RowsTest):
    """Of rows with every argument, those that are not sampled; what is drawn is tested below."""

    op = gumbel_argmax
    cases = tuple(case for case in CASES if "nan" not in case.name)
    by_row = (0, 1, 2)

    def arguments(self, case):
        x = jnp.asarray(case.x.reshape(-1, case.x.shape[-1]))
        keys = np.random.default_rng(1).integers(2**32, size=(len(x), 2), dtype=np.uint32)
        return x, jnp.asarray(keys), jnp.zeros(len(x), bool)

    def definition(self, case, x, keys, sampled):
        return np.argmax(x, axis=-1).astype(np.int32)


@pytest.mark.parametrize("vocabulary", [1, 2, 31, 33, 1001, 40_000])
def test_draws_what_logits_and_noise_in_float64_draw(vocabulary, implementation):
    rng = np.random.default_rng(vocabulary)
    rows = 200 if vocabulary < 2000 else 20
    logits = rng.normal(size=(rows, vocabulary)).astype(np.float32)
    sampled = np.arange(rows) % 4 > 0
    seed = rng.integers(2**32, size=(rows, 2), dtype=np.uint32)
    keys = random.row_keys(jnp.asarray(seed), jnp.arange(rows), Purpose.BONUS)
    ids = np.asarray(draw(logits, keys, sampled, implementation=implementation))
    words = np.asarray(jax.jit(random.bits, static_argnums=1)(keys, vocabulary)).astype(np.float64)
    scores = logits + np.where(sampled[:, None], -np.log(-np.log1p(-(words + 0.5) / 2**32)), 0)
    # Scores nearer than float32 tells are as good.
    assert (scores[np.arange(rows), ids] >= scores.max(axis=-1) - 1e-5).all()
    assert (ids[~sampled] == logits.argmax(axis=-1)[~sampled]).all()
    if vocabulary == 1001:
        assert len(set(ids.tolist())) > 150


def test_a_row_draws_the_same_alone(implementation):
    logits = np.random.default_rng(0).normal(size=(7, 1001)).astype(np.float32)
    keys = random.row_keys(jnp.zeros((7, 2), jnp.uint32), jnp.arange(7), Purpose.DRAFT)
    ids = draw(logits, keys, np.ones(7, bool), implementation=implementation)
    for i in range(7):
        one = slice(i, i + 1)
        alone = draw(logits[one], keys[one], np.ones(1, bool), implementation=implementation)
        assert alone[0] == ids[i]


@pytest.mark.parametrize("poison", [np.nan, -np.inf, np.inf])
def test_a_poisoned_row_gives_an_id_in_range_and_harms_no_other(poison, implementation):
    logits = np.random.default_rng(0).normal(size=(3, 1001)).astype(np.float32)
    keys = random.row_keys(jnp.zeros((3, 2), jnp.uint32), jnp.arange(3), Purpose.DRAFT)
    expected = draw(logits, keys, np.ones(3, bool), implementation=implementation)
    logits[1] = poison
    ids = np.asarray(draw(logits, keys, np.ones(3, bool), implementation=implementation))
    np.testing.assert_array_equal(ids[::2], expected[::2])
    assert 0 <= ids[1] < 1001


@pytest.mark.parametrize("parts", [2, 3])
def test_over_parts_equals_the_whole_ties_and_nan_included(parts):
    """A mapped axis stands for that of a mesh."""
    x = np.random.default_rng(parts).integers(-3, 3, (50, 3, 12)).astype(np.float32)
    x[::5, 1, 4:] = np.nan
    x[::7, 2] = -np.inf
    of_parts = np.stack(np.split(x, parts, axis=-1))
    best = jax.jit(jax.vmap(partial(argmax, axis="devices"), axis_name="devices"))(of_parts)
    for on_device in best:
        np.testing.assert_array_equal(on_device, np.argmax(x, -1))


def test_the_kernels_noise_equals_float64_to_the_end_of_its_tail():
    """What float32 loses when u is near 1 must be near 0."""
    call = pytest.importorskip("jaxspec_kernels.calls.numba_call", reason="needs Numba")
    from jaxspec_kernels.argmax.numba_kernel import gumbel
    from jaxspec_kernels.calls.vector_code import VectorCode
    from numba import njit, types

    @call.intrinsic
    def noise_at(typing_context, word, result):
        def generate(context, builder, signature, arguments):
            code = VectorCode(builder, 16)
            word, result = arguments
            code.store(gumbel(code, code.load(word, code.integers)), result)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    @njit
    def noise_of(words, noise):
        for i in range(0, len(words), 16):
            noise_at(words[i:].ctypes.data, noise[i:].ctypes.data)

    words = [np.arange(160), np.geomspace(160, 2**32 - 1, 3200), 2**32 - 1 - np.arange(160)]
    words = np.concatenate(words).astype(np.uint32)
    noise = np.empty(len(words), np.float32)
    noise_of(words, noise)
    u = np.minimum((words.astype(np.float32) + np.float32(0.5)).astype(np.float64) / 2**32, 1 - 2.0**-24)
    expected = -np.log(-np.log1p(-u))
    assert expected.max() > 22
    assert expected.min() < -2.8
    np.testing.assert_allclose(noise, expected, rtol=3e-7, atol=3e-7)
