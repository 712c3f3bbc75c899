"""The interface between networks and the memory of a forward pass.

A network runs over N flat rows and does not know whether they are prompt, draft or training rows, nor which
rows belong to the same text. It passes each layer's queries, keys and values to a memory, which stores the
keys and values and computes attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import jax

from jaxspec.attention.cache import StateShape
from jaxspec.attention.rope import RopeTables


@dataclass(frozen=True)
class Pool:
    """How a layer compresses r positions into one entry.

    Attributes:
      contents, gates: [N, H, D] of the rows, H key/value heads. The memory stores them until all r rows of
        an entry are there.
      entry: (contents [N, r, H, D], gates [N, r, H, D], positions i32[N]) -> keys and values [N, H, D] of
        the entries that start at these positions.
    """

    contents: jax.Array
    gates: jax.Array
    entry: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


States = tuple[jax.Array, ...]
"""The state of n sequences in a recurrent layer: arrays [n, H, ...]."""


@dataclass(frozen=True)
class Recurrence:
    """How a recurrent layer's state goes on from row to row.

    Attributes:
      shape: of the states.
      rows: [N, H, F], what every row reads and changes its state by.
      step: (states, rows [n, H, F]) -> outputs [n, H, ...] and the states behind one row of each sequence. A
        sequence's result does not depend on the others.
      chunk: (states, rows [n, C, H, F], valid bool[n, C]) -> outputs [n, C, H, ...] and the states behind
        the valid rows, which are the first ones. Rows that are not valid may hold anything.
    """

    shape: StateShape
    rows: jax.Array
    step: Callable[[States, jax.Array], tuple[jax.Array, States]]
    chunk: Callable[[States, jax.Array, jax.Array], tuple[jax.Array, States]]


class Memory(Protocol):
    """The memory of one forward pass, with the kind of attention of each layer; a pytree.

    Every method takes the layer's index and returns, with the attended rows, a memory that also holds the
    layer's new keys and values. These are stored before any row attends, so rows of the same pass see each
    other as the kind of attention allows.

    In the last layer, some rows' outputs are not needed. These rows do not attend: what the methods return
    has the N' other rows (`RowBlock.output`). In all other layers N' = N.
    """

    def outputs(self, layer: int, x: jax.Array) -> jax.Array:
        """The rows of x [N, ...] that attend in a layer, [N', ...]: those to which its output is added."""
        ...

    def attend(
        self,
        layer: int,
        projected: jax.Array,
        rope: RopeTables,
        *,
        scale: float,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Self]:
        """Grouped-query attention: G query heads share each key/value head.

        Args:
          projected: [N, H, G + 2, D]: for each of H key/value heads its G queries, its key and its value,
            not rotated yet, so that one kernel can rotate and write.
          rope: the tables for the rows' positions.
          scale: factor of the dot products.
          sinks: [H * G], one more logit per query head in the softmax, or None.

        Returns:
          [N', H, G, D], and the memory.
        """
        ...

    def attend_again(
        self, layer: int, source: int, queries: jax.Array, rope: RopeTables, *, scale: float
    ) -> tuple[jax.Array, Self]:
        """`attend` over the keys and values of a layer before this one, of the same kind of attention.

        Args:
          source: the index of the layer that has the keys and values.
          queries: [N, H, G, D], not rotated yet.
          rope, scale: as in `attend`.

        Returns:
          [N', H, G, D], and the memory, to which nothing is added.
        """
        ...

    def attend_latent(
        self, layer: int, queries: jax.Array, rows: jax.Array, *, value_dim: int, scale: float
    ) -> tuple[jax.Array, Self]:
        """Latent attention: all heads share one vector per position.

        Args:
          queries: [N, heads, D].
          rows: [N, D], each row's vector. It is the key, and its first `value_dim` elements are the value.
          scale: factor of the dot products.

        Returns:
          [N', heads, value_dim], and the memory.
        """
        ...

    def attend_indexed(
        self, layer: int, projected: jax.Array, rope: RopeTables, pool: Pool | None, *, scale: float
    ) -> tuple[jax.Array, Self]:
        """`attend` over a window of positions and over the entries that `pool` makes of the whole past.

        Args:
          projected, rope, scale: as in `attend`.
          pool: makes the layer's entries; None for a layer without entries.

        Returns:
          [N', H, G, D], and the memory.
        """
        ...

    def recur(self, layer: int, recurrence: Recurrence) -> tuple[jax.Array, Self]:
        """Runs a recurrent layer (`Recurrent`).

        Returns:
          What its rows put out, [N', H, ...], and the memory.
        """
        ...


AnyMemory = TypeVar("AnyMemory", bound=Memory)
