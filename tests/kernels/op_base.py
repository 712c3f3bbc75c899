"""The one test base of operations, which every implementation that can run here goes through."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.op import Op


class OpTest:
    """What every implementation of an operation is held to. A subclass `Test…` describes the operation.

    The tests take `implementation`, and with it `case`, one of `cases`, or `usual_case`, one of those that
    `usual` names (conftest.py). A test that does not apply to an operation is left out.

    Attributes:
      op: the operation.
      cases: what it is called for; each has a `name`.
      usual: names of the cases for tests that are not about sizes; they have more than one row.
      bound: the largest relative error of floats, as a ratio of norms, or one for each `case.dtype`; with 0,
        every bit must agree.
      smallest: results of a smaller norm than this are compared as if they had it.
      by_row: positions of the arguments whose first axis is rows that do not depend on each other.
      in_place: positions of the arguments that are updated; they are the first results.
      only_updates: whether they are the only results.
      exact: implementations that give a row the same bits whatever rows are beside it.
      differentiable: positions of the arguments that gradients are taken of.
    """

    op: ClassVar[Op]
    cases: ClassVar[Sequence[Any]]
    usual: ClassVar[Sequence[str]]
    bound: ClassVar[float | Mapping[str, float]] = 0.0
    smallest: ClassVar[float] = 0.0
    by_row: ClassVar[tuple[int, ...]]
    in_place: ClassVar[tuple[int, ...]] = ()
    only_updates: ClassVar[bool] = False
    exact: ClassVar[Sequence[str]] = ("numba",)
    differentiable: ClassVar[tuple[int, ...]] = ()

    def arguments(self, case: Any) -> tuple:
        """The arguments of a case; NaN is wherever nothing may be read."""
        raise NotImplementedError

    def options(self, case: Any) -> dict[str, Any]:
        """The keyword arguments of a case."""
        return {}

    def definition(self, case: Any, *given: Any) -> Any:
        """The results by NumPy, from its arrays, with NaN or infinity wherever the operation must give it.

        A result in float64 stands for one of `dtype`; any other has the dtype of the operation's result."""
        raise NotImplementedError

    def dtype(self, case: Any) -> Any:
        """The dtype of results that the definition gives in float64."""
        return jnp.dtype(getattr(case, "dtype", "float32"))

    @staticmethod
    def is_for(case: Any, implementation: str) -> bool:
        """Whether an implementation is tested with a case: not if it takes too long there."""
        return True

    def run(self, case: Any, given: Sequence, implementation: str) -> list:
        """The results of a case as a list, from a compiled program."""
        operation = partial(self.op, **self.options(case), implementation=implementation)
        return jax.tree.leaves(jax.jit(operation)(*given))

    def expected(self, case: Any, given: Sequence) -> Any:
        """The results of the definition, from arrays of NumPy."""
        return self.definition(case, *(np.asarray(x) if isinstance(x, jax.Array) else x for x in given))

    def check(self, case: Any, results: Sequence, expected: Any) -> None:
        """Fails unless results are those that are expected, within the bound."""
        bound = self.bound[case.dtype] if isinstance(self.bound, Mapping) else self.bound
        arrays = map(np.asarray, jax.tree.leaves(expected))
        for result, exact in zip(map(np.asarray, results), arrays, strict=True):
            assert result.shape == exact.shape
            if exact.dtype.kind not in "fV":
                np.testing.assert_array_equal(result, exact, strict=True)
                continue
            assert result.dtype == (self.dtype(case) if exact.dtype == np.float64 else exact.dtype)
            wide, exact = result.astype(np.float64), exact.astype(np.float64)
            is_finite = np.isfinite(exact)
            np.testing.assert_array_equal(wide[~is_finite], exact[~is_finite])
            error = np.linalg.norm(wide[is_finite] - exact[is_finite])
            assert error <= bound * max(np.linalg.norm(exact[is_finite]), self.smallest)

    def rows(self, given: Sequence, chosen: Any) -> list:
        """The arguments of some rows."""
        parts = list(given)
        for i in self.by_row:
            parts[i] = jax.tree.map(lambda x: x[chosen], parts[i])
        return parts

    @classmethod
    def num_whole(cls) -> int:
        """How many results are not by row; they come first."""
        return sum(i not in cls.by_row for i in cls.in_place)

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "op"):
            return  # a base of several operations
        has_rows = bool(cls.by_row)
        applies = {
            "test_there_may_be_no_rows": has_rows,
            "test_a_row_is_the_same_in_any_company": has_rows and not cls.only_updates,
            "test_what_is_no_number_stays_in_its_row": has_rows and not cls.only_updates,
            "test_updates_its_buffers_in_place": bool(cls.in_place),
            "test_gradients_equal_those_of_the_definition": bool(cls.differentiable),
        }
        for name in (name for name, is_asked in applies.items() if not is_asked):
            setattr(cls, name, None)

    def test_equals_the_definition(self, case, implementation):
        given = self.arguments(case)
        self.check(case, self.run(case, given, implementation), self.expected(case, given))

    def test_arguments_may_have_any_layout(self, usual_case, implementation):
        """XLA passes on the layout that what computed an argument gave it."""
        given = self.arguments(usual_case)

        def from_transposed(*given):
            operation = partial(self.op, **self.options(usual_case), implementation=implementation)
            return operation(*jax.tree.map(jnp.transpose, given))

        results = jax.tree.leaves(jax.jit(from_transposed)(*jax.tree.map(jnp.transpose, given)))
        self.check(usual_case, results, self.expected(usual_case, given))

    def test_there_may_be_no_rows(self, usual_case, implementation):
        given = self.rows(self.arguments(usual_case), slice(0, 0))
        results = self.run(usual_case, given, implementation)
        for i, result in zip(self.in_place, results, strict=False):
            np.testing.assert_array_equal(result, given[i], strict=True)
        for result in results[self.num_whole() :]:
            assert result.shape[0] == 0

    def test_a_row_is_the_same_in_any_company(self, usual_case, implementation):
        given = self.arguments(usual_case)
        together = self.run(usual_case, given, implementation)
        count = len(jax.tree.leaves(given[self.by_row[0]])[0])
        for chosen in (slice(0, 1), slice(count - 1, count), slice(0, count - 1)):
            results = self.run(usual_case, self.rows(given, chosen), implementation)
            for part, whole in list(zip(results, together, strict=True))[self.num_whole() :]:
                if implementation in self.exact:
                    np.testing.assert_array_equal(part, whole[chosen])
                else:
                    self.check(usual_case, [part], np.asarray(whole[chosen]))

    def test_what_is_no_number_stays_in_its_row(self, usual_case, implementation):
        given = self.arguments(usual_case)
        good = self.run(usual_case, given, implementation)
        poisoned = list(given)
        for i in set(self.by_row) - set(self.in_place):
            if jnp.issubdtype(given[i].dtype, jnp.floating):
                poisoned[i] = given[i].at[1].set(jnp.nan)
        results = self.run(usual_case, poisoned, implementation)
        for result, expected in list(zip(results, good, strict=True))[self.num_whole() :]:
            others = np.arange(len(result)) != 1
            np.testing.assert_array_equal(result[others], expected[others])

    def test_updates_its_buffers_in_place(self, usual_case, implementation):
        """In a loop as well, where XLA would copy what is read after it was updated."""
        given = list(self.arguments(usual_case))
        buffers = [given[i] for i in self.in_place]

        def loop(buffers, given):
            def update(_, buffers):
                for i, buffer in zip(self.in_place, buffers, strict=True):
                    given[i] = buffer
                operation = partial(self.op, **self.options(usual_case), implementation=implementation)
                return jax.tree.leaves(operation(*given))[: len(buffers)]

            return jax.lax.fori_loop(0, 3, update, buffers)

        compiled = jax.jit(loop, donate_argnums=0).lower(buffers, given).compile()
        memory, size = compiled.memory_analysis(), sum(buffer.nbytes for buffer in buffers)
        assert memory.alias_size_in_bytes == size
        assert memory.temp_size_in_bytes < size
        for buffer in buffers:
            shape = re.escape(f"[{','.join(map(str, buffer.shape))}]")
            assert re.search(rf"= \w+{shape}", compiled.as_text())
            assert not re.search(rf"= \w+{shape}\S* (copy|transpose)\(", compiled.as_text())

    def test_gradients_equal_those_of_the_definition(self, usual_case, implementation):
        """In a random direction, by differences of float64."""
        given, rng = self.arguments(usual_case), np.random.default_rng(7)
        weights = [rng.standard_normal(x.shape) for x in self.run(usual_case, given, implementation)]
        direction = [rng.standard_normal(given[i].shape) for i in self.differentiable]

        def weighted(results):
            pairs = zip(jax.tree.leaves(results), weights, strict=True)
            return sum((result * weight).sum() for result, weight in pairs)

        def moved(step):
            arrays = list(given)
            for i, along in zip(self.differentiable, direction, strict=True):
                arrays[i] = np.asarray(given[i], np.float64) + step * along
            return weighted(self.definition(usual_case, *arrays))

        def loss(*given):
            return weighted(self.op(*given, **self.options(usual_case), implementation=implementation))

        gradients = jax.jit(jax.grad(loss, argnums=self.differentiable))(*given)
        slope = sum(
            (np.asarray(gradient, np.float64) * along).sum()
            for gradient, along in zip(gradients, direction, strict=True)
        )
        np.testing.assert_allclose(slope, (moved(1e-4) - moved(-1e-4)) / 2e-4, rtol=1e-4)
