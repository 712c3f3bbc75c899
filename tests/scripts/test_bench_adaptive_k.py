import json

import bench_adaptive_k
import pytest

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
