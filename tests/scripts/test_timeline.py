import pytest
from bench.timeline import Kernel, idle_shares, kernel_table


def test_idle_time_is_split_at_the_end_of_every_dispatch():
    # Two dispatches of two kernels: gaps of 1 inside each, 4 between them, 14 in all.
    kernels = [Kernel("a", 0, 2), Kernel("b", 3, 5), Kernel("a", 9, 11), Kernel("b", 12, 14)]
    idle = idle_shares(kernels, num_dispatches=2)
    assert idle.length == 14
    assert idle.inside == pytest.approx(2 / 14)
    assert idle.between == pytest.approx(4 / 14)


def test_work_that_overlaps_leaves_no_gap():
    kernels = [Kernel("a", 0, 10), Kernel("b", 2, 4), Kernel("a", 8, 12)]
    idle = idle_shares(kernels, num_dispatches=1)
    assert (idle.inside, idle.between, idle.length) == (0, 0, 12)


def test_kernels_are_summed_by_name_the_longest_first():
    kernels = [
        Kernel("a", 0, 1000),
        Kernel("b", 1000, 6000),
        Kernel("a", 6000, 8000),
        Kernel("c", 8000, 8001),
    ]
    lines = kernel_table(kernels, 2, steps=2).splitlines()
    assert [line.split() for line in lines] == [
        ["2.5", "us", "0.5", "x", "5.00", "us", "b"],
        ["1.5", "us", "1.0", "x", "1.50", "us", "a"],
    ]
