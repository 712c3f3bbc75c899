import json

import bench.program
import bench_step
import pytest

from jaxspec.sampling import SamplingMode

SIZES = "--shape tiny --k 1 --batch 2 --context 9 --new-tokens 6 --max-model-len 64 --copy-bytes 4096"
WORK = "--acceptance 1.5 --steps-per-dispatch 2 --runs 1 --dtype float32"
OPTIONS = [*SIZES.split(), *WORK.split()]


def test_times_a_tiny_model_and_writes_where_it_comes_from(tmp_path):
    file = tmp_path / "result.json"
    assert bench_step.main([*OPTIONS, "--temperature", "0,1", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert [row["temperature"] for row in result["rows"]] == [0, 1]
    for row in result["rows"]:
        assert 1 <= row["tokens_per_step"] <= 2
        assert row["step_ms"] > 0
        assert row["dispatches_per_step"] == 0.5
    assert "--shape tiny" in result["command"]
    assert {"git_revision", "versions", "device"} <= result.keys()


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ([], SamplingMode.GREEDY),
        (["--temperature", "1"], SamplingMode.TEMPERATURE),
        (["--temperature", "1", "--top-p", "0.9"], SamplingMode.TRUNCATED),
        (["--temperature", "1", "--top-k", "20"], SamplingMode.TRUNCATED),
        (["--params", '{"presence_penalty": 1}'], SamplingMode.GREEDY),
    ],
)
def test_times_the_program_that_these_parameters_need(monkeypatch, options, mode):
    class Compiled(Exception):
        pass

    def compile_sizes(programs, sizes, **_):
        raise Compiled(*((size.mode, bool(size.constraints)) for size in sizes))

    monkeypatch.setattr(bench.program.Programs, "compile", compile_sizes)
    with pytest.raises(Compiled) as compiled:
        bench_step.main([*OPTIONS, *options])
    assert compiled.value.args == ((mode, "--params" in options),)


def test_a_bad_parameter_is_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_step.main([*OPTIONS, "--top-p", "0"])
    assert (
        capsys.readouterr().err
        == "error: top_p must be a number, above 0 and at most 1, got 0.0 (see --help)\n"
    )


def test_more_devices_than_there_are_are_one_line(capsys):
    assert bench_step.main([*OPTIONS, "--tensor-parallel", "99"]) != 0
    assert capsys.readouterr().err.startswith("error: engine.tensor_parallel is 99, but jax sees ")
