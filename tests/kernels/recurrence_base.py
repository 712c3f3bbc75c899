"""What recurrent rules are held to, over a step's rows and over prompts."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from op_base import OpTest


class RecurrenceTest(OpTest):
    """`text`, made of a state, its last inputs and the weights, reads a text row by row."""

    bound: ClassVar = {"float32": 3e-6, "bfloat16": 2e-2}
    text: ClassVar[Callable[..., Any]]

    def check(self, case, results, expected):
        """The last inputs keep their dtype, and are those of the rows."""
        arrays = [
            np.asarray(x).astype(r.dtype) for x, r in zip(jax.tree.leaves(expected), results, strict=True)
        ]
        super().check(case, results, arrays)

    def test_updates_its_buffers_in_place(self, usual_case, implementation):
        """Of the references, XLA copies what a loop reads before it writes."""
        if implementation != "xla":
            super().test_updates_its_buffers_in_place(usual_case, implementation)


class StepTest(RecurrenceTest):
    usual = ("odd sizes, empty slots", "a wide head")
    by_row = (3, 4, 5)
    in_place = (0, 1, 2)
    exact = ("numba", "triton")  # XLA on a CPU sums products of wide heads in an order of its own

    def definition(self, case, state, inputs, pending, rows, place, unapplied, *weights):
        state, inputs, pending = (np.array(x, np.float64) for x in (state, inputs, pending))
        groups, count = rows.shape[:2]
        outputs = np.zeros((groups, count, *state.shape[1:3], state.shape[4]))
        for g, slot in enumerate(place):
            if slot >= len(state):
                continue
            text = self.text(state[slot], inputs[slot], weights)
            for i in range(unapplied[g]):
                text.read(pending[slot, i])
            for i in range(count):
                outputs[g, i] = text.read(rows[g, i].astype(np.float64))
                if i == 0:
                    state[slot], inputs[slot] = text.state, text.inputs
                else:
                    pending[slot, i - 1] = rows[g, i]
        return state, inputs, pending, outputs

    def test_what_was_not_accepted_may_be_nan(self, usual_case, implementation):
        given = list(self.arguments(usual_case))
        clean = self.run(usual_case, given, implementation)
        pending, place, unapplied = given[2], given[4], given[5]
        count = np.zeros(len(pending), int)
        slots = np.asarray(place)
        count[slots[slots < len(pending)]] = np.asarray(unapplied)[slots < len(pending)]
        is_kept = np.arange(pending.shape[1]) < count[:, None]
        given[2] = jnp.where(is_kept[..., None, None], pending, jnp.nan)
        results = self.run(usual_case, given, implementation)
        for i in (0, 1, 3):
            np.testing.assert_array_equal(results[i], clean[i])

    def test_a_row_does_not_depend_on_the_drafts_behind_it(self, usual_case, implementation):
        given = list(self.arguments(usual_case))
        whole = self.run(usual_case, given, implementation)
        for rows in range(1, given[3].shape[1]):
            part = self.run(usual_case, [*given[:3], given[3][:, :rows], *given[4:]], implementation)
            for i in (0, 1):
                np.testing.assert_array_equal(part[i], whole[i])
            np.testing.assert_array_equal(part[3], whole[3][:, :rows])


class ScanTest(RecurrenceTest):
    usual = ("odd sizes",)
    by_row = (2, 3, 4, 5, 6, 7)
    in_place = (0, 1)
    exact = ("xla", "triton")

    def definition(self, case, state, inputs, rows, count, is_start, source, place, copy, *weights):
        state, inputs = (np.array(x, np.float64) for x in (state, inputs))
        outputs = np.zeros((*rows.shape[:2], *state.shape[1:3], state.shape[4]))
        for g in range(len(rows)):
            began = (np.zeros_like(x[0]) if is_start[g] else x[source[g]] for x in (state, inputs))
            text = self.text(*began, weights)
            for i in range(count[g]):
                outputs[g, i] = text.read(rows[g, i].astype(np.float64))
            for at in (place[g], copy[g]):
                if at < len(state):
                    state[at], inputs[at] = text.state, text.inputs
        return state, inputs, outputs

    def check(self, case, results, expected):
        """Of rows that count; the others are only finite."""
        *updated, outputs = results
        outputs = np.asarray(outputs)
        assert np.isfinite(outputs).all()
        count = np.asarray(self.arguments(case)[3])
        if len(updated) == 2 and len(outputs) == len(count):
            counts = np.arange(case.rows) < count[:, None]
            outputs = np.where(counts[..., None, None, None], outputs, 0)
        super().check(case, [*updated, outputs], expected)


def check_pieces(scan, given, cut):
    """Groups shorter than the convolution is wide, in one pass and in several.

    `given` are arguments for one text of ten rows, which are cut at `cut`.
    """
    state, inputs, rows, _, _, _, place, copy, *weights = given
    scan = jax.jit(scan)

    def read(state, inputs, *pieces):
        width = max(stop - start for start, stop in pieces)
        padded = [
            jnp.pad(rows[0, start:stop], ((0, width - stop + start), (0, 0), (0, 0)), constant_values=jnp.nan)
            for start, stop in pieces
        ]
        count = jnp.asarray([stop - start for start, stop in pieces], jnp.int32)
        each = [jnp.full(len(pieces), x[0], x.dtype) for x in (place, place, copy)]
        is_start = jnp.asarray([start == 0 for start, _ in pieces])
        state, inputs, outputs = scan(state, inputs, jnp.stack(padded), count, is_start, *each, *weights)
        of_rows = [output[: stop - start] for output, (start, stop) in zip(outputs, pieces, strict=True)]
        return state, inputs, np.concatenate(of_rows)

    whole = read(state, inputs, (0, 10))
    together = read(state, inputs, (0, cut), (cut, 10))
    *half, first = read(state, inputs, (0, cut))
    *after, second = read(*half, (cut, 10))
    for results in (together, (*after, np.concatenate([first, second]))):
        for one, other in zip(jax.tree.leaves(results), jax.tree.leaves(whole), strict=True):
            # Sums in another order: some units of the last place, of outputs up to 70.
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-5)
