"""Mamba-2, of a step's rows and of prompts, against its definition in float64, row by row."""

from dataclasses import replace

import numpy as np
import pytest
from bench.kernel_calls import mamba_scan_arguments, mamba_step_arguments
from bench.kernel_cases.mamba2 import LARGE_SCANS, LARGE_STEPS, SCANS, STEPS
from jaxspec_kernels.mamba2 import mamba_scan, mamba_step
from recurrence_base import ScanTest, StepTest, check_pieces


class Text:
    """A state, and the rows that change it one after another."""

    def __init__(self, state, inputs, weights):
        self.state, self.inputs = (
            np.array(x, np.float64) for x in (state, inputs)
        )  # [H, r, D, P], [H, W-1, C]
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


class TestMambaStep(StepTest):
    op, text = mamba_step, Text
    cases = (*STEPS, *LARGE_STEPS)

    @staticmethod
    def is_for(case, implementation):
        return case not in LARGE_STEPS or implementation == "triton"

    def arguments(self, case):
        return mamba_step_arguments(case, 0)


class TestMambaScan(ScanTest):
    op, text = mamba_scan, Text
    cases = (*SCANS, *LARGE_SCANS)

    @staticmethod
    def is_for(case, implementation):
        return case not in LARGE_SCANS or implementation == "triton"

    def arguments(self, case):
        return mamba_scan_arguments(case, 0)


@pytest.mark.parametrize("cut", [1, 3, 4, 7])
def test_pieces_of_a_prompt_are_the_prompt(cut):
    case = replace(SCANS[2], texts=1, chunks=1, rows=10, short=0)
    check_pieces(mamba_scan, mamba_scan_arguments(case, 1), cut)
