"""The README's command runs tests of every file but those of which tiers.py leaves all to `.ci/run`."""

import re
from collections import defaultdict

import pytest
from tiers import ALL_CASES, COLLECTED, TESTS, WHOLE, whole


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
