import queue
import threading
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import assert_idle

from jaxspec import SamplingParams
from jaxspec.service.batch import Answer, BatchRun, Row, RowError, row_seed
from jaxspec.service.batch.run import LOOK_AHEAD

GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=1.0, seed=5)


def row(number, prompt, *turns):
    return Row(f"in.jsonl line {number + 1}", number, prompt, turns)


def rows(count):
    rng = np.random.default_rng(0)
    return [row(i, rng.integers(6, 128, 3 + i).tolist()) for i in range(count)]


def answers(run):
    found = {}
    for answer in run:
        assert isinstance(answer, Answer), answer
        found[answer.row.id] = answer
    return found


def shown(ended):
    """Ids of answers, and what was wrong with the others."""
    return [item.row.id if isinstance(item, Answer) else str(item) for item in ended]


def test_rows_get_what_generate_gives(tiny_engine):
    found = answers(BatchRun(tiny_engine, rows(9), SAMPLED))
    assert len(found) == 9
    for number, answer in found.items():
        seed = row_seed(5, number, 0)
        params = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=1.0, seed=seed)
        expected = tiny_engine.generate(rows(9)[number].prompt, params)
        assert answer.to_dict() == {
            "id": number,
            "input_digest": rows(9)[number].digest,
            "text": expected.text,
            "token_ids": expected.token_ids,
            "prompt_tokens": 3 + number,
            "finish_reason": "length",
            "seed": seed,
            "stats": expected.stats.to_dict(),
        }


def test_a_row_is_asked_as_it_asks():
    """Also in each of its turns; the run's parameters are for other rows, and for what a row leaves out."""
    own = {"temperature": 0.5, "top_p": 0.9, "seed": 11, "stop": "a", "max_new_tokens": 3}
    chat = replace(row(0, None, "w6", "w7"), sampling=own, chat_template_kwargs={"think": True})
    chat = replace(chat, special_tokens_as_text=True)
    engine = FakeEngine()
    found = answers(BatchRun(engine, [chat, row(1, "w8")], SAMPLED))
    asked = replace(SAMPLED, **own)
    assert engine.params.count(asked) == 2
    assert [params for params in engine.params if params != asked] == [
        replace(SAMPLED, seed=row_seed(5, 1, 0))
    ]
    assert sorted(engine.template_kwargs, key=bool) == [{}, {"think": True}, {"think": True}]
    assert sorted(engine.flags, key=bool) == [{}, *[{"special_tokens_as_text": True}] * 2]
    assert [len(each.token_ids) for each in found[0].generations] == [3, 3]


def test_a_row_may_have_several_answers(tiny_engine):
    """The first is that of a row that asks for one."""
    one, several = rows(9)[3], replace(rows(9)[3], n=3, sampling={"logprobs": 1})
    (first,) = answers(BatchRun(tiny_engine, [one], SAMPLED))[3].generations
    found = answers(BatchRun(tiny_engine, [*rows(3), several, *rows(9)[4:]], SAMPLED))
    assert len(found) == 9
    drawn = found[3].generations
    assert drawn[0].token_ids == first.token_ids
    assert len({tuple(each.token_ids) for each in drawn}) == 3
    record = found[3].to_dict()
    assert record["token_ids"] == first.token_ids
    assert [each["token_ids"] for each in record["samples"]] == [each.token_ids for each in drawn]
    assert [each["logprobs"] for each in record["samples"]] == [each.logprobs for each in drawn]
    assert [len(each["top_logprobs"][0]) for each in record["samples"]] == [1, 1, 1]
    assert record["stats"]["steps"] == sum(each.stats.steps for each in drawn)


@pytest.mark.parametrize("prompt", ["fail", "long"])
def test_a_row_with_a_failed_sample_is_one_error(prompt):
    bad = replace(row(0, prompt), n=4)
    found = list(BatchRun(FakeEngine(), [bad, row(1, "w6"), replace(row(2, "w7"), n=2)], SAMPLED))
    assert len(found) == 3
    assert [type(item) for item in sorted(found, key=str)].count(RowError) == 1


def test_a_sampled_row_is_answered_as_alone(tiny_engine):
    own = {"temperature": 1.5, "seed": 3, "max_new_tokens": 12}
    found = answers(BatchRun(tiny_engine, [replace(rows(9)[0], sampling=own), *rows(9)[1:]], GREEDY))[0]
    expected = tiny_engine.generate(rows(9)[0].prompt, ignore_eos=True, **own)
    assert found.generations[0].token_ids == expected.token_ids


def test_what_a_row_cannot_be_asked_is_its_error(tiny_engine):
    bad = replace(row(0, "w6"), sampling={"max_new_tokens": 1000})
    chat = replace(row(1, [5, 6]), chat_template_kwargs={"think": True})
    found = shown(BatchRun(tiny_engine, [bad, chat, row(2, "w6")], GREEDY, keep_order=True))
    assert found == [
        "in.jsonl line 1: max_new_tokens: 1000 do not fit: after a prompt of 3 tokens, max_model_len 128 "
        "leaves room for 125",
        "in.jsonl line 2: chat_template_kwargs: no chat template applies to token ids",
        2,
    ]


