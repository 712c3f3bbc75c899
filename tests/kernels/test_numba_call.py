"""Kernels compiled by Numba are registered with XLA once, whichever threads ask."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("numba")

from jaxspec_kernels import numba_call


def test_threads_that_ask_at_once_wait_for_one_registration():
    made = []

    @numba_call.once
    def target(rows: int) -> str:
        time.sleep(0.05)
        made.append(rows)
        return f"kernel_{rows}"

    with ThreadPoolExecutor(4) as pool:
        names = list(pool.map(target, [1, 1, 2, 1]))
    assert names == ["kernel_1", "kernel_1", "kernel_2", "kernel_1"]
    assert sorted(made) == [1, 2]
