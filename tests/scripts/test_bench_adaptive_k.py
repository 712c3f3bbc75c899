import json
import shutil

import bench_adaptive_k
import pytest

import jaxspec
from jaxspec.sampling import synthetic

SIZES = "--shape tiny --k 2 --slots 1,2 --acceptance 1,3 --new-tokens 24"
OPTIONS = [*SIZES.split(), "--repeats", "1", "--mixed", "0"]


@pytest.mark.parametrize("drafter", [[], ["--lookup"]], ids=["head", "lookup"])
def test_times_every_choice_in_one_engine(compiled_behind, monkeypatch, tmp_path, capsys, drafter):
    monkeypatch.setattr(synthetic, "_accepts_by_rate", synthetic._accepts_by_rate)  # put back afterwards
    taken = []
    run = bench_adaptive_k._run
    monkeypatch.setattr(
        bench_adaptive_k, "_run", lambda engine, row, choice: taken.append(choice) or run(engine, row, choice)
    )
    file = tmp_path / "result.json"
    assert bench_adaptive_k.main([*OPTIONS, *drafter, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["slots"], row["row"]) for row in rows] == [
        (1, "1"), (1, "3"), (1, "phases"), (2, "1"), (2, "3"), (2, "mixed"), (2, "phases")
    ]  # fmt: skip
    assert set(rows[0]["rates"]) == {"K=0", "K=1", "K=2", "auto"}
    assert {0, 1, 2} <= set(filter(lambda choice: isinstance(choice, int), taken))
    assert "worst of auto" in capsys.readouterr().out


def test_samples_as_reinforcement_learning_draws_them(compiled_behind, tiny_config, monkeypatch, tmp_path):
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_config.parent, folder)
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "w{i} w{i + 1}"}}\n' for i in range(6, 11)))
    drawn = []
    sample = jaxspec.Engine.sample
    monkeypatch.setattr(
        jaxspec.Engine, "sample", lambda *args, **kwargs: drawn.append(sample(*args, **kwargs)) or drawn[-1]
    )
    file = tmp_path / "result.json"
    options = f"--slots 2 --samples 2 --input {prompts} --limit 3 --new-tokens 8 --repeats 1 --mixed 0"
    options += f" --json {file}"
    assert bench_adaptive_k.main([str(folder / "tiny.toml"), *options.split()]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["row"] == "samples"
    assert {"K=0", "auto"} < set(row["rates"])
    assert len(drawn) == len(row["rates"]) + 1
    for samples in drawn:
        assert samples.mask.sum(axis=1).tolist() == [8] * 6
    assert len({tuple(answer.token_ids) for answer in drawn[0].generations}) > 3


def test_acceptance_is_that_of_the_request(monkeypatch):
    monkeypatch.setattr(synthetic, "_accepts_by_rate", synthetic._accepts_by_rate)
    args = bench_adaptive_k._parse(OPTIONS)
    engine = bench_adaptive_k._load(args)
    with engine:
        rows = {row.name: row for row in bench_adaptive_k._rows(args, 2, engine.vocab_size)}
        bench_adaptive_k._run(engine, rows["mixed"], 2)
        one, most = engine.generate(rows["mixed"].prompts, rows["mixed"].params)
        (phases,) = engine.generate(rows["phases"].prompts[:1], rows["phases"].params[:1])
    assert one.stats.accepted == 0
    assert most.stats.accepted == most.stats.drafted > 0
    assert 0 < phases.stats.accepted < phases.stats.drafted
