import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.batch import Answer, BatchRun, Row, RowError

GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=1.0, seed=5)


def answers(run):
    found = {}
    for done in run:
        for answer in done:
            assert isinstance(answer, Answer), answer
            found[answer.row.number] = answer
    return found


def rows(count):
    rng = np.random.default_rng(0)
    return [Row(i, i, rng.integers(6, 128, 3 + i).tolist()) for i in range(count)]


def test_rows_get_what_generate_gives(tiny_engine):
    found = answers(BatchRun(tiny_engine, rows(9), GREEDY))
    assert len(found) == 9
    for number, answer in found.items():
        expected = tiny_engine.generate(rows(9)[number].prompt, GREEDY)
        assert [generation.token_ids for generation in answer.generations] == [expected.token_ids]
        assert answer.as_dict() == {
            "id": number,
            "text": expected.text,
            "token_ids": expected.token_ids,
            "prompt_tokens": 3 + number,
            "finish_reason": "length",
            "stats": expected.stats.as_dict(),
        }


def test_rows_are_read_as_slots_come_free(tiny_engine):
    taken = []
    source = (taken.append(row.number) or row for row in rows(40))
    first = next(done for done in BatchRun(tiny_engine, source, GREEDY) if done)
    assert len(first) <= 4
    assert len(taken) <= tiny_engine.max_pending + len(first)


def test_a_conversation_reads_its_own_answers(tiny_engine):
    row = Row(0, "chat", None, ("w6 w7", "w8", "w9"))
    answer = answers(BatchRun(tiny_engine, [row], GREEDY))[0]
    messages = []
    for turn, generation in zip(row.turns, answer.generations, strict=True):
        messages.append({"role": "user", "content": turn})
        expected = tiny_engine.generate(messages, GREEDY)
        assert generation.prompt_token_ids == expected.prompt_token_ids
        assert generation.token_ids == expected.token_ids
        messages.append({"role": "assistant", "content": generation.text})
    record = answer.as_dict()
    assert [turn["text"] for turn in record["turns"]] == [m["content"] for m in messages[1::2]]
    assert record["text"] == messages[-1]["content"]
    assert record["stats"]["steps"] == sum(turn["stats"]["steps"] for turn in record["turns"])
    assert record["stats"] != record["turns"][-1]["stats"]


def test_seeds_count_up_with_the_rows_and_not_with_what_is_left_to_do(tiny_engine):
    prompt = [7, 8, 9]
    same = [Row(i, i, prompt) for i in range(6)]
    found = answers(BatchRun(tiny_engine, same, SAMPLED))
    tokens = [found[i].generations[0].token_ids for i in range(6)]
    assert len({tuple(ids) for ids in tokens}) == 6
    for i in range(6):
        params = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=1.0, seed=5 + i)
        assert tokens[i] == tiny_engine.generate(prompt, params).token_ids
    rest = answers(BatchRun(tiny_engine, same[4:], SAMPLED))
    assert [rest[i].generations[0].token_ids for i in (4, 5)] == tokens[4:]


def test_the_largest_seed_wraps(tiny_engine):
    params = SamplingParams(max_new_tokens=2, temperature=1.0, seed=2**64 - 1)
    assert len(answers(BatchRun(tiny_engine, rows(2), params))) == 2


def test_counts_include_what_is_running(tiny_engine):
    run = BatchRun(tiny_engine, rows(5), GREEDY)
    seen = [(run.num_tokens, run.stats.steps) for _ in run]
    assert seen == sorted(seen)
    assert 0 < seen[1][0] < seen[-1][0] == 5 * 8
    assert run.num_prompt_tokens == sum(len(row.prompt) for row in rows(5))
    assert run.stats.steps == seen[-1][1] > 0


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (Row(3, 3, [6] * 200), "line 4: prompt of 200 tokens leaves no room"),
        (Row(3, 3, [500]), "line 4: prompt: token id 500 is outside the vocabulary"),
        (Row(3, 3, None, ("w6", "w7 " * 200)), "line 4: turn 2: prompt of "),
    ],
)
def test_a_row_that_cannot_be_asked_is_reported_and_the_others_done(tiny_engine, row, problem):
    run = BatchRun(tiny_engine, [*rows(3), row, Row(4, 4, [7])], GREEDY)
    done = [item for items in run for item in items]
    failed = [item for item in done if isinstance(item, RowError)]
    assert len(failed) == 1
    assert str(failed[0]).startswith(problem)
    assert {item.row.number for item in done if isinstance(item, Answer)} == {0, 1, 2, 4}


def test_closing_drops_what_is_running(tiny_engine):
    steps = iter(BatchRun(tiny_engine, rows(9), GREEDY))
    next(steps)
    steps.close()
    assert [
        len(answer.generations) for answer in answers(BatchRun(tiny_engine, rows(2), GREEDY)).values()
    ] == [1, 1]
