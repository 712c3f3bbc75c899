"""Sizes for the tests and the benchmark of `mamba_step` and `mamba_scan`."""

from dataclasses import replace

from bench.kernel_cases import delta_rule
from bench.kernel_cases.delta_rule import ScanCase, StepCase

STEPS = (*delta_rule.STEPS, replace(delta_rule.STEPS[1], name="no bias", conv_bias=False))
SCANS = (*delta_rule.SCANS, replace(delta_rule.SCANS[1], name="no bias", conv_bias=False))

# 128 heads of 64 in 8 groups, whose keys have 128 numbers.
LARGE_STEPS = tuple(
    StepCase(f"Nemotron-H-8B, {slots} x {rows}", slots, rows, rows - 1, 8, 16, 128, 64, dtype=dtype)
    for slots, rows, dtype in ((1, 4, "float32"), (1, 4, "bfloat16"), (32, 4, "bfloat16"))
)
LARGE_SCANS = tuple(
    ScanCase(f"Nemotron-H-8B, {texts} x {chunks} x 64", texts, chunks, 64, 8, 16, 128, 64, dtype="bfloat16")
    for texts, chunks in ((1, 8), (4, 8))
)
