"""The README's command runs tests of every file but those of which tiers.py leaves all to `.ci/run`."""

import itertools
import re
from collections import defaultdict
from datetime import date, timedelta
from unittest.mock import Mock

import pytest
import tiers
from tiers import ALL_CASES, COLLECTED, TESTS, WHOLE, part_of, whole


@pytest.fixture
def tests_of(pytestconfig):
    """By file: the names of the tests that were collected, and whether each is left to `.ci/run`. A run of
    some files checks those."""
    files = defaultdict(dict)
    for (file, name), is_whole in pytestconfig.stash[COLLECTED].items():
        files[file][name] = is_whole
    return files


def test_every_file_has_a_quick_test_unless_it_is_named(tests_of):
    left = {file for file, tests in tests_of.items() if all(tests.values())}
    assert left <= {file for file, names in WHOLE.items() if not names}


def test_every_name_is_that_of_a_test(pytestconfig, tests_of):
    if pytestconfig.option.keyword or any("::" in argument for argument in pytestconfig.args):
        pytest.skip("only some tests of a file were collected")
    of_none = [
        (file, names)
        for file in WHOLE.keys() & tests_of.keys()
        for names in re.split(r"\|(?![^(]*\))", WHOLE[file])
        if not any(re.search(names, name) for name in tests_of[file])
    ]
    assert of_none == []


def test_every_file_that_is_named_exists():
    assert [file for file in (*WHOLE, *ALL_CASES) if not (TESTS / file).exists()] == []


def test_a_test_of_many_cases_is_quick_for_the_first_and_the_last():
    tests = [("kernels/test_a.py", f"test[{i}]") for i in range(4)] + [("kernels/test_a.py", "test_other")]
    assert list(whole(tests)) == [False, True, True, False, False]
    assert list(whole([("test_a.py", name) for _, name in tests])) == 5 * [False]


def test_a_folder_may_be_named(monkeypatch):
    monkeypatch.setitem(WHOLE, "serve/", "any_layout")
    tests = [
        ("serve/test_a.py", "test_any_layout"),
        ("serve/test_a.py", "test_b"),
        ("test_a.py", "test_any_layout"),
    ]
    assert list(whole(tests)) == [True, False, False]


def test_cases_that_are_named_are_no_first_or_last_ones(monkeypatch):
    monkeypatch.setitem(WHOLE, "kernels/test_a.py", r"\[[03]")
    tests = [("kernels/test_a.py", f"test[{i}]") for i in range(4)]
    assert list(whole(tests)) == [True, False, False, True]


def test_drafters_over_full_attention_and_eagle3_over_all_are_quick():
    pairs = ["full-ngram", "full-dflash", "latent-eagle3", "latent-mtp", "sliding-near"]
    tests = [("engine/test_pairs.py", f"test_drafting_changes_no_token[{pair}]") for pair in pairs]
    assert list(whole(tests)) == [False, False, False, True, True]


def test_parts_are_all_tests_once_and_every_test_of_many_cases_is_in_each():
    tests = [(name, case) for name in "abc" for case in range(4)]
    parts = [part_of(tests, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(itertools.chain(*parts)) == tests
    assert [{name for name, _ in part} for part in parts] == [set("abc")] * 3


def test_three_days_run_all_tests(monkeypatch):
    tests, run = list(range(10)), []
    for days in range(3):
        monkeypatch.setattr(tiers, "date", Mock(today=lambda days=days: date(2026, 12, 31) + timedelta(days)))
        run += part_of(tests, "today")
    assert sorted(run) == tests


@pytest.mark.parametrize("part", ["0/3", "4/3"])
def test_a_part_that_is_none_is_refused(part):
    with pytest.raises(ValueError, match=r"part . of 3 parts"):
        part_of([1], part)