def test_rows_are_read_as_slots_come_free():
    taken = []
    source = (taken.append(number) or row(number, "w6") for number in range(400))
    engine = FakeEngine()
    run = iter(BatchRun(engine, source, GREEDY))
    next(run)
    # In the engine, ready, and the one that waits for room.
    assert len(taken) <= 2 * engine.max_pending + 2
    run.close()


@pytest.mark.parametrize("keep_order", [False, True])
def test_a_conversation_reads_its_own_answers(tiny_engine, keep_order):
    chat = row(0, None, "w6 w7", "w8", "w9")
    found = answers(BatchRun(tiny_engine, [chat, *rows(9)[1:]], GREEDY, keep_order=keep_order))
    assert list(found) == list(range(9)) or not keep_order
    answer, messages = found[0], []
    for turn, generation in zip(chat.turns, answer.generations, strict=True):
        messages.append({"role": "user", "content": turn})
        expected = tiny_engine.generate(messages, GREEDY)
        assert generation.prompt_token_ids == expected.prompt_token_ids
        assert generation.token_ids == expected.token_ids
        messages.append({"role": "assistant", "content": generation.text})
    record = answer.to_dict()
    assert [turn["text"] for turn in record["turns"]] == [m["content"] for m in messages[1::2]]
    assert record["text"] == messages[-1]["content"]
    assert record["stats"]["steps"] == sum(turn["stats"]["steps"] for turn in record["turns"])
    assert record["stats"] != record["turns"][-1]["stats"]


def test_next_turns_and_later_rows_join_what_is_running(tiny_engine, monkeypatch):
    """`Engine.run` asks for requests again after it was told that there are none: slots are never drained."""
    runs = []
    run = tiny_engine.run
    monkeypatch.setattr(
        tiny_engine, "run", lambda requests, **given: runs.append(1) or run(requests, **given)
    )
    chats = [row(i, None, *["w6"] * (1 + i % 4)) for i in range(20)]
    assert len(answers(BatchRun(tiny_engine, chats, GREEDY, keep_order=True))) == 20
    assert len(runs) == 1


def test_a_row_keeps_its_answer_whichever_others_there_are(tiny_engine):
    same = [row(i, [7, 8, 9]) for i in range(6)]
    found = answers(BatchRun(tiny_engine, same, SAMPLED))
    tokens = [found[i].generations[0].token_ids for i in range(6)]
    assert len({tuple(ids) for ids in tokens}) == 6
    rest = answers(BatchRun(tiny_engine, same[:3:-1], SAMPLED))
    assert [rest[i].generations[0].token_ids for i in (4, 5)] == tokens[4:]


def test_no_two_requests_share_a_seed():
    """Neither rows, nor turns, nor runs whose seeds are neighbours."""
    seeds = {
        row_seed(seed, row_id, turn)
        for seed in range(20)
        for row_id in [*range(20), *map(str, range(20))]
        for turn in range(4)
    }
    assert len(seeds) == 20 * 40 * 4
    assert max(seeds) < 2**64
    # A run of today is to be repeated tomorrow.
    assert row_seed(0, 0, 0) == 17264087599351127383
    assert row_seed(2**64 - 1, "é", 3) == 7707487942188868337


def test_every_turn_has_a_seed_of_its_own():
    engine = FakeEngine()
    chat = Row("in.jsonl line 1", "chat", None, ("a", "b", "c"))
    (answer,) = BatchRun(engine, [chat], SAMPLED)
    seeds = [row_seed(5, "chat", turn) for turn in range(3)]
    assert [params.seed for params in engine.params] == seeds
    assert [turn["seed"] for turn in answer.to_dict()["turns"]] == seeds


def test_a_run_without_a_seed_draws_one_and_says_which(tiny_engine):
    drawn = SamplingParams(max_new_tokens=8, temperature=1.0)
    first, second = (BatchRun(tiny_engine, rows(1), drawn) for _ in range(2))
    assert first.seed != second.seed
    tokens = answers(first)[0].generations[0].token_ids
    again = SamplingParams(max_new_tokens=8, temperature=1.0, seed=first.seed)
    assert answers(BatchRun(tiny_engine, rows(1), again))[0].generations[0].token_ids == tokens


def test_counts_are_of_what_has_ended(tiny_engine):
    run = BatchRun(tiny_engine, rows(5), GREEDY)
    seen = [run.num_tokens for _ in run]
    assert seen == sorted(seen)
    assert seen[-1] == run.num_tokens == 5 * 8
    assert run.num_prompt_tokens == sum(len(row.prompt) for row in rows(5))
    assert run.stats.steps > 0


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (row(3, [6] * 200), "in.jsonl line 4: prompt of 200 tokens leaves no room"),
        (row(3, [500]), "in.jsonl line 4: prompt: token id 500 is outside the vocabulary"),
        (row(3, None, "w6", "w7 " * 200), "in.jsonl line 4: turn 2: prompt of "),
        (RowError("in.jsonl line 4", "not JSON"), "in.jsonl line 4: not JSON"),
    ],
)
def test_a_row_that_cannot_be_asked_is_reported_and_the_others_done(tiny_engine, bad, problem):
    ended = shown(BatchRun(tiny_engine, [*rows(3), bad, row(4, [7])], GREEDY))
    (failed,) = [item for item in ended if isinstance(item, str)]
    assert failed.startswith(problem)
    assert {item for item in ended if isinstance(item, int)} == {0, 1, 2, 4}


