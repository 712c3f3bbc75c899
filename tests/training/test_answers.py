"""Interrupted generation keeps what is finished and goes on to the same answers."""

import pytest
from tiny_run import write_run

from jaxspec.training import answers as module
from jaxspec.training.config import load_training_run
from jaxspec.training.pipeline import Pipeline
from jaxspec.training.token_rows import read_shards


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
