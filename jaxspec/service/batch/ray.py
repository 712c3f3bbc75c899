"""Engines on a Ray cluster: the replicas of a batch run, and `Answerer` for pipelines of Ray Data."""

import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from jaxspec.installation import needs

with needs("ray"):
    import ray

from jaxspec.config import ConfigError
from jaxspec.errors import one_line
from jaxspec.service.batch.actor import Answerer
from jaxspec.service.batch.devices import thread_limits
from jaxspec.service.batch.replica import Engines, Message, Refused, Replica, Work, messages
from jaxspec.service.rows import Row

__all__ = ["Answerer", "RayReplica", "connect", "share_cluster"]

_SECONDS_TO_CONNECT = 10.0


class _Actor:
    """A replica's process. Rows come in a thread of their own."""

    def __init__(self) -> None:
        self._rows: SimpleQueue[Row | None] = SimpleQueue()

    def take(self, row: Row | None) -> None:
        self._rows.put(row)

    def answer(self, work: Work) -> Iterator[Message]:
        yield from messages(work, iter(self._rows.get, None))


class RayReplica(Replica):
    """A replica in an actor's process."""

    def __init__(self, options: dict[str, Any], work: Work):
        """Starts it.

        Args:
          options: of the actor: its resources and environment.
          work: what it is to do; must be picklable.
        """
        super().__init__()
        options = {"concurrency_groups": {"rows": 1}, "scheduling_strategy": "SPREAD", **options}
        actor: Any = ray.remote(**options)(_Actor)
        self._actor = actor.remote()
        self._messages = self._actor.answer.remote(work)
        self._problem = "it ended"

    def send(self, row: Row | None) -> None:
        self._actor.take.options(concurrency_group="rows").remote(row)

    def messages(self) -> Iterator[Message]:
        try:
            for each in self._messages:
                message = ray.get(each)
                if isinstance(message, Refused):
                    self._problem = message.problem
                yield message
        except ray.exceptions.RayError as error:
            self._problem = _cause(error)

    def cause_of_death(self) -> str:
        self.close()
        return one_line(self._problem)

    def close(self) -> None:
        with suppress(ray.exceptions.RayError):
            ray.kill(self._actor)


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


def share_cluster(engines: int | None, tensor_parallel: int) -> Engines:
    """Divides the cluster among engines.

    Args:
      engines: their number; None for as many as the GPUs allow, or one per machine without GPUs.
      tensor_parallel: devices per engine.

    Raises:
      ConfigError: the cluster does not have enough devices or cores.
    """
    resources = ray.cluster_resources()
    gpus, cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    if gpus:
        engines = engines or max(gpus // tensor_parallel, 1)
        if engines * tensor_parallel > gpus:
            each = "a GPU" if tensor_parallel == 1 else f"{tensor_parallel} GPUs"
            raise ConfigError(f"{engines} engines of {each} each: the cluster has {gpus}")
        return _engines("gpu", engines, {"num_gpus": tensor_parallel})
    if tensor_parallel > 1:
        raise ConfigError(f"engine.tensor_parallel is {tensor_parallel}: the cluster has no GPUs")
    machines = sum(node["Alive"] for node in ray.nodes())
    engines = engines or machines
    if engines > cores:
        raise ConfigError(f"{engines} engines need a CPU core each, and the cluster has {cores}")
    limits = thread_limits(max(cores // max(engines, machines), 1))
    return _engines("cpu", engines, {"num_cpus": 1, "runtime_env": {"env_vars": limits}})


def _engines(backend: str, count: int, options: dict[str, Any]) -> Engines:
    return Engines(backend, f"{count} engines in a Ray cluster", [partial(RayReplica, options)] * count)


def _cause(error: Exception) -> str:
    """Of Python's errors the last line of the traceback; of the end of a process what Ray knows of it."""
    text = str(error).strip()
    if found := re.search(r"Worker exit detail: (.*?)\. ", text):
        return found[1]
    return text.rpartition("\n")[2]
