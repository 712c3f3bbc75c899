"""On a GPU, inside `exact`, a row has the same bits whatever is computed beside it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.random_codes import random_coded_experts, random_codes
from jaxspec_kernels.expert_matmul import expert_matmul, gated_expert_matmul, pack_mxfp4
from jaxspec_kernels.matmul import matmul
from jaxspec_kernels.op import exact, why_not
from jaxspec_kernels.packed_matmul import gated_packed_matmul, packed_matmul
from jaxspec_kernels.paged_attention import paged_attention
from jaxspec_kernels.process_logits import process_logits
from jaxspec_kernels.rms_norm import add_rms_norm, mean_of_squares, rms_norm
from jaxspec_kernels.rope_kv_write import rope_kv_write
from jaxspec_kernels.row_sum import row_sum, sum_in_order

from jaxspec.sampling.logits import log_sum_exp
from jaxspec.sampling.logprobs import Logprobs, token_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_not("triton") is not None, reason=f"Triton {why_not('triton')}"),
]

MOST = 300
NUMBERS = range(1, MOST + 1)
SOME = (1, 2, 3, 4, 5, 8, 13, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 160, 255, 256, 257, 300)


class Case(NamedTuple):
    """An operation on rows.

    Attributes:
      run: takes arrays whose first axis is rows, then `others`.
      rows: makes arrays of `MOST` rows.
      others: makes the other arguments.
      numbers: how many rows there may be.
    """

    name: str
    run: Callable[..., Any]
    rows: Callable[[np.random.Generator], tuple]
    others: Callable[[np.random.Generator], tuple] = lambda rng: ()
    numbers: Any = SOME


def normal(*shape: int, dtype: Any = jnp.bfloat16) -> Callable[[np.random.Generator], tuple]:
    """Numbers of many magnitudes, so that another order of a sum shows."""

    def make(rng: np.random.Generator) -> tuple:
        wide = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))
        return (jnp.asarray(wide, dtype),)

    return make


def product(
    width: int, columns: int, dtype: Any = jnp.bfloat16, out: Any = None, numbers: Any = SOME
) -> Case:
    return Case(
        f"{width} x {columns} {jnp.dtype(dtype)} to {jnp.dtype(out or dtype)}",
        lambda x, weight: matmul(x, weight, out_dtype=out),
        normal(MOST, width, dtype=dtype),
        normal(width, columns, dtype=dtype),
        numbers,
    )


def norm(width: int, numbers: Any = SOME) -> Case:
    return Case(
        f"norm {width}", lambda x, w: rms_norm(x, w, 1e-5), normal(MOST, width), normal(width), numbers
    )


def added_norm(width: int) -> Case:
    def rows(rng: np.random.Generator) -> tuple:
        return *normal(MOST, width)(rng), *normal(MOST, width)(rng)

    def others(rng: np.random.Generator) -> tuple:
        return *normal(width)(rng), *normal(width)(rng)

    def run(x: jax.Array, stream: jax.Array, bias: jax.Array, factors: jax.Array) -> Any:
        return add_rms_norm(x, stream, bias, factors, 1e-5)

    return Case(f"added norm {width}", run, rows, others)


def experts(packs: bool, count: int = 8, width: int = 288, columns: int = 200) -> Case:
    def rows(rng: np.random.Generator) -> tuple:
        return *normal(MOST, width)(rng), jnp.asarray(rng.integers(0, count, MOST), jnp.int32)

    def others(rng: np.random.Generator) -> tuple:
        if not packs:
            return normal(count, width, columns)(rng)
        values = rng.integers(0, 256, (count, width // 2, columns), np.uint8)
        return (pack_mxfp4(values, rng.integers(118, 126, (count, width // 32, columns), np.uint8)),)

    return Case(f"experts {'packed' if packs else 'dense'}", expert_matmul, rows, others)


def coded(name: str, width: int, columns: int, bits: int, **options: Any) -> Case:
    """A product with a weight in codes; one with few columns is summed in sections."""

    def others(rng: np.random.Generator) -> tuple:
        return (random_codes(jax.random.key(0), (width, columns), bits, **options),)

    return Case(f"{width} x {columns} in {name}", packed_matmul, normal(MOST, width), others)


def gated() -> Case:
    def others(rng: np.random.Generator) -> tuple:
        return (random_codes(jax.random.key(0), (4096, 2, 512), 4),)

    return Case("gate and up in INT4", gated_packed_matmul, normal(MOST, 4096), others)


def coded_experts(bits: int, *, is_gated: bool = False) -> Case:
    def rows(rng: np.random.Generator) -> tuple:
        return *normal(MOST, 512)(rng), jnp.asarray(rng.integers(0, 8, MOST), jnp.int32)

    def others(rng: np.random.Generator) -> tuple:
        return (random_coded_experts(jax.random.key(0), (8, 512, 2, 96), bits),)

    op = gated_expert_matmul if is_gated else expert_matmul
    return Case(f"{op.name} in codes of {bits} bits", op, rows, others)


def truncated(length: int) -> Case:
    def run(logits: jax.Array) -> Any:
        asked = jnp.full(len(logits), 0.7), jnp.full(len(logits), 50), jnp.full(len(logits), 0.9)
        return process_logits(logits[:, None], *asked, jnp.full(len(logits), 0.01), truncated=True)

    return Case(f"top-k and top-p of {length}", run, normal(MOST, length, dtype=jnp.float32))


def reported(length: int) -> Case:
    def run(logits: jax.Array) -> Any:
        return token_logprobs(logits, logits.argmax(axis=-1), Logprobs.TOP)

    return Case(f"log-probabilities of {length}", run, normal(MOST, length, dtype=jnp.float32))


def written(head_dim: int) -> Case:
    def rows(rng: np.random.Generator) -> tuple:
        angles = rng.uniform(-9, 9, (MOST, head_dim // 2))
        turns = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
        return *normal(MOST, 3, 5, head_dim)(rng), jnp.arange(16, 16 + MOST, dtype=jnp.int32), *turns

    def run(projected: jax.Array, slots: jax.Array, cos: jax.Array, sin: jax.Array) -> Any:
        cache = jnp.zeros((40, 3, 2, 16, head_dim), jnp.bfloat16)
        cache, queries = rope_kv_write(cache, slots[None], projected[None], cos[None], sin[None])
        flat = cache.transpose(0, 3, 1, 2, 4).reshape(-1, 3, 2, head_dim)
        return queries[0], flat[slots]

    return Case(f"rope {head_dim}", run, rows)


CASES = (
    product(576, 960, numbers=NUMBERS),
    product(1536, 576),
    product(4096, 6144),
    product(14336, 512),
    product(576, 49152, out=jnp.float32),
    product(200, 77, jnp.float16),
    product(2880, 32, out=jnp.float32),
    norm(64),
    norm(576, NUMBERS),
    norm(4096),
    added_norm(576),
    Case("mean of squares", mean_of_squares, normal(MOST, 3072, dtype=jnp.float32)),
    added_norm(4096),
    Case("sum", row_sum, normal(MOST, 49152, dtype=jnp.float32), numbers=NUMBERS),
    Case("long sum", row_sum, normal(MOST, 128256, dtype=jnp.float32)),
    Case("few columns", sum_in_order, normal(MOST, 8, dtype=jnp.float32)),
    Case("logarithm of a sum", log_sum_exp, normal(MOST, 32000, dtype=jnp.float32)),
    experts(packs=False),
    experts(packs=True),
    coded("FP8, blocks", 4096, 1024, 8, scale_rows=128),
    coded("FP8, blocks", 512, 28672, 8, scale_rows=128),
    coded("FP8, channels", 4096, 1024, 8, group=0),
    coded("INT4", 4096, 1024, 4),
    coded("INT4, zero points", 2048, 6144, 4, group=32, has_zero=True),
    coded("INT8", 4096, 1024, 8, group=32, is_int8=True),
    gated(),
    coded_experts(8),
    coded_experts(4),
    coded_experts(4, is_gated=True),
    truncated(49152),
    reported(49152),
    written(64),
    written(128),
)


def compiled(run: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    with exact():
        lowered = jax.jit(run).lower(*arguments)
    return lowered.compile({"xla_allow_excess_precision": False})


def assert_same_bits(results: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_a_row_does_not_depend_on_the_number_of_rows_nor_on_its_place(case):
    rng = np.random.default_rng(0)
    rows, others = case.rows(rng), case.others(rng)
    whole = jax.tree.map(np.asarray, compiled(case.run, *rows, *others)(*rows, *others))

    def check(number: int) -> None:
        # Some rows, in any order, and some of them twice.
        chosen = np.random.default_rng(number).integers(0, MOST, number)
        chosen = np.arange(number) if "rope" in case.name else chosen
        part = [x[chosen] for x in rows]
        results = compiled(case.run, *part, *others)(*part, *others)
        assert_same_bits(results, jax.tree.map(lambda x: x[chosen], whole))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(check, case.numbers))


HEADS, GROUP, PAGE = 2, 3, 16


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("window", [None, 100, 700])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_of_a_row_does_not_depend_on_its_block(head_dim, window, has_sinks):
    """The rows of a text, decoded one by one, verified, or read in chunks, alone and beside others."""
    length, slots = 9300, 3
    pages = -(-length // PAGE)
    rng = np.random.default_rng(0)
    table = jnp.asarray(1 + rng.permutation(slots * pages).reshape(slots, pages), jnp.int32)
    (cache,) = normal(1 + slots * pages, HEADS, 2, PAGE, head_dim)(rng)
    sinks = jnp.asarray(rng.standard_normal(HEADS * GROUP), jnp.bfloat16) if has_sinks else None
    (queries,) = normal(slots, length, HEADS * GROUP, head_dim)(rng)

    def run(*given: jax.Array) -> jax.Array:
        return paged_attention(*given, scale=head_dim**-0.5, sinks=sinks)

    program = jax.jit(run)

    def attend(slot: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rows [slots, rows]: `slot` of each, `positions` of all, -1 for a row that sees nothing."""
        last = jnp.asarray(positions, jnp.int32)
        first = jnp.zeros_like(last) if window is None else jnp.maximum(last - window + 1, 0)
        given = queries[slot[:, None], np.maximum(positions, 0)], cache, table[slot], first, last
        with exact():
            return np.asarray(program(*given).astype(jnp.float32))

    chosen = np.array([0, 1, 63, 64, 255, 256, 257, 300, 511, 512, 1000, 4097, 8191, 8192, 8300, 9216, 9299])
    alone = {(slot, at): attend(np.array([slot]), np.array([[at]]))[0, 0] for slot in (0, 2) for at in chosen}
    assert np.isfinite(list(alone.values())).all()
    for width in (4, 8, 32, 64, 127):
        for last in chosen[chosen >= width]:
            positions = np.arange(last - width + 1, last + 1)
            for slot in ([0], [2, 1, 0]):
                rows = np.tile(positions, (len(slot), 1))
                rows[1:2] = np.where(np.arange(width) < width // 2, rows[1:2] - width // 3, -1)
                found = attend(np.array(slot), rows)[slot.index(0)]
                for at in set(positions) & set(chosen):
                    np.testing.assert_array_equal(found[at - positions[0]], alone[0, at])
    many = np.tile(chosen, 20)[:, None]
    found = attend(np.zeros(len(many), int), many)
    for row, at in enumerate(many[:, 0]):
        np.testing.assert_array_equal(found[row, 0], alone[0, at])


@pytest.mark.parametrize("columns", [1024, 1028])
def test_all_tiles_of_a_product_give_the_same_bits(columns):
    """With rows of 16 bytes the copy engine loads the tiles of many rows, otherwise threads do."""
    from jaxspec_kernels.matmul.triton_kernel import MANY, product, tile

    rng = np.random.default_rng(0)
    (x,), (weight,) = normal(1000, 4104)(rng), normal(4104, columns)(rng)
    few = np.asarray(product(x[:40], weight, tile(40, columns), jnp.float32))
    for each in MANY:
        many = np.asarray(product(x, weight, each, jnp.float32))
        np.testing.assert_array_equal(many[:40], few)
        np.testing.assert_array_equal(np.asarray(product(x[40:], weight, each, jnp.float32)), many[40:])


def test_cublas_would_fail_these_tests():
    """What the tests are for: with XLA's products, a row depends on the number of rows."""
    rng = np.random.default_rng(0)
    (x,), (weight,) = normal(MOST, 4096)(rng), normal(4096, 1024)(rng)
    outside = jax.jit(matmul)
    whole = np.asarray(outside(x, weight).astype(jnp.float32))
    assert any(
        (np.asarray(outside(x[:n], weight).astype(jnp.float32)) != whole[:n]).any() for n in (1, 4, 40)
    )
