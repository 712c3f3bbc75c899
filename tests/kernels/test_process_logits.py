import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.process_logits import process_logits
from op_base import OpTest

SETTINGS = list(itertools.product([0.6, 1.7], [0, 1, 5, 5000], [0.05, 0.83, 1.0], [0.0, 0.02, 1.0]))
"""Temperature, top-k, top-p and min-p of each slot."""


class Case(NamedTuple):
    name: str
    rows: int
    vocabulary: int
    settings: list = SETTINGS
    truncated: bool = True


def by_sorting(logits, temperature, top_k, top_p, min_p):
    """One row by a sort in float64."""
    if not temperature:
        return logits
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    keep = p >= min_p
    if top_k:
        keep &= scaled >= np.sort(scaled)[-min(top_k, len(scaled))]
    if top_p < 1:
        order = np.argsort(-scaled, kind="stable")
        left = np.where(keep, p, 0)[order]
        before = np.cumsum(left) - left
        last = np.flatnonzero(before < top_p * left.sum())[-1]
        keep &= scaled >= scaled[order[last]]
    return np.where(keep, scaled, -np.inf)


class TestProcessLogits(OpTest):
    """What is drawn from equals a sort."""

    op = process_logits
    cases = (
        *(Case(f"vocabulary of {size}", 2, size) for size in (1, 17, 1003)),
        Case("many rows", 3, 5000, [(1.3, k, 0.9, 0.0) for k in (0, 1, 2, 40, 4999, 5000, 6000)]),
        Case("greedy rows too", 2, 50, [(0.0, 3, 0.5, 0.5), (2.0, 3, 0.5, 0.5), (1.0, 0, 1.0, 0.0)]),
        Case("no truncation", 2, 50, [(t, 3, 0.5, p) for t in (0.0, 0.7) for p in (0.0, 0.4)], False),
    )
    usual = ("greedy rows too",)
    bound = 1e-6
    by_row = (0, 1, 2, 3, 4)
    exact = ("xla", "numba", "triton")

    def arguments(self, case):
        size = (len(case.settings), case.rows, case.vocabulary)
        logits = 3 * np.random.default_rng(case.vocabulary).standard_normal(size, np.float32)
        dtypes = (np.float32, np.int32, np.float32, np.float32)
        columns = zip(zip(*case.settings, strict=True), dtypes, strict=True)
        return jnp.asarray(logits), *(jnp.asarray(values, dtype) for values, dtype in columns)

    def options(self, case):
        return {"truncated": case.truncated}

    def definition(self, case, logits, temperature, top_k, top_p, min_p):
        if not case.truncated:
            top_k, top_p = np.zeros_like(top_k), np.ones_like(top_p)
        settings = temperature, top_k, top_p, min_p
        rows = [
            [by_sorting(row, *(values[b] for values in settings)) for row in slot]
            for b, slot in enumerate(logits)
        ]
        return np.array(rows)
