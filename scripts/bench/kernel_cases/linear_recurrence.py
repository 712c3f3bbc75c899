"""Sizes for the tests and the benchmark of `recurrence_step` and `recurrence_scan`."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class StepCase:
    """One step of `slots` slots, and of as many places behind them and `spare` more.

    H is `heads`, r is `group`. Each slot has `drafts` pending inputs, of which 0, 1, … count. With `empty`,
    slots 1, 4, 7, … have no rows. Without `is_delta` the rule is Mamba-2, which alone has a `conv_bias`.
    """

    name: str
    slots: int
    rows: int
    drafts: int
    heads: int
    group: int
    key_size: int
    value_size: int
    conv_width: int = 4
    empty: bool = False
    spare: int = 0
    conv_bias: bool = True
    dtype: str = "float32"
    is_delta: bool = True


@dataclass(frozen=True)
class ScanCase:
    """One pass over prompts. Each of `texts` has its rows in `chunks` groups of `rows`, each behind the one
    before it, and ends `short` rows before the end of its last group. There are as many places for copies as
    for texts, and `spare` more.

    The first text goes on from a copy, the last begins, and the others go on from their own states. With
    `copies`, each text but the last leaves a copy behind its first group, from which the next text begins.
    """

    name: str
    texts: int
    chunks: int
    rows: int
    heads: int
    group: int
    key_size: int
    value_size: int
    conv_width: int = 4
    short: int = 0
    copies: bool = False
    spare: int = 0
    conv_bias: bool = True
    dtype: str = "float32"
    is_delta: bool = True


_STEPS = (
    StepCase("one", 1, 1, 0, 1, 1, key_size=1, value_size=1, conv_width=2),
    StepCase("odd sizes, empty slots", 5, 3, 2, 3, 2, key_size=5, value_size=7, empty=True, spare=90),
    StepCase("fewer drafts", 3, 2, 4, 2, 1, key_size=8, value_size=12, conv_width=3),
    StepCase("sixteen rows", 2, 16, 15, 2, 2, key_size=16, value_size=8),
    StepCase("a wide head", 2, 4, 3, 2, 2, key_size=128, value_size=128, empty=True),
    StepCase("bfloat16", 3, 4, 3, 2, 2, key_size=32, value_size=64, dtype="bfloat16"),
)

_DELTA_STEPS = tuple(
    StepCase(f"Qwen3.5-9B, {slots} x {rows}", slots, rows, rows - 1, 16, 2, 128, 128, dtype=dtype)
    for slots, rows, dtype in ((1, 4, "float32"), (1, 4, "bfloat16"), (32, 4, "bfloat16"))
)

_SCANS = (
    ScanCase("one", 1, 1, 1, 1, 1, key_size=1, value_size=1, conv_width=2),
    ScanCase("odd sizes", 3, 1, 5, 3, 2, key_size=5, value_size=7, short=2, spare=90),
    ScanCase("short groups", 2, 5, 2, 2, 1, key_size=8, value_size=12, conv_width=6, short=1),
    ScanCase("copies", 4, 3, 3, 2, 2, key_size=16, value_size=16, copies=True, short=3),
    ScanCase("several tiles", 2, 2, 150, 1, 2, key_size=32, value_size=48, short=61),
    ScanCase("bfloat16", 3, 2, 64, 2, 2, key_size=128, value_size=128, short=7, dtype="bfloat16"),
)

_DELTA_SCANS = tuple(
    ScanCase(f"Qwen3.5-9B, {texts} x {chunks} x 64", texts, chunks, 64, 16, 2, 128, 128, dtype="bfloat16")
    for texts, chunks in ((1, 8), (4, 8))
)

# 128 heads of 64 in 8 groups, whose keys have 128 numbers.
_MAMBA_STEPS = tuple(
    StepCase(
        f"Nemotron-H-8B, {slots} x {rows}",
        *(slots, rows, rows - 1, 8, 16, 128, 64),
        dtype=dtype,
        is_delta=False,
    )
    for slots, rows, dtype in ((1, 4, "float32"), (1, 4, "bfloat16"), (32, 4, "bfloat16"))
)
_MAMBA_SCANS = tuple(
    ScanCase(
        f"Nemotron-H-8B, {texts} x {chunks} x 64",
        *(texts, chunks, 64, 8, 16, 128, 64),
        dtype="bfloat16",
        is_delta=False,
    )
    for texts, chunks in ((1, 8), (4, 8))
)


def _by_mamba(case: StepCase | ScanCase) -> Any:
    return replace(case, name=f"Mamba-2, {case.name}", is_delta=False)


STEPS: tuple[StepCase, ...] = (
    *(*_STEPS, *map(_by_mamba, _STEPS)),
    replace(_STEPS[1], name="Mamba-2, no bias", conv_bias=False, is_delta=False),
)
SCANS: tuple[ScanCase, ...] = (
    *(*_SCANS, *map(_by_mamba, _SCANS)),
    replace(_SCANS[1], name="Mamba-2, no bias", conv_bias=False, is_delta=False),
)
LARGE_STEPS = (*_DELTA_STEPS, *_MAMBA_STEPS)
LARGE_SCANS = (*_DELTA_SCANS, *_MAMBA_SCANS)
