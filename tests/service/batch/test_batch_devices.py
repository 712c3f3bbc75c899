import os

import jax
import pytest

from jaxspec import ConfigError
from jaxspec.provenance import device
from jaxspec.service.batch import HostDevices, devices

GPUS = HostDevices("gpu", 4, "4 x H")
CPU = HostDevices("cpu", 1, "1 x CPU")


def test_what_another_process_sees_is_what_this_one_sees():
    assert HostDevices.find() == HostDevices(jax.default_backend(), jax.device_count(), device())


def test_no_devices_are_one_line(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "abacus")
    with pytest.raises(ConfigError, match=r"JAX finds no devices: .*abacus"):
        HostDevices.find()


@pytest.mark.parametrize(
    ("visible", "replicas", "each", "shares"),
    [
        (None, 2, 2, ["0,1", "2,3"]),
        (None, 3, 1, ["0", "1", "2"]),
        ("7,5,3,1", 2, 1, ["7", "5"]),
        ("GPU-a,GPU-b,GPU-c,GPU-d", 1, 4, ["GPU-a,GPU-b,GPU-c,GPU-d"]),
    ],
)
def test_gpus_are_shared_out(monkeypatch, visible, replicas, each, shares):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert GPUS.share(replicas, each) == [{"CUDA_VISIBLE_DEVICES": share} for share in shares]


def test_cores_are_divided(monkeypatch):
    monkeypatch.setattr(devices, "available_cores", lambda: 8)
    assert [share["NPROC"] for share in CPU.share(3, 1)] == ["3", "3", "2"]
    assert [share["OMP_NUM_THREADS"] for share in CPU.share(8, 1)] == ["1"] * 8


@pytest.mark.parametrize(
    ("host", "replicas", "each", "problem"),
    [
        (GPUS, 5, 1, "5 replicas of a device each: JAX sees 4 x H"),
        (GPUS, 2, 3, "2 replicas of 3 devices each: JAX sees 4 x H"),
        (CPU, 10_000, 1, f"10000 replicas need a CPU core each, and there are {devices.available_cores()}"),
        (CPU, 1, 2, "engine.tensor_parallel is 2: JAX sees 1 x CPU"),
    ],
)
def test_more_than_there_is_is_refused(host, replicas, each, problem):
    with pytest.raises(ConfigError) as error:
        host.share(replicas, each)
    assert str(error.value) == problem


def test_a_child_finds_the_same_modules(monkeypatch):
    monkeypatch.syspath_prepend("/somewhere")
    environment = devices.child_environment({"NPROC": "3"})
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == "/somewhere"
    assert environment["NPROC"] == "3"
