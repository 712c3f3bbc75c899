"""Operations that write rows into the slots of a paged cache, and into nothing else."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from bench import kernel_cases
from jaxspec_kernels.latent_write import latent_write
from jaxspec_kernels.rope_kv_write import rope_kv_write
from op_base import OpTest

BOUND = {"float32": 3e-7, "bfloat16": 2.0**-8}


class WriteTest(OpTest):
    """A subclass gives the cache's axes after that of pages, and what is written at a page and an offset."""

    usual = ("odd sizes",)
    in_place = (0,)

    def axes(self, case):
        return case.kv_heads, 2, case.page_size, case.head_dim

    def new_rows(self, case, rng):
        """The arguments after the slots, whose first axes are slots and rows."""
        raise NotImplementedError

    def arguments(self, case):
        rng, dtype = np.random.default_rng(0), jnp.dtype(case.dtype)
        cache = jnp.full((case.pages, *self.axes(case)), jnp.nan, dtype)
        owned = case.page_size + rng.permutation((case.pages - 1) * case.page_size)
        slots = owned[: case.slots * case.rows].reshape(case.slots, case.rows)
        return cache, jnp.asarray(slots, jnp.int32), *self.new_rows(case, rng)

    def places(self, case, slots):
        """(slot, row), page and offset of every row."""
        for row, slot in np.ndenumerate(slots):
            yield row, *divmod(int(slot), case.page_size)

    def test_rows_without_a_page_share_page_0_and_touch_no_other(self, usual_case, implementation):
        cache, slots, *rows = self.arguments(usual_case)
        results = self.run(usual_case, (cache, jnp.zeros_like(slots), *rows), implementation)
        written = np.asarray(results[0])
        assert np.isnan(written[1:]).all()
        assert np.isfinite(written[0, :, :, 0]).all()

    def test_a_cache_of_another_dtype_holds_the_rounded_values(self, case, implementation):
        cache, *rest = self.arguments(replace(case, dtype="float32"))
        written, *others = self.run(case, (cache.astype(jnp.float16), *rest), implementation)
        expected, *same = self.run(case, (cache, *rest), implementation)
        assert written.dtype == jnp.float16
        np.testing.assert_array_equal(written, expected.astype(jnp.float16))
        for result, other in zip(others, same, strict=True):
            np.testing.assert_array_equal(result, other)


class TestLatentWrite(WriteTest):
    op = latent_write
    cases = kernel_cases.latent_write.CASES
    by_row = (1, 2)
    only_updates = True

    def axes(self, case):
        return 1, 1, case.page_size, case.size

    def new_rows(self, case, rng):
        return (jnp.asarray(rng.normal(size=(case.slots, case.rows, case.size)), case.dtype),)

    def definition(self, case, cache, slots, rows):
        cache = np.array(cache)
        for row, page, offset in self.places(case, slots):
            cache[page, 0, 0, offset] = rows[row]
        return cache


class TestRopeKvWrite(WriteTest):
    """Keys and queries are rotated as complex numbers are."""

    op = rope_kv_write
    cases = kernel_cases.rope_kv_write.CASES
    bound = BOUND
    by_row = (1, 2, 3, 4)

    def new_rows(self, case, rng):
        rows = (case.slots, case.rows)
        projected = rng.normal(size=(*rows, case.kv_heads, case.group + 2, case.head_dim))
        angles = rng.uniform(-9, 9, size=(*rows, case.head_dim // 2))
        cos, sin = (jnp.asarray(turn(angles), jnp.float32) for turn in (np.cos, np.sin))
        return jnp.asarray(projected, case.dtype), cos, sin

    def definition(self, case, cache, slots, projected, cos, sin):
        wide, half = np.asarray(projected, np.float64), case.head_dim // 2
        turn = (np.asarray(cos) + 1j * np.asarray(sin))[:, :, None, None]
        turned = (wide[..., :half] + 1j * wide[..., half:]) * turn
        turned = np.concatenate([turned.real, turned.imag], axis=-1)
        cache = np.array(cache, np.float64)
        for row, page, offset in self.places(case, slots):
            cache[page, :, 0, offset], cache[page, :, 1, offset] = turned[row][:, -2], wide[row][:, -1]
        return cache, turned[..., :-2, :]

    def test_values_are_not_rounded(self, case, implementation):
        given = self.arguments(case)
        written = self.run(case, given, implementation)[0]
        expected, _ = self.expected(case, given)
        np.testing.assert_array_equal(np.asarray(written[:, :, 1], np.float64), expected[:, :, 1])
