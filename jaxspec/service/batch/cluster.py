"""Joining a Ray cluster, and dividing it among engines."""

import socket
from dataclasses import dataclass
from typing import Any

import ray

from jaxspec.config import ConfigError

_SECONDS_TO_CONNECT = 10.0


def connect(address: str | None) -> None:
    """Joins a cluster, or starts one on this machine; does nothing if Ray is already initialised.

    Args:
      address: as in `ray.init`; None joins the cluster that RAY_ADDRESS names, if it is set.

    Raises:
      ConfigError: there is no cluster at the address.
    """
    if ray.is_initialized():
        return
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        # Checked first, because Ray retries for minutes and then ends the process.
        try:
            socket.create_connection((host, int(port)), timeout=_SECONDS_TO_CONNECT).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--ray: no cluster at {address}: {error}") from None
    try:
        ray.init(address, include_dashboard=False if address is None else None)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--ray: {error}") from None


@dataclass(frozen=True)
class Share:
    """How a cluster is divided among engines.

    Attributes:
      actors: number of engines.
      resources: the resources that each actor requests from Ray.
      cores: CPU cores that each engine uses; None on GPUs.
    """

    actors: int
    resources: dict[str, Any]
    cores: int | None = None


def share_cluster(actors: int | None, tensor_parallel: int) -> Share:
    """Divides the cluster among engines.

    Args:
      actors: number of engines; None for as many as the GPUs allow, or one per machine without GPUs.
      tensor_parallel: devices per engine.

    Raises:
      ConfigError: the cluster does not have enough devices or cores.
    """
    resources = ray.cluster_resources()
    gpus, cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    if gpus:
        actors = actors or max(gpus // tensor_parallel, 1)
        if actors * tensor_parallel > gpus:
            each = "a GPU" if tensor_parallel == 1 else f"{tensor_parallel} GPUs"
            raise ConfigError(f"{actors} engines of {each} each: the cluster has {gpus}")
        return Share(actors, {"num_gpus": tensor_parallel})
    if tensor_parallel > 1:
        raise ConfigError(f"engine.tensor_parallel is {tensor_parallel}: the cluster has no GPUs")
    machines = sum(node["Alive"] for node in ray.nodes())
    actors = actors or machines
    if actors > cores:
        raise ConfigError(f"{actors} engines need a CPU core each, and the cluster has {cores}")
    # One core is left for reading and writing, which would never be scheduled otherwise.
    num_cpus = min((cores - 1) / actors, 1) if cores > 1 else 0
    return Share(actors, {"num_cpus": num_cpus}, max(cores // max(actors, machines), 1))
