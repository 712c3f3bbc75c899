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
class Choice:
    """Which entries the rows of a layer see: those with the largest scores (`choose_entries`).

    Attributes:
      queries: [N, I, D] of I heads.
      weights: [N, I], the factors of the heads' scores.
      keep: how many entries a row sees at most.
    """

    queries: jax.Array
    weights: jax.Array
    keep: int


@dataclass(frozen=True)
class Entries:
    """How a layer compresses positions into entries, as its kind of attention says.

    Attributes:
      states: [N, W], what the entries are made of. The memory stores it until all of an entry's positions are
        there, because they come in several passes, and drafts among them are replaced.
      make: (states [F, R, W], which of them there are, bool[F, R], the first position of each entry without
        its overlap, i32[F]) -> the entries [F, D]; with a choice also their keys for it, [F, D'].
      choice: None if rows see every entry of their past.
    """

    states: jax.Array
    make: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, ...]]
    choice: Choice | None = None


States = tuple[jax.Array, ...]
"""The state of n sequences in a recurrent layer: arrays [n, H, ...]."""


class Rule(Protocol):
    """How a recurrent layer's state goes on; see `Recurrence`."""

    def step(self, states: States, rows: jax.Array) -> tuple[jax.Array, States]: ...

    def chunk(self, states: States, rows: jax.Array, valid: jax.Array) -> tuple[jax.Array, States]: ...


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
      verify, read: kernels that do what `verify_rows` and `read_rows` of
        `jaxspec_kernels.linear_recurrence.state_loops` make of `step` and `chunk`, without these arguments;
        None if there are none.
    """

    shape: StateShape
    rows: jax.Array
    step: Callable[[States, jax.Array], tuple[jax.Array, States]]
    chunk: Callable[[States, jax.Array, jax.Array], tuple[jax.Array, States]]
    verify: Callable[..., tuple[States, jax.Array, jax.Array]] | None = None
    read: Callable[..., tuple[States, jax.Array]] | None = None

    @classmethod
    def with_kernels(
        cls,
        shape: StateShape,
        rows: jax.Array,
        rule: Rule,
        kernels: tuple[Callable[..., tuple[jax.Array, ...]], Callable[..., tuple[jax.Array, ...]]],
    ) -> "Recurrence":
        """A rule with the operations that are its `verify` and `read`.

        These take and return the arrays one by one, and take the rule last.
        """
        step, scan = kernels

        def verify(arrays: States, *given: jax.Array) -> tuple[States, jax.Array, jax.Array]:
            *updated, pending, outputs = step(*arrays, *given, rule)
            return tuple(updated), pending, outputs

        def read(arrays: States, *given: jax.Array) -> tuple[States, jax.Array]:
            *updated, outputs = scan(*arrays, *given, rule)
            return tuple(updated), outputs

        return cls(shape, rows, rule.step, rule.chunk, verify, read)


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

    def attend_compressed(
        self,
        layer: int,
        queries: jax.Array,
        rows: jax.Array,
        entries: Entries | None,
        *,
        scale: float,
        sinks: jax.Array,
    ) -> tuple[jax.Array, Self]:
        """Attention over a window of positions and over compressed entries of the whole past.

        Args:
          queries: [N, heads, D].
          rows: [N, D], each row's vector, which is key and value for all heads.
          entries: of the same form as `rows`; None for a layer without them.
          scale: factor of the dot products.
          sinks: [heads], one more logit per head in the softmax.

        Returns:
          [N', heads, D], and the memory.
        """
        ...

    def recur(self, layer: int, recurrence: Recurrence) -> tuple[jax.Array, Self]:
        """Runs a recurrent layer (`Recurrent`).

        Returns:
          What its rows put out, [N', H, ...], and the memory.
        """
        ...


AnyMemory = TypeVar("AnyMemory", bound=Memory)
