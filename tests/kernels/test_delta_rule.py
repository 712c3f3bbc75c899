"""The gated delta rule, of a step's rows and of prompts, against its definition in float64, row by row."""

from dataclasses import replace

import numpy as np
import pytest
from bench.kernel_calls import delta_scan_arguments, delta_step_arguments
from bench.kernel_cases.delta_rule import LARGE_SCANS, LARGE_STEPS, SCANS, STEPS
from jaxspec_kernels.delta_rule import delta_scan, delta_step
from recurrence_base import ScanTest, StepTest, check_pieces


class Text:
    """A state, and the rows that change it one after another."""

    def __init__(self, state, inputs, weights):
        self.state, self.inputs = (
            np.array(x, np.float64) for x in (state, inputs)
        )  # [H, r, D, V], [H, W-1, C]
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


class TestDeltaStep(StepTest):
    op, text = delta_step, Text
    cases = (*STEPS, *LARGE_STEPS)

    @staticmethod
    def is_for(case, implementation):
        return case not in LARGE_STEPS or implementation == "triton"

    def arguments(self, case):
        return delta_step_arguments(case, 0)


class TestDeltaScan(ScanTest):
    op, text = delta_scan, Text
    cases = (*SCANS, *LARGE_SCANS)

    @staticmethod
    def is_for(case, implementation):
        return case not in LARGE_SCANS or implementation == "triton"

    def arguments(self, case):
        return delta_scan_arguments(case, 0)


@pytest.mark.parametrize("cut", [1, 3, 4, 7])
def test_pieces_of_a_prompt_are_the_prompt(cut):
    case = replace(SCANS[2], texts=1, chunks=1, rows=10, short=0)
    check_pieces(delta_scan, delta_scan_arguments(case, 1), cut)
