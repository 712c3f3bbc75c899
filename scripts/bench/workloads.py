"""The requests of the load benchmark."""

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    """A prompt (text, token ids or messages) and the length of its answer in tokens."""

    prompt: str | Sequence
    new_tokens: int


def workloads(*, vocab_size: int, seed: int = 7, scale: float = 1.0) -> dict[str, list[Asked]]:
    """The requests of every workload, by name; they are determined by the seed.

    Args:
      vocab_size: V; token ids are below it.
      seed: of token ids and lengths.
      scale: factor of the lengths and numbers of requests, except for the lengths of "mixed".
    """
    rng = random.Random(seed)

    def size(count: int) -> int:
        return max(1, int(count * scale))

    def ids(length: int) -> list[int]:
        return [rng.randrange(5, 40000) % vocab_size for _ in range(length)]

    def length(median: int, sigma: float, most: int) -> int:
        return max(16, min(most, int(rng.lognormvariate(0, sigma) * median)))

    # The order matters: all workloads draw from one random stream.
    requests = {
        "ttft 512": [Asked(ids(size(512)), 1)],
        "ttft 4096": [Asked(ids(size(4096)), 1)],
        "prefill 16x2048": [Asked(ids(size(2048)), 1) for _ in range(size(16))],
        "single 512+256": [Asked(ids(size(512)), size(256))],
        "mixed 256": [
            Asked(ids(length(180, 0.8, most=1024)), length(200, 0.6, most=768)) for _ in range(size(256))
        ],
    }
    head = ids(size(1024))
    requests["shared 64x1024"] = [Asked(head + ids(32), size(64)) for _ in range(size(64))]
    # Measures how long a very long prompt delays the tokens of others.
    requests["beside 32k"] = [
        *(Asked(ids(size(512)), size(1024)) for _ in range(8)),
        Asked(ids(size(32000)), 1),
    ]
    return requests


def poisson(count: int, *, rate: float | None, seed: int) -> list[float]:
    """Arrival times of requests, in seconds from the first, at `rate` per second; None for all at once."""
    if rate is None:
        return [0.0] * count
    rng = random.Random(seed)
    at, times = 0.0, []
    for _ in range(count):
        times.append(at)
        at += rng.expovariate(rate)
    return times