def test_a_row_that_the_engine_fails_is_no_answer():
    run = BatchRun(FakeEngine(), [row(0, "fail"), row(1, "w6"), row(2, None, "w7", "fail", "w8")], GREEDY)
    assert sorted(shown(run), key=str) == [
        1,
        "in.jsonl line 1: failed: it is a fake",
        "in.jsonl line 3: turn 2: failed: it is a fake",
    ]


def test_closing_drops_what_is_running(tiny_engine):
    ended = iter(BatchRun(tiny_engine, rows(9), GREEDY))
    next(ended)
    ended.close()
    assert_idle(tiny_engine)
    engine = FakeEngine()
    ended = iter(BatchRun(engine, rows(9), GREEDY))
    next(ended)
    assert engine.running > 0
    ended.close()
    assert engine.running == 0


def test_an_error_of_the_input_drops_what_is_running_too():
    def source():
        yield from rows(9)
        raise OSError("gone")

    engine = FakeEngine()
    with pytest.raises(OSError, match="gone"):
        list(BatchRun(engine, source(), GREEDY))
    assert engine.running == 0


def test_a_slow_input_keeps_nothing_waiting():
    """Rows come one by one, each when the one before has its answer or its error."""
    items = [row(0, "w0"), RowError("line 2", "bad"), row(2, "long"), row(3, "w3"), row(4, None, "w4", "w5")]
    source = queue.Queue()
    source.put(items[0])
    seen = []
    for ended in BatchRun(FakeEngine(), iter(source.get, None), GREEDY):
        seen.append(ended)
        source.put(items[len(seen)] if len(seen) < 5 else None)
    assert shown(seen) == [0, "line 2: bad", "in.jsonl line 3: prompt is too long", 3, 4]


@pytest.mark.timeout(60)
def test_a_new_row_takes_a_free_slot_while_another_row_runs(tiny_engine):
    """The second row arrives once the first one runs, which ends only after it."""
    began, source = threading.Event(), queue.Queue()
    long = SamplingParams(max_new_tokens=100, ignore_eos=True)
    source.put(row(0, [9] * 8))
    run = BatchRun(tiny_engine, iter(source.get, None), long)
    step = tiny_engine.core.step

    def until_the_second_is_here():
        """Rounds of the engine; the first row is held up until there is a second request."""
        began.set()
        if len(tiny_engine.core.scheduler.running) + len(tiny_engine.core.scheduler.waiting) < 2:
            time.sleep(0.001)
        else:
            step()

    def arrive():
        began.wait(60)
        source.put(row(1, [8] * 8))
        source.put(None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_engine.core, "step", until_the_second_is_here)
        threading.Thread(target=arrive, daemon=True).start()
        with closing(iter(run)) as ended:
            assert next(ended).row.id in (0, 1)
            patch.undo()
            assert next(ended).row.id in (0, 1)


PROMPTS = st.sampled_from(["w6", "w7", "long", "fail", None])
TURNS = st.lists(st.sampled_from(["w6", "w7", "long", "fail"]), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(PROMPTS, TURNS), max_size=40), st.booleans(), st.booleans(), st.integers(1, 4))
def test_every_row_ends_once(given_rows, keep_order, asks_again, slots):
    """Whatever the rows, the order, the engine; and the same rows give the same answers in any of these."""
    source = [
        RowError(f"line {i}", "bad") if prompt == "w7" else row(i, prompt, *([] if prompt else turns))
        for i, (prompt, turns) in enumerate(given_rows)
    ]
    engine = FakeEngine(slots, asks_again=asks_again)
    ended = list(BatchRun(engine, source, SAMPLED, keep_order=keep_order))
    assert engine.running == 0
    assert engine.most_running <= engine.max_pending
    alone = [next(iter(BatchRun(FakeEngine(), [item], SAMPLED))) for item in source]
    texts, expected = (
        [item.to_dict() if isinstance(item, Answer) else str(item) for item in items]
        for items in (ended, alone)
    )
    if not keep_order:
        texts, expected = sorted(texts, key=str), sorted(expected, key=str)
    assert texts == expected


def test_in_order_no_more_than_the_look_ahead_is_held():
    taken = []
    engine = FakeEngine()
    source = (taken.append(i) or row(i, "slow" if i == 0 else "w6") for i in range(1000))
    run = iter(BatchRun(engine, source, GREEDY, keep_order=True))
    assert next(run).row.id == 0
    # The slow one takes as long as about 1,000 others, three at a time.
    assert LOOK_AHEAD * engine.max_pending == 64
    assert 64 <= len(taken) <= 64 + engine.max_pending + 1
    assert shown(run) == list(range(1, 1000))
