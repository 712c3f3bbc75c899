"""What the rows of a forward pass attend to: the one thing that knows where they belong.

A network runs over N flat rows and never learns whether they are prompt, draft or training rows, nor which
of them belong together. It hands every layer's queries, keys and values to a memory, which keeps the keys
and values and attends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import jax

from jaxspec.attention.rope import RopeTables


@dataclass(frozen=True)
class Pool:
    """How a layer makes one entry of r positions.

    Attributes:
      contents, gates: [N, H, D] of the rows, H key/value heads; they wait in the memory for the rest of
        their entry.
      entry: (contents [N, r, H, D], gates [N, r, H, D], positions i32[N]) -> keys and values [N, H, D] of
        the entries that start at these positions.
    """

    contents: jax.Array
    gates: jax.Array
    entry: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Memory(Protocol):
    """The memory of one forward pass, with the kind of attention of each layer; a pytree.

    Every method takes the layer's index and returns a memory that holds the layer's new keys and values.
    They are kept before any row attends, so rows of the same pass see one another as their kind allows.
    """

    def attend(
        self,
        layer: int,
        projected: jax.Array,
        rope: RopeTables,
        *,
        scale: float,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Self]:
        """Attention of query heads that share the key and value of their group.

        Args:
          projected: [N, H, G + 2, D]: for each of H key/value heads its G queries, its key and its value,
            not rotated yet.
          rope: of the rows' positions.
          scale: what dot products are multiplied by.
          sinks: [H * G], one more logit per query head in the softmax, or None.

        Returns:
          [N, H, G, D].
        """
        ...

    def attend_latent(
        self, layer: int, queries: jax.Array, rows: jax.Array, *, value_dim: int, scale: float
    ) -> tuple[jax.Array, Self]:
        """Attention of heads that share one vector per position.

        Args:
          queries: [N, H, D].
          rows: [N, D], each row's vector: the key, whose first `value_dim` numbers are the value.

        Returns:
          [N, H, value_dim].
        """
        ...

    def attend_indexed(
        self, layer: int, projected: jax.Array, rope: RopeTables, pool: Pool | None, *, scale: float
    ) -> tuple[jax.Array, Self]:
        """`attend` over a window of positions, and over the entries that `pool` makes of all the past.

        Returns:
          [N, H, G, D].
        """
        ...


AnyMemory = TypeVar("AnyMemory", bound=Memory)
