"""Interrupted generation keeps what is finished and goes on to the same answers."""

from types import SimpleNamespace

import pytest
from tiny_run import write_run

from jaxspec.lab.training import answers as module
from jaxspec.lab.training.config import load_training_run
from jaxspec.lab.training.pipeline import Pipeline
from jaxspec.lab.training.token_rows import TokenRows, read_shards
from jaxspec.sampling import SamplingParams


def rows(output):
    return [(i, tokens.tolist(), stopped) for i, tokens, stopped in read_shards(output / "responses").rows()]


def test_interrupted_answers_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD_ROWS", 8)
    temperatures = {"temperatures": [0.0, 1.0], "extra_temperatures": [1.0], "max_new_tokens": 12}
    config = write_run(tmp_path, num_prompts=15, responses=temperatures)
    whole, broken = (
        Pipeline(load_training_run(config), tmp_path / name, data=tmp_path) for name in ("whole", "broken")
    )
    for run in (whole, broken):
        run.run_stage("prompts")
    engine = whole._engine(96)
    monkeypatch.setattr(Pipeline, "_engine", lambda self, max_model_len: engine)
    report = whole.run_stage("responses")
    expected = rows(whole.output)
    assert report["answers"] == 30
    assert [i for i, _, _ in expected] == list(range(30))
    # Every prompt's second answer is another one, sampled with a seed of its own.
    assert all(first[1] != second[1] for first, second in zip(expected[:15], expected[15:], strict=True))

    run = engine.run

    def interrupted(requests):
        for number, answer in enumerate(run(requests)):
            if number == 13:
                raise KeyboardInterrupt
            yield answer

    monkeypatch.setattr(engine, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        broken.run_stage("responses")
    assert len(rows(broken.output)) == 13
    made = []
    monkeypatch.setattr(engine, "run", lambda requests: made.extend(requests) or run(made))
    broken.run_stage("responses")
    assert len(made) == 17
    assert rows(broken.output) == expected


def test_ctrl_c_right_after_a_shard_is_written_leaves_every_answer_once(tmp_path, monkeypatch):
    def run(requests):
        for i, ids in enumerate(requests):
            yield i, SimpleNamespace(token_ids=ids, finish_reason=("stop", "length")[ids[0] % 2])

    engine = SimpleNamespace(make_request=lambda ids, params: ids, run=run, max_model_len=8)
    prompts, save, saved = [[i] for i in range(6)], TokenRows.save, []
    one = SamplingParams(max_new_tokens=1)

    def interrupted(self, path):
        save(self, path)
        saved.append(path)
        if len(saved) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "SHARD_ROWS", 4)
    monkeypatch.setattr(TokenRows, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        module.generate_answers(engine, prompts, lambda _: one, tmp_path, label="")
    answers = module.generate_answers(engine, prompts, lambda _: one, tmp_path, label="")
    assert [(i, tokens.tolist()) for i, tokens, _ in answers.rows()] == [(i, [i]) for i in range(6)]
    assert answers.stopped.tolist() == [True, False] * 3
