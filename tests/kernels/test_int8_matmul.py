"""Products with rows of 8 bits: the definition, whatever instruction multiplies and whatever runs beside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.matmul import matmul, pack
from packed_weights import FORMS, OUTPUTS, WIDTH, rounded, weight

pytestmark = pytest.mark.skipif(matmul.why_not("numba") is not None, reason=f"{matmul.why_not('numba')}")
numba_int8 = pytest.importorskip("jaxspec_kernels.matmul.numba_int8", reason="needs Numba")

INTEGER_FORMS = [form for form in FORMS if form != "bfloat16"]
PATHS = numba_int8.available_paths()
# Every form on every path, with each of both blocks and numbers of rows in turn.
CASES = [
    (form, (16, 32)[(i + j) % 2], path, (1, 2)[(i // 2 + j // 2) % 2])
    for i, form in enumerate(INTEGER_FORMS)
    for j, path in enumerate(PATHS)
]


def rows(count):
    x = np.random.default_rng(1).standard_normal((count, WIDTH), np.float32)
    x[:, :32] *= 100
    return x


@pytest.mark.parametrize("row_block", [16, 32])
@pytest.mark.parametrize("form", INTEGER_FORMS)
def test_equals_the_definition(form, row_block):
    packed, values = weight(form, row_block=row_block)
    assert packed.row_block == min(row_block, packed.block)
    assert (packed.form == "int6") == (form in ("Q5_K", "Q6_K"))
    x = rows(2)
    y = numba_int8.int8_matmul(jnp.asarray(x), packed, path=PATHS[0])
    expected = rounded(x, packed.row_block) @ values.astype(np.float64)
    assert y.shape == (2, OUTPUTS)
    assert np.linalg.norm(y - expected) / np.linalg.norm(expected) < 1e-6


@pytest.mark.parametrize(
    ("form", "row_block", "path", "count"), [case for case in CASES if case[2] != PATHS[0]]
)
def test_every_path_gives_the_same_numbers(form, row_block, path, count):
    packed, _ = weight(form, row_block=row_block)
    x = jnp.asarray(rows(count))
    best = numba_int8.int8_matmul(x, packed, path=PATHS[0])
    np.testing.assert_array_equal(numba_int8.int8_matmul(x, packed, path=path), best)


@pytest.mark.parametrize("form", ["Q4_1", "Q8_0", "MXFP4"])
def test_a_row_does_not_depend_on_those_beside_it(form):
    packed, _ = weight(form)
    x = jnp.asarray(rows(19))
    product = jax.jit(numba_int8.int8_matmul)
    alone = np.concatenate([product(row[None], packed) for row in x])
    for count in (3, 19):
        np.testing.assert_array_equal(product(x[:count], packed), alone[:count])


@pytest.mark.parametrize("path", PATHS)
def test_the_largest_integers_are_summed_exactly(path):
    packed, _ = weight("Q8_0")
    values = jnp.where(jnp.arange(WIDTH // 4)[:, None, None] % 2, jnp.int8(127), jnp.int8(-128))
    full = jax.tree.map(jnp.ones_like, packed)
    values = jnp.broadcast_to(values, full.values.shape).astype(jnp.int8)
    ends = type(packed)(values, full.scale, None, packed.shape)
    x = np.full((2, WIDTH), 127, np.float32)
    y = numba_int8.int8_matmul(jnp.asarray(x), ends, path=path)
    assert (np.asarray(y) == 127 * (WIDTH // 2) * (127 - 128)).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("path", PATHS)
def test_the_largest_4_bit_integers_are_summed_exactly(path, sign):
    packed, _ = weight("Q4_1")
    full = jax.tree.map(jnp.ones_like, packed)
    values = jax.lax.bitcast_convert_type(jnp.full(packed.values.shape, 255, jnp.uint8), packed.values.dtype)
    ends = type(packed)(values, full.scale, 0 * full.offset, packed.shape)
    for count in (1, 2):
        x = np.full((count, WIDTH), sign * 127, np.float32)
        y = numba_int8.int8_matmul(jnp.asarray(x), ends, path=path)
        assert (np.asarray(y) == sign * 127 * 15 * WIDTH).all()


@pytest.mark.parametrize("row_block", [16, 32])
@pytest.mark.parametrize("ends", [(31, 31), (-32, -32), (-32, 31)])
@pytest.mark.parametrize("path", PATHS)
def test_the_largest_6_bit_integers_are_summed_exactly(path, ends, row_block):
    values = np.tile(np.asarray(ends, np.int8), (OUTPUTS, WIDTH // 2))
    ones = np.ones((OUTPUTS, WIDTH // 32), np.float32)
    packed = jax.tree.map(jnp.asarray, pack(values, ones, None, (WIDTH, OUTPUTS), row_block=row_block))
    assert packed.form == "int6"
    x = np.tile(np.float32([127, np.sign(ends[0] * ends[1]) * 127]), (2, WIDTH // 2))
    for sign in (1, -1):
        y = numba_int8.int8_matmul(jnp.asarray(sign * x), packed, path=path)
        assert (np.asarray(y) == sign * x[0] @ values[0]).all()


@pytest.mark.parametrize("ends", [(-33, 31), (-32, 32)])
def test_integers_that_do_not_fit_into_6_bits_take_8(ends):
    values = np.tile(np.asarray(ends, np.int8), (OUTPUTS, WIDTH // 2))
    packed = pack(values, np.ones((OUTPUTS, WIDTH // 32), np.float32), None, (WIDTH, OUTPUTS))
    assert packed.form == "int8"
    np.testing.assert_array_equal(np.asarray(packed), values.T)


@pytest.mark.parametrize("form", ["Q4_1", "Q8_0", "MXFP4"])
def test_what_is_no_number_stays_in_its_row(form):
    packed, _ = weight(form)
    x = rows(3)
    good = np.asarray(numba_int8.int8_matmul(jnp.asarray(x), packed))
    for bad in (np.nan, np.inf):
        x[1, 40] = bad
        y = np.asarray(numba_int8.int8_matmul(jnp.asarray(x), packed))
        assert not np.isfinite(y[1]).any()
        np.testing.assert_array_equal(y[[0, 2]], good[[0, 2]])


@pytest.mark.parametrize("size", [0, 1e-42, 1e-36, 1e30])
def test_rows_of_any_size(size):
    packed, values = weight("Q8_0")
    x = rows(1) * np.float32(size)
    y = np.asarray(numba_int8.int8_matmul(jnp.asarray(x), packed))
    expected = x.astype(np.float64) @ values
    assert np.linalg.norm(y - expected) <= np.linalg.norm(expected) * 0.01 + 1e-28


@pytest.mark.parametrize("row_block", [16, 32])
def test_the_product_of_a_weight_with_int8_activations(row_block):
    packed, values = weight("Q4_1", activations="int8", row_block=row_block)
    x = rows(2)
    y = matmul(jnp.asarray(x), packed)
    np.testing.assert_array_equal(y, numba_int8.int8_matmul(jnp.asarray(x), packed))
    reference = matmul(jnp.asarray(x), packed, implementation="xla")
    expected = rounded(x, row_block) @ values.astype(np.float64)
    assert np.linalg.norm(reference - expected) / np.linalg.norm(expected) < 1e-6


@pytest.mark.parametrize(
    ("features", "paths"),
    [
        ("avx512f avx512bw avx512vl avx512vnni avx2", ("vnni512", "vnni256", "avx2", "generic")),
        ("avx2 avxvnni", ("vnni256", "avx2", "generic")),
        ("avx2 avx512f avx512bw", ("avx2", "generic")),
        ("sse2", ("generic",)),
        ("", ("generic",)),
    ],
)
def test_a_processor_goes_the_ways_that_it_has(features, paths):
    assert numba_int8.paths_with(frozenset(features.split())) == paths
