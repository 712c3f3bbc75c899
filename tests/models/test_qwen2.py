"""Qwen2 against transformers: biases on q, k and v, windows in the later layers."""

import pytest
from target_checks import check_export, check_one_pass, check_pieces

CASES = ("qwen2-tied", "qwen2-windowed")


@pytest.mark.parametrize("case", CASES)
def test_one_pass_equals_transformers(case):
    check_one_pass(case)


@pytest.mark.parametrize("size", [1, 5])
def test_pieces_through_the_cache_equal_one_pass(size):
    check_pieces("qwen2-windowed", size)


@pytest.mark.parametrize("case", CASES)
def test_export_gives_back_every_tensor(case):
    check_export(case)
