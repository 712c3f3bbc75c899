"""Packed rows hold every conversation once, whole, with its own positions."""

import numpy as np
import pytest

from jaxspec.lab.training.packing import PackedSource, join_answers, pack, training_batches
from jaxspec.lab.training.token_rows import TokenRows

PROMPTS = TokenRows.of((i, np.arange(3 + i) + 100 * i, True) for i in range(8))
ANSWERS = TokenRows.of((i, np.arange(2 + i % 3) + 100 * i + 50, True) for i in range(8))


def test_every_conversation_is_in_one_row():
    lengths = np.random.default_rng(0).integers(1, 40, 500)
    rows = pack(lengths, 64, seed=1)
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert all(lengths[row].sum() <= 64 for row in rows)
    assert len(rows) * 64 < 1.05 * lengths.sum()
    assert rows == pack(lengths, 64, seed=1) != pack(lengths, 64, seed=2)


def test_few_long_conversations_among_short_ones_fill_rows():
    rng = np.random.default_rng(0)
    lengths = np.concatenate([rng.integers(60, 400, 900), rng.integers(1000, 2305, 100)])
    rows = pack(lengths, 2304, seed=0)
    assert sorted(i for row in rows for i in row) == list(range(1000))
    assert len(rows) * 2304 < 1.03 * lengths.sum()


def test_a_row_keeps_conversations_apart():
    conversations = join_answers(PROMPTS, ANSWERS, longest=128)
    row = PackedSource(conversations, [[2, 0]], 16)[0]
    assert row["tokens"].tolist() == [*range(200, 205), *range(250, 254), 0, 1, 2, 50, 51, 0, 0]
    assert row["positions"].tolist() == [*range(9), *range(5), 0, 0]
    assert row["segments"].tolist() == [1] * 9 + [2] * 5 + [0] * 2
    assert np.flatnonzero(row["answer"]).tolist() == [5, 6, 7, 8, 12, 13]


def test_an_answer_past_the_prompts_belongs_to_the_first_ones_again():
    answers = TokenRows.of((i, np.array([i]), True) for i in (2, 8 + 2, 16 + 7))
    conversations = join_answers(PROMPTS, answers, longest=128)
    assert conversations.prompt_length.tolist() == [5, 5, 10]
    assert conversations.tokens[:12].tolist() == [*range(200, 205), 2, *range(200, 205), 10]


def test_a_conversation_longer_than_a_row_is_cut():
    conversations = join_answers(PROMPTS, ANSWERS, longest=128)
    rows = pack(np.diff(conversations.start), 6, seed=0)
    source = PackedSource(conversations, rows, 6)
    assert sorted(row["tokens"][0] for row in source) == [100 * i for i in range(8)]


def test_a_conversation_ends_at_the_targets_last_position():
    given = TokenRows.of((i, np.arange(50), True) for i in range(8))
    conversations = join_answers(PROMPTS, given, longest=32)
    assert np.diff(conversations.start).tolist() == [32] * 8
    row = PackedSource(conversations, [[0, 1]], 64)[0]
    assert row["positions"].max() == 31
    assert row["tokens"][:32].tolist() == [0, 1, 2, *range(29)]


@pytest.mark.parametrize("size", [3, 8, 16])
def test_every_validation_row_is_in_a_batch(size):
    conversations = join_answers(PROMPTS, ANSWERS, longest=128)
    source = PackedSource(conversations, [[i] for i in range(8)], 16)
    batches = source.padded_batches(size)
    assert {batch["tokens"].shape for batch in batches} == {(size, 16)}
    segments = np.concatenate([batch["segments"] for batch in batches])
    answers = np.concatenate([batch["answer"] for batch in batches])
    np.testing.assert_array_equal(segments[:8], [row["segments"] for row in source])
    assert not segments[8:].any()
    assert not answers[8:].any()
    assert PackedSource(conversations, [], 16).padded_batches(size) == []


def test_every_epoch_has_all_rows_in_an_order_of_its_own():
    conversations = join_answers(PROMPTS, ANSWERS, longest=128)
    source = PackedSource(conversations, [[i] for i in range(8)], 16)
    batches = training_batches(source, batch_size=4, seed=5)
    epochs = [[row[0] // 100 for _ in range(2) for row in next(batches)["tokens"]] for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(8))] * 3
    assert len({tuple(epoch) for epoch in (*epochs, range(8))}) == 4


def test_batches_go_on_from_a_saved_position():
    conversations = join_answers(PROMPTS, ANSWERS, longest=128)
    source = PackedSource(conversations, [[i] for i in range(8)], 16)

    def batches():
        return training_batches(source, batch_size=3, seed=5)

    whole, first = batches(), batches()
    expected = [next(whole)["tokens"] for _ in range(6)]
    for _ in range(4):
        next(first)
    resumed = batches()
    resumed.set_state(first.get_state())
    np.testing.assert_array_equal(next(resumed)["tokens"], expected[4])
    np.testing.assert_array_equal(next(resumed)["tokens"], expected[5])
