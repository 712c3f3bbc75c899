"""Dividing a machine's devices among several engines."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from jaxspec.config import ConfigError
from jaxspec.interpreter import python_interpreter

_LOOK = """
import json, jaxspec.provenance
from jaxspec.jax_settings import choose_devices
devices = choose_devices()
print(json.dumps([devices[0].platform, len(devices), jaxspec.provenance.device(devices)]))
"""


@dataclass(frozen=True)
class HostDevices:
    """The devices that JAX sees on this machine.

    Attributes:
      backend: "cpu" or "gpu".
      count: number of devices.
      description: as text, for messages.
    """

    backend: str
    count: int
    description: str

    @classmethod
    def find(cls) -> "HostDevices":
        """Finds the devices in a child process, since a process that looks for GPUs reserves memory on each.

        Raises:
          ConfigError: JAX finds none.
        """
        done = subprocess.run(
            [python_interpreter(), "-P", "-c", _LOOK],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            env=child_environment(),
        )
        if done.returncode:
            raise ConfigError(f"JAX finds no devices: {done.stderr.strip().rpartition(chr(10))[2]}")
        return cls(*json.loads(done.stdout.splitlines()[-1]))

    def share(self, replicas: int, tensor_parallel: int) -> list[dict[str, str]]:
        """Environment variables for each replica, so that it sees only its own devices.

        GPUs are divided among the replicas: those that CUDA_VISIBLE_DEVICES names, or all if it is not set.
        On a CPU the cores are divided.

        Args:
          replicas: number of engines.
          tensor_parallel: devices per engine.

        Raises:
          ConfigError: there are not enough devices or cores.
        """
        if self.backend == "cpu":
            return self._share_cores(replicas, tensor_parallel)
        if replicas * tensor_parallel > self.count:
            each = "a device" if tensor_parallel == 1 else f"{tensor_parallel} devices"
            raise ConfigError(f"{replicas} replicas of {each} each: JAX sees {self.description}")
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = list(map(str, range(self.count))) if named is None else named.split(",")
        starts = range(0, replicas * tensor_parallel, tensor_parallel)
        return [{"CUDA_VISIBLE_DEVICES": ",".join(devices[i : i + tensor_parallel])} for i in starts]

    def _share_cores(self, replicas: int, tensor_parallel: int) -> list[dict[str, str]]:
        cores = available_cores()
        if tensor_parallel > self.count:
            raise ConfigError(f"engine.tensor_parallel is {tensor_parallel}: JAX sees {self.description}")
        if replicas > cores:
            raise ConfigError(f"{replicas} replicas need a CPU core each, and there are {cores}")
        return [thread_limits(cores // replicas + (i < cores % replicas)) for i in range(replicas)]


def available_cores() -> int:
    """The number of CPU cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def thread_limits(cores: int) -> dict[str, str]:
    """Environment variables that limit the threads of XLA, of our kernels and of BLAS to `cores`."""
    return {"NPROC": str(cores), "OMP_NUM_THREADS": str(cores)}


def child_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a child process: this process's own, with the same module path and `changes`."""
    path = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "PYTHONPATH": path, **(changes or {})}
