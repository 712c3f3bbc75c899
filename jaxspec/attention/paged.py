"""The memory of the engine's forward passes: the paged caches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxspec_kernels.attention_parts.coded_cache import Cache, CodedCache
from jaxspec_kernels.choose_entries import choose_entries
from jaxspec_kernels.latent_attention import latent_attention
from jaxspec_kernels.latent_write import latent_write
from jaxspec_kernels.paged_attention import paged_attention
from jaxspec_kernels.rope_kv_write import rope_kv_write
from jaxspec_kernels.sparse_attention import sparse_attention

from jaxspec.attention.builder import AttentionKind, build_metadata
from jaxspec.attention.cache import LayerCache
from jaxspec.attention.memory import Entries, Recurrence
from jaxspec.attention.recurrent import StateMetadata, run_block
from jaxspec.attention.rope import RopeTables, apply_rope
from jaxspec.attention.rows import RowBlocks, join_rows, output_rows, split_rows, take_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedMemory:
    """See `Memory`. The rows of all blocks are written at once, then the blocks attend one by one.

    Writing comes first because the other order makes XLA copy the whole cache.

    Attributes:
      caches: the cache of every layer.
      metadata: for every layer the metadata of each block, from `build_metadata`.
      output_rows: i32[N'], the rows that attend in the last layer; None if all do.
      output_metadata: the metadata of these rows, by block; empty if all rows attend.
    """

    caches: tuple[LayerCache, ...]
    metadata: tuple[tuple[Any, ...], ...]
    output_rows: jax.Array | None = None
    output_metadata: tuple[Any, ...] = ()

    @classmethod
    def build(
        cls, kinds: Sequence[AttentionKind], caches: tuple[LayerCache, ...], blocks: RowBlocks
    ) -> "PagedMemory":
        """The memory of one forward pass over `blocks`, its metadata built for exactly these rows.

        Args:
          kinds: the kind of attention of every layer.
          caches: the cache of every layer.
        """
        assert len(kinds) == len(caches), (len(kinds), len(caches))
        by_block = [build_metadata(kinds, block) for block in blocks]
        memory = cls(caches, tuple(tuple(metadata[kind] for metadata in by_block) for kind in kinds))
        rows = output_rows(blocks)
        if rows is None:
            return memory
        last = kinds[-1:]
        output_metadata = tuple(
            build_metadata(last, block.outputs)[kind] for block in blocks for kind in last
        )
        return replace(memory, output_rows=rows, output_metadata=output_metadata)

    def outputs(self, layer: int, x: jax.Array) -> jax.Array:
        return take_rows(x, self.output_rows) if layer == len(self.caches) - 1 else x

    def attend(
        self,
        layer: int,
        projected: jax.Array,
        rope: RopeTables,
        *,
        scale: float,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, "PagedMemory"]:
        cache, queries = self._rotate_and_write(layer, self._pair(layer), projected, rope)
        return self._attended(layer, queries, cache, scale=scale, sinks=sinks), self._with(layer, cache)

    def attend_again(
        self, layer: int, source: int, queries: jax.Array, rope: RopeTables, *, scale: float
    ) -> tuple[jax.Array, "PagedMemory"]:
        return self._attended(layer, apply_rope(queries, rope), self._pair(source), scale=scale), self

    def _attended(
        self,
        layer: int,
        queries: jax.Array,
        cache: Cache,
        *,
        scale: float,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Attends with rotated queries [N, H, G, D] to a written cache; returns [N', H, G, D]."""

        def attend(queries: jax.Array, metadata: Any) -> jax.Array:
            return paged_attention(
                queries,
                cache,
                metadata.page_table,
                metadata.first,
                metadata.last,
                scale=scale,
                sinks=sinks,
            )

        return self._by_block(layer, queries, attend)

    def attend_latent(
        self, layer: int, queries: jax.Array, rows: jax.Array, *, value_dim: int, scale: float
    ) -> tuple[jax.Array, "PagedMemory"]:
        cache = latent_write(self._cache(layer), self._joined(layer, "slots")[None], rows[None])

        def attend(queries: jax.Array, metadata: Any) -> jax.Array:
            return latent_attention(
                queries,
                cache,
                metadata.page_table,
                metadata.first,
                metadata.last,
                value_dim=value_dim,
                scale=scale,
            )

        return self._by_block(layer, queries, attend), self._with(layer, cache)

    def attend_compressed(
        self,
        layer: int,
        queries: jax.Array,
        rows: jax.Array,
        entries: Entries | None,
        *,
        scale: float,
        sinks: jax.Array,
    ) -> tuple[jax.Array, "PagedMemory"]:
        kept = self.caches[layer]
        window, *others = kept if isinstance(kept, tuple) else (self._cache(layer),)
        window = latent_write(window, self._joined(layer, "slots")[None], rows[None])
        if entries is not None:
            others = self._write_compressed(layer, others, entries)
        choice = None if entries is None else entries.choice

        def attend(queries: jax.Array, metadata: Any, *chooser: jax.Array) -> jax.Array:
            every, seen = metadata.entries, metadata.num_entries
            listed = every[:, None]
            if choice is not None and choice.keep < every.shape[1]:
                asked, weights = chooser
                listed = choose_entries(asked, weights, others[2], every, seen, keep=choice.keep)
                seen = jnp.minimum(seen, choice.keep)
            return sparse_attention(
                queries,
                window,
                metadata.window_slots,
                metadata.window_lengths,
                others[1] if others else None,
                listed,
                seen,
                sinks,
                scale=scale,
            )

        chooser = (choice.queries, choice.weights) if choice else ()
        new = (window, *others) if others else window
        return self._by_block(layer, queries, attend, *chooser), self._with(layer, new)

    def _write_compressed(self, layer: int, caches: Sequence[jax.Array], entries: Entries) -> list[jax.Array]:
        """Writes the rows' states and the entries that they end.

        Args:
          caches: [pages, 1, 1, P, W], the states by position; then by entry what `entries.make` returns.

        Returns:
          All of them, written. All rows are written before any is read, so an entry may include rows of this
          pass.
        """
        states, *made = caches
        states = latent_write(states, self._joined(layer, "slots")[None], entries.states[None])
        page, offset = jnp.divmod(self._joined(layer, "entry_sources"), states.shape[3])
        new = entries.make(
            states[page, 0, 0, offset], self._joined(layer, "entry_seen"), self._joined(layer, "entry_starts")
        )
        slots = self._joined(layer, "written_entries")[None]
        return [states, *(latent_write(old, slots, each[None]) for old, each in zip(made, new, strict=True))]

    def recur(self, layer: int, recurrence: Recurrence) -> tuple[jax.Array, "PagedMemory"]:
        kept, outputs = self.caches[layer], []
        assert isinstance(kept, tuple)
        blocks: tuple[StateMetadata, ...] = self.metadata[layer]
        parts = split_rows(recurrence.rows, [block.shape for block in blocks])
        for block, rows in zip(blocks, parts, strict=True):
            output, kept = run_block(block, kept, rows, recurrence)
            outputs.append(output)
        return self.outputs(layer, join_rows(outputs)), self._with(layer, kept)

    def write(self, layer: int, projected: jax.Array, rope: RopeTables) -> "PagedMemory":
        """Writes the keys and values of rows that do not attend; arguments as in `attend`."""
        cache, _ = self._rotate_and_write(layer, self._pair(layer), projected, rope)
        return self._with(layer, cache)

    def _rotate_and_write(
        self, layer: int, cache: Cache, projected: jax.Array, rope: RopeTables
    ) -> tuple[Cache, jax.Array]:
        """Returns the written cache and the rotated queries [N, H, G, D]."""
        cos, sin = rope
        slots = self._joined(layer, "slots")
        # The kernel takes rows by slot, [slots, rows, …]. For a write the grouping does not matter.
        cache, queries = rope_kv_write(cache, slots[None], projected[None], cos[None], sin[None])
        return cache, queries.squeeze(0)

    def _by_block(
        self, layer: int, queries: jax.Array, attend: Callable[..., jax.Array], *more: jax.Array
    ) -> jax.Array:
        """Calls `attend` with each block's queries [G, Q, heads, D] and metadata, for the rows that attend.

        Takes queries [N, ..., D]; returns [N', ..., D'] with the last axis that `attend` returns. Each of
        `more`, [N, ...], is a further argument, [G, Q, ...].
        """
        queries = self.outputs(layer, queries)
        is_last = layer == len(self.caches) - 1
        metadata = self.output_metadata if is_last and self.output_metadata else self.metadata[layer]
        heads = queries.reshape(len(queries), -1, queries.shape[-1])
        shapes = [block.slots.shape for block in metadata]
        parts = (split_rows(x, shapes) for x in (heads, *(self.outputs(layer, x) for x in more)))
        attended = join_rows(
            attend(part, block, *others) for block, part, *others in zip(metadata, *parts, strict=True)
        )
        return attended.reshape(*queries.shape[:-1], attended.shape[-1])

    def _joined(self, layer: int, name: str) -> jax.Array:
        """One attribute of a layer's metadata for the rows of all blocks, [N, ...]."""
        return join_rows(getattr(block, name) for block in self.metadata[layer])

    def _pair(self, layer: int) -> Cache:
        cache = self.caches[layer]
        assert isinstance(cache, jax.Array | CodedCache)
        return cache

    def _cache(self, layer: int) -> jax.Array:
        cache = self.caches[layer]
        assert isinstance(cache, jax.Array)
        return cache

    def _with(self, layer: int, cache: LayerCache) -> "PagedMemory":
        return replace(self, caches=(*self.caches[:layer], cache, *self.caches[layer + 1 :]))
