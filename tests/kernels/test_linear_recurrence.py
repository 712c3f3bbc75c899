"""Linear recurrences, of a step's rows and of prompts, against their definitions in float64, row by row."""

from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernel_calls import recurrence_scan_arguments, recurrence_step_arguments
from bench.kernel_cases.linear_recurrence import LARGE_SCANS, LARGE_STEPS, SCANS, STEPS
from jaxspec_kernels.linear_recurrence import DeltaRule, recurrence_scan, recurrence_step
from op_base import OpTest

WAYS = ("", "Mamba-2, ")
"""What the names of cases begin with, of the gated delta rule and of Mamba-2."""


class DeltaText:
    """A state, and the rows that change it one after another by the gated delta rule."""

    def __init__(self, state, inputs, rule):
        self.state, self.inputs = (
            np.array(x, np.float64) for x in (state, inputs)
        )  # [H, r, D, V], [H, W-1, C]
        weights = rule.conv, rule.log_decay, rule.step_bias
        self.conv, self.log_decay, self.step_bias = (np.asarray(x, np.float64) for x in weights)

    def read(self, row):
        """The output [H, r, V] of a row [H, F]."""
        heads, group, size, _ = self.state.shape
        channels = self.conv.shape[2]
        text = np.concatenate([self.inputs, row[:, None, :channels]], axis=1)
        self.inputs = text[:, 1:]
        total = (text * self.conv).sum(axis=1)
        active = total / (1 + np.exp(-total))
        query, key = (unit(active[:, i * size : (i + 1) * size]) for i in range(2))
        value = active[:, 2 * size :].reshape(heads, group, -1)
        strength = 1 / (1 + np.exp(-row[:, channels : channels + group]))
        step = np.logaddexp(0, row[:, channels + group :] + self.step_bias)
        decay = np.exp(-np.exp(self.log_decay) * step)
        self.state = self.state * decay[..., None, None]
        known = np.einsum("hrkv,hk->hrv", self.state, key)
        change = strength[..., None] * (value - known)
        self.state = self.state + np.einsum("hk,hrv->hrkv", key, change)
        return np.einsum("hrkv,hk->hrv", self.state, query) * size**-0.5


def unit(x):
    return x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + 1e-6)


class MambaText:
    """As `DeltaText`, by Mamba-2."""

    def __init__(self, state, inputs, rule):
        self.state, self.inputs = (
            np.array(x, np.float64) for x in (state, inputs)
        )  # [H, r, D, P], [H, W-1, C]
        weights = rule.conv, rule.conv_bias, rule.log_decay, rule.step_bias, rule.skip
        self.conv, self.bias, self.log_decay, self.step_bias, self.skip = (
            0 if x is None else np.asarray(x, np.float64) for x in weights
        )

    def read(self, row):
        """The output [H, r, P] of a row [H, F]."""
        heads, group, size, value_size = self.state.shape
        channels, values = self.conv.shape[2], group * value_size
        text = np.concatenate([self.inputs, row[:, None, :channels]], axis=1)
        self.inputs = text[:, 1:]
        total = (text * self.conv).sum(axis=1) + self.bias
        active = total / (1 + np.exp(-total))
        value = active[:, :values].reshape(heads, group, -1)
        key, query = active[:, values : values + size], active[:, values + size :]
        step = np.logaddexp(0, row[:, channels:] + self.step_bias)
        decay = np.exp(-np.exp(self.log_decay) * step)
        added = np.einsum("hk,hrv->hrkv", key, step[..., None] * value)
        self.state = self.state * decay[..., None, None] + added
        return np.einsum("hrkv,hk->hrv", self.state, query) + self.skip[..., None] * value


def text_by(rule):
    return DeltaText if isinstance(rule, DeltaRule) else MambaText


class RecurrenceTest(OpTest):
    bound: ClassVar = {"float32": 3e-6, "bfloat16": 2e-2}

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


class TestRecurrenceStep(RecurrenceTest):
    op = recurrence_step
    cases = (*STEPS, *LARGE_STEPS)
    usual = tuple(way + name for way in WAYS for name in ("odd sizes, empty slots", "a wide head"))
    by_row = (3, 4, 5)
    in_place = (0, 1, 2)
    exact = ("numba", "triton")  # XLA on a CPU sums products of wide heads in an order of its own

    @staticmethod
    def is_for(case, implementation):
        return case not in LARGE_STEPS or implementation == "triton"

    def arguments(self, case):
        return recurrence_step_arguments(case, 0)

    def definition(self, case, state, inputs, pending, rows, place, unapplied, rule):
        state, inputs, pending = (np.array(x, np.float64) for x in (state, inputs, pending))
        groups, count = rows.shape[:2]
        outputs = np.zeros((groups, count, *state.shape[1:3], state.shape[4]))
        for g, slot in enumerate(place):
            if slot >= len(state):
                continue
            text = text_by(rule)(state[slot], inputs[slot], rule)
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


class TestRecurrenceScan(RecurrenceTest):
    op = recurrence_scan
    cases = (*SCANS, *LARGE_SCANS)
    usual = tuple(f"{way}odd sizes" for way in WAYS)
    by_row = (2, 3, 4, 5, 6, 7)
    in_place = (0, 1)
    exact = ("xla", "triton")

    @staticmethod
    def is_for(case, implementation):
        return case not in LARGE_SCANS or implementation == "triton"

    def arguments(self, case):
        return recurrence_scan_arguments(case, 0)

    def definition(self, case, state, inputs, rows, count, is_start, source, place, copy, rule):
        state, inputs = (np.array(x, np.float64) for x in (state, inputs))
        outputs = np.zeros((*rows.shape[:2], *state.shape[1:3], state.shape[4]))
        for g in range(len(rows)):
            began = (np.zeros_like(x[0]) if is_start[g] else x[source[g]] for x in (state, inputs))
            text = text_by(rule)(*began, rule)
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


@pytest.mark.parametrize("cut", [1, 3, 4, 7])
@pytest.mark.parametrize("way", WAYS)
def test_pieces_of_a_prompt_are_the_prompt(way, cut):
    """Groups shorter than the convolution is wide, in one pass and in several."""
    (case,) = (case for case in SCANS if case.name == f"{way}short groups")
    case = replace(case, texts=1, chunks=1, rows=10, short=0)
    state, inputs, rows, _, _, _, place, copy, rule = recurrence_scan_arguments(case, 1)
    scan = jax.jit(recurrence_scan)

    def read(state, inputs, *pieces):
        width = max(stop - start for start, stop in pieces)
        padded = [
            jnp.pad(rows[0, start:stop], ((0, width - stop + start), (0, 0), (0, 0)), constant_values=jnp.nan)
            for start, stop in pieces
        ]
        count = jnp.asarray([stop - start for start, stop in pieces], jnp.int32)
        each = [jnp.full(len(pieces), x[0], x.dtype) for x in (place, place, copy)]
        is_start = jnp.asarray([start == 0 for start, _ in pieces])
        state, inputs, outputs = scan(state, inputs, jnp.stack(padded), count, is_start, *each, rule)
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
