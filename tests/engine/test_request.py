"""Requests alone: text out of tokens, stop strings against a naive search, and acceptance counts."""

import json
import math
import random

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from jaxspec import AcceptanceStats, SamplingParams
from jaxspec.engine.host.request import Reported, Request
from jaxspec.files import Tokenizer

# Letters, pairs of them, a special token, and "é" and "€" in the byte-level spelling, in pieces.
TOKENS = ["</s>", "a", "b", "c", "ab", "bc", "abc", "Ġ", "Ã©", "Ã", "©", "â", "Ĥ", "¬"]


@pytest.fixture(scope="module")
def tokenizer():
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend)


def make_request(tokenizer, *, stop=(), stop_tokens=(), max_new_tokens=100, is_streamed=True, **params):
    request = Request(
        prompt=[1],
        params=SamplingParams(stop=stop, **params, max_new_tokens=max_new_tokens),
        max_new_tokens=max_new_tokens,
        stop_tokens=stop_tokens,
        seed=0,
        tokenizer=tokenizer,
        is_streamed=is_streamed,
    )
    request.deltas = []
    request.listener = request.deltas.append
    return request


def naive(tokenizer, tokens, stops):
    """(text, number of tokens, stopped) when tokens are read one by one until a stop string is there.

    A character whose bytes are not all there yet is not text, but for the last.
    """
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count])
        whole = text if count == len(tokens) else text.rstrip("\N{REPLACEMENT CHARACTER}")
        found = [at for at in (whole.find(stop) for stop in stops) if at >= 0]
        if found:
            return whole[: min(found)], count, True
    return tokenizer.decode(tokens), len(tokens), False


