"""Several residual streams, as `config.json` describes them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamsConfig:
    """Manifold-constrained hyper-connections: each block reads a mix of all residual streams, which it then
    mixes by a doubly stochastic matrix and adds its output to.

    Attributes:
      count: the number of streams.
      iterations: of the Sinkhorn-Knopp algorithm, which makes the matrix doubly stochastic.
      eps: keeps its divisors, and the weights of what a block reads, above zero.
    """

    count: int
    iterations: int
    eps: float
