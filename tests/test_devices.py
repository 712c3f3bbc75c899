"""Where an engine runs: the chosen device, `jax.default_device`, and one of its own process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxspec
from jaxspec.__main__ import main
from jaxspec.commands import batch, train
from jaxspec.config import ConfigError
from jaxspec.jax_settings import choose_devices, default_device, training_devices

TESTS = Path(__file__).parent


def run(*functions, environment=None):
    """What functions of this file print as JSON, each in a process of its own, started at once."""
    begin = "import programs_when_run, test_devices as t; programs_when_run.compile_only_what_runs()"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"{begin}; t.{function}"],
            cwd=TESTS,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for function in functions
    ]
    ended = [(process, *process.communicate(timeout=200)) for process in processes]
    for process, _, errors in ended:
        assert process.returncode == 0, errors
    return [json.loads(output) for _, output, _ in ended]


def load(folder, **options):
    engine = {"batch_size": 1, "max_model_len": 32, "prefill_batch_size": 1, "slot_sizes": (), **options}
    return jaxspec.load(folder, progress=False, sampling_modes=("greedy",), **engine)


def ask(folder, **options):
    """Device ids of an engine's mesh and of its weights, and its answer, which an inspection gives, too."""
    with load(folder, **options) as engine:
        mesh = [device.id for device in engine.programs.mesh.devices.flat]
        weights = {device.id for array in engine.programs.leaves for device in array.devices()}
        tokens = engine.generate([1, 2, 3], max_new_tokens=6).token_ids
        if len(mesh) == 1 and mesh != [0]:
            assert jaxspec.inspect_steps(engine, [1, 2, 3], max_new_tokens=6).generation.token_ids == tokens
        return [mesh, sorted(weights), tokens]


def on_three(folder):
    jax.config.update("jax_num_cpu_devices", 3)
    devices = jax.devices()
    found = [ask(folder), ask(folder, device="cpu:1")]
    with jax.default_device(devices[2]):
        found += [ask(folder), ask(folder, device=devices[1]), ask(folder, tensor_parallel=2)]
        trained = [training_devices(), training_devices("cpu")]
    found.append(ask(folder, device=["cpu:2", devices[0]], tensor_parallel=2))
    trained.append(training_devices())
    print(json.dumps([found, [[device.id for device in several] for several in trained]]))


def in_distributed(folder, port, process):
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    ids = [device.id for device in jax.local_devices()]
    print(json.dumps([ids, jax.device_count(), ask(folder)]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tiny_models import write_target

    return write_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def tokens(folder):
    return ask(folder)[2]


def test_an_engine_runs_where_it_is_told(folder, tokens):
    ((found, trained),) = run(f"on_three({str(folder)!r})")
    meshes, weights, answers = zip(*found, strict=True)
    assert list(meshes) == [[0], [1], [2], [1], [2, 0], [2, 0]]
    assert list(weights) == [sorted(mesh) for mesh in meshes]
    assert list(answers) == [tokens] * 6
    assert trained == [[2], [0, 1, 2], [0, 1, 2]]


def test_every_process_of_a_cluster_has_an_engine_of_its_own(folder, tokens):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    found = run(*(f"in_distributed({str(folder)!r}, {port}, {process})" for process in range(2)))
    assert found[0][0] != found[1][0]
    for ids, count, answer in found:
        assert count == 2
        assert answer == [ids, ids, tokens]


@pytest.mark.parametrize(
    ("device", "count", "message"),
    [
        ("cpu", 2, "engine.tensor_parallel is 2, but jax sees 1 devices of this process"),
        (None, 2, "engine.tensor_parallel is 2, but jax sees 1 devices of this process"),
        ("cpu:0", 2, "device names 1 devices, but engine.tensor_parallel is 2"),
        ("cpu:7", 1, "device 'cpu:7': this process has cpu:0 to cpu:0"),
        ("cpu:", 1, "device 'cpu:': this process has cpu:0 to cpu:0"),
        ("cpu:-1", 1, "device 'cpu:-1': this process has cpu:0 to cpu:0"),
        ("gpx", 1, "jax finds no device 'gpx'"),
        ("", 1, "jax finds no device 'of no name'"),
        ("cpu:0,cpu:0", 2, "device must name different devices of one platform"),
        ([], None, "device must name different devices of one platform"),
        (7, 1, "device must be a jax.Device or text"),
    ],
)
def test_what_is_no_device_is_named(device, count, message):
    with pytest.raises(ConfigError, match=message):
        choose_devices(device, count)


def test_a_device_is_passed_on(folder):
    for answer in (jaxspec.load, lambda *args, **options: jaxspec.generate([1], *args, **options)):
        with pytest.raises(ConfigError, match="device 'cpu:9'"):
            answer(folder, device="cpu:9")


def test_a_device_of_another_process_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ConfigError, match="belongs to another process"):
        choose_devices(jax.devices()[0])


def test_a_platform_may_be_the_default_device():
    with jax.default_device("cpu"):
        assert default_device() == jax.local_devices()[0]


@pytest.mark.parametrize("command", ["jaxspec", "train", "batch"])
def test_the_command_lines_name_a_wrong_device(command, tiny_config, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "w6"}\n')
    if command == "jaxspec":
        status = main(["w6", "--model", str(tiny_config), "--device", "cpu:9"])
    elif command == "train":
        words = ["--target", str(tiny_config), "--prompts", str(rows), "--output", str(tmp_path / "out")]
        status = train.main([*words, "--device", "cpu:9"])
    else:
        words = [str(tiny_config), "--input", str(rows), "--output", str(tmp_path / "out.jsonl")]
        status = batch.main([*words, "--device", "cpu:9"])
        assert batch.main([*words, "--device", "cpu", "--replicas", "2"]) == 2
        assert "error: --device: --replicas gives every engine" in capsys.readouterr().err
        assert batch.main([*words, "--device", "cpu"]) == 0
        return
    assert status == 2
    assert capsys.readouterr().err == "error: device 'cpu:9': this process has cpu:0 to cpu:0\n"


def test_a_platform_that_is_not_there_is_one_line(tiny_config):
    done = subprocess.run(
        [sys.executable, "-m", "jaxspec", "w6", "--model", str(tiny_config)],
        env={**os.environ, "JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
    )
    if "no device" not in done.stderr:
        pytest.skip("there is a GPU")
    assert done.returncode == 2
    assert done.stderr.startswith("error: JAX_PLATFORMS is 'cuda', but jax finds no device: ")
    assert done.stderr.count("\n") == 1