@pytest.mark.parametrize("seed", range(150))
def test_stop_strings_over_random_blocks(tokenizer, seed):
    """Tokens come in blocks of one to six, as accepted drafts do; the last one ends the request."""
    rng = random.Random(seed)
    tokens = [rng.randrange(1, 7 if seed % 3 else len(TOKENS)) for _ in range(rng.randint(1, 25))]
    alphabet = "abc" if seed % 3 else "abcé€ "
    stops = ["".join(rng.choices(alphabet, k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
    request = make_request(tokenizer, stop=stops)
    unwatched = make_request(tokenizer, stop=stops, is_streamed=False)
    left = list(tokens)
    while left and request.finish_reason is None:
        size = rng.randint(1, 6)
        block, left = left[:size], left[size:]
        for each in (request, unwatched):
            each.append(block, ended=not left)
    text, count, stopped = naive(tokenizer, tokens, stops)
    generation = request.generation()
    assert generation.text == text
    assert generation.token_ids == tokens[:count]
    assert generation.finish_reason == ("stop" if stopped else "length")
    assert unwatched.generation() == generation
    assert [delta.generation for delta in unwatched.deltas] == [generation]  # the last piece alone
    shown = ""
    for delta in request.deltas:
        shown += delta.text
        assert text.startswith(shown)  # nothing of a stop string is ever shown
    assert shown == text
    assert [token for delta in request.deltas for token in delta.token_ids] == generation.token_ids
    assert [delta.generation for delta in request.deltas] == [None] * (len(request.deltas) - 1) + [generation]


@pytest.mark.parametrize("block", [1, 2, 6])
def test_a_stop_string_among_the_least_tokens_does_not_count(tokenizer, block):
    """Nor does one that ends with the last of them; one that reaches beyond them does."""
    tokens = [1, 2, 3, 1, 1, 2, 3, 3]  # abcaabcc
    for min_tokens, stop, text in (
        (0, "b", "a"),
        (1, "b", "a"),
        (2, "b", "abcaa"),
        (3, "bc", "abcaa"),
        (2, "bc", "a"),
        (7, "bc", "abcaabcc"),
        (8, "c", "abcaabcc"),
    ):
        request = make_request(tokenizer, stop=[stop], min_tokens=min_tokens)
        for start in range(0, len(tokens), block):
            if request.finish_reason is None:
                request.append(tokens[start : start + block], ended=start + block >= len(tokens))
        assert request.generation().text == text, (min_tokens, stop)
        assert "".join(delta.text for delta in request.deltas) == text


def test_text_that_cannot_begin_a_stop_string_is_shown_at_once(tokenizer):
    request = make_request(tokenizer, stop=["bcb"])
    request.append([1, 1], ended=False)  # a a
    request.append([2], ended=False)  # b, which may begin it
    request.append([3], ended=False)  # c
    request.append([3], ended=False)  # c: it was not the stop string
    assert [delta.text for delta in request.deltas] == ["aa", "", "", "bcc"]


def test_a_character_is_shown_when_its_last_byte_is_there(tokenizer):
    request = make_request(tokenizer)
    for token in (11, 12, 13):
        request.append([token], ended=False)
    assert [delta.text for delta in request.deltas] == ["", "", "€"]


def test_a_stop_token_is_a_stop_and_special_tokens_are_not_text(tokenizer):
    request = make_request(tokenizer, stop_tokens=(0,))
    request.append([1, 2, 0], ended=True)
    assert request.generation().text == "ab"
    assert request.generation().token_ids == [1, 2, 0]
    assert request.generation().finish_reason == "stop"


def test_without_a_tokenizer_there_is_no_text():
    request = make_request(None)
    request.append([1, 2], ended=True)
    assert request.generation().text == ""
    assert request.generation().finish_reason == "length"


def test_target_passes_behind_the_end_of_a_stop_string_are_not_counted(tokenizer):
    for stop, passes in (("ab", 1), ("abc", 2), ("abcb", 2), ("abcba", 3), ("x", 3)):
        request = make_request(tokenizer, stop=[stop])
        request.append([1, 2, 3, 2, 1], [(2, 1), (2, 1), (2, 0)], ended=False)
        assert request.verified == [(2, 1), (2, 1), (2, 0)][:passes]
        assert request.stats.steps == passes


def test_log_probabilities_end_with_the_answer(tokenizer):
    request = make_request(tokenizer, stop=["bc"], logprobs=1)
    reported = Reported([-1.0, -2.0, -3.0, -4.0], [[1, 2]] * 4, [[-0.5, -math.inf]] * 4)
    request.append([1, 2, 3, 2], [(3, 3)], reported, ended=False)
    assert request.generation().logprobs == [-1.0, -2.0, -3.0]
    assert request.generation().top_logprobs == [{1: -0.5}] * 3
    assert request.generation().mean_logprob == -2.0
    assert request.generation().to_dict()["top_logprobs"] == [{"1": -0.5}] * 3
    silent = make_request(tokenizer)
    silent.append([1], (), reported, ended=True)
    assert (silent.generation().logprobs, silent.generation().top_logprobs) == (None, None)
    with pytest.raises(ValueError, match="mean_logprob: ask for log-probabilities"):
        _ = silent.generation().mean_logprob


def test_acceptance_counts():
    stats = AcceptanceStats()
    for drafted, accepted in ((3, 3), (3, 1), (0, 0), (3, 0), (0, 0)):
        stats.add_step(drafted, accepted)
    assert (stats.steps, stats.draft_steps, stats.drafted, stats.accepted) == (5, 3, 9, 4)
    assert stats.accepted_at == [2, 1, 1]
    # Steps that had nothing to verify say nothing about the drafter.
    assert stats.acceptance_length == pytest.approx(1 + 4 / 3)
    assert stats.acceptance_per_position == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert stats.conditional_acceptance == pytest.approx([2 / 3, 1 / 2, 1])
    more = AcceptanceStats()
    more.add_step(5, 5)
    stats.add(more)
    assert stats.accepted_at == [3, 2, 2, 1, 1]
    assert (stats.steps, stats.draft_steps, stats.accepted) == (6, 4, 9)


def test_a_step_counts_only_where_it_drafted():
    """Where K differs from step to step, and where statistics are added up."""
    steps = [(3, 3), (1, 1), (1, 1)]
    for stats in (AcceptanceStats.of(steps), AcceptanceStats.total(AcceptanceStats.of([s]) for s in steps)):
        assert stats.acceptance_per_position == stats.conditional_acceptance == [1.0] * 3
        assert (stats.accepted_at, stats.drafted_at, stats.reached_at) == ([3, 1, 1],) * 3
    stats = AcceptanceStats.of([(1, 1), (3, 0), (2, 1), (3, 1), (4, 3)])
    assert stats.acceptance_per_position == pytest.approx([4 / 5, 1 / 4, 1 / 3, 0])
    assert stats.conditional_acceptance == pytest.approx([4 / 5, 1 / 3, 1, 0])
    assert AcceptanceStats.from_dict(json.loads(json.dumps(stats.to_dict()))) == stats


def test_statistics_of_several_answers():
    request = make_request(None)
    request.append([1, 2], [(2, 1)], ended=True)
    parts = [request.generation(), AcceptanceStats.of([(2, 2), (0, 0)])]
    assert AcceptanceStats.total(parts) == AcceptanceStats.of([(2, 1), (2, 2), (0, 0)])
    assert AcceptanceStats.total([]) == AcceptanceStats()
    assert parts[1] == AcceptanceStats.of([(2, 2), (0, 0)])
    assert repr(AcceptanceStats.total(parts)) == (
        "<AcceptanceStats: 2.50 tokens a step, 3 of 4 drafts accepted in 3 steps>"
    )


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Of 400 samples of 150 steps, with drafts accepted by chance, about 5 % miss it."""
    rng = np.random.default_rng(0)
    chance, samples = np.array([0.7, 0.5, 0.9]), 400
    truth = np.cumprod(chance)
    missed = np.zeros((3, 3))
    for _ in range(samples):
        accepted = np.cumprod(rng.random((150, 3)) < chance, axis=1).sum(axis=1)
        stats = AcceptanceStats.of((3, int(count)) for count in accepted)
        every = [stats.intervals(), stats.intervals(conditional=True), [stats.length_interval] * 3]
        for row, values in enumerate((truth, chance, [1 + truth.sum()] * 3)):
            ends = zip(every[row], values, strict=True)
            missed[row] += [not low <= value <= high for (low, high), value in ends]
    assert (missed / samples < 0.085).all(), missed
    assert (missed / samples > 0.015).all(), missed
    nothing = AcceptanceStats.of([(2, 0)])
    assert nothing.intervals(conditional=True)[1] == (0.0, 1.0)
    assert nothing.length_interval == (1.0, float("inf"))


def test_acceptance_of_nothing_drafted():
    stats = AcceptanceStats()
    stats.add_step(0, 0)
    assert stats.acceptance_length == 1.0
    assert stats.acceptance_per_position == stats.conditional_acceptance == []
    assert stats.to_dict()["steps"] == 1
