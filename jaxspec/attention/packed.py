"""The memory of whole texts without a cache, for training and evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxspec_kernels.attention_parts.coded_cache import decode, encode
from jaxspec_kernels.narrow import narrow
from jaxspec_kernels.packed_attention import packed_attention, packed_attention_gradients

from jaxspec.attention.builder import AttentionKind
from jaxspec.attention.compressed import CompressedAttention
from jaxspec.attention.memory import Choice, Entries, Recurrence, States
from jaxspec.attention.metadata import visible_range
from jaxspec.attention.rope import RopeTables, apply_rope

KeysValues = tuple[jax.Array, jax.Array]
"""[B, S, H, D] each."""

OwnKey = tuple[jax.Array, jax.Array, jax.Array]
"""Keys and values [B, S, H, D], and bool[B, S]: whether row i, and no other, sees the key at i."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedMemory:
    """See `Memory`. B sequences of S rows, each sequence several texts one after another; N = B * S.

    The memory that a forward pass returns is the memory of the next draft step. It holds the keys and values
    of all passes so far, and the next pass's rows are one position further. Row i then sees the first pass's
    rows up to i and its own rows of the later passes, which is what the cache holds when the engine drafts
    from row i.

    Attributes:
      kinds: the kind of attention of every layer, static.
      positions: i32[B, S], each row's position in its own text, in the first pass.
      segments: i32[B, S], the number of the text in its sequence that a row belongs to.
      kept: for every layer the keys and values of each pass so far.
      cache_dtype: layers with pairs of keys and values round them to this dtype, as a cache of it would;
        static. None does not round.
    """

    kinds: tuple[AttentionKind, ...] = field(metadata={"static": True})
    positions: jax.Array
    segments: jax.Array
    kept: Mapping[int, tuple[KeysValues, ...]] = field(default_factory=dict)
    cache_dtype: jnp.dtype | None = field(default=None, metadata={"static": True})

    @property
    def ahead(self) -> int:
        """By how many positions the rows of the next pass are ahead of `positions`."""
        return max(map(len, self.kept.values()), default=0)

    def outputs(self, layer: int, x: jax.Array) -> jax.Array:
        return x

    def attend(
        self,
        layer: int,
        projected: jax.Array,
        rope: RopeTables,
        *,
        scale: float,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, "PackedMemory"]:
        queries, *pair = self._rotated(projected, rope)
        keys, values = map(self._as_cached, pair)
        memory = self._with(layer, keys, values)
        return memory._attend(layer, queries, scale, sinks), memory

    def attend_again(
        self, layer: int, source: int, queries: jax.Array, rope: RopeTables, *, scale: float
    ) -> tuple[jax.Array, "PackedMemory"]:
        # Both layers have one kind of attention, so the source's rows are those that this layer sees.
        return self._attend(source, self._by_sequence(apply_rope(queries, rope)), scale), self

    def attend_latent(
        self, layer: int, queries: jax.Array, rows: jax.Array, *, value_dim: int, scale: float
    ) -> tuple[jax.Array, "PackedMemory"]:
        keys = self._by_sequence(rows[:, None])
        memory = self._with(layer, keys, keys[..., :value_dim])
        return memory._attend(layer, self._by_sequence(queries[:, None]), scale)[:, 0], memory

    def attend_compressed(
        self,
        layer: int,
        queries: jax.Array,
        rows: jax.Array,
        entries: Entries | None,
        *,
        scale: float,
        sinks: jax.Array,
    ) -> tuple[jax.Array, "PackedMemory"]:
        keys = self._by_sequence(rows[:, None])
        memory = self._with(layer, keys, keys)
        queries = self._by_sequence(queries[:, None])
        kind = self.kinds[layer]
        assert isinstance(kind, CompressedAttention)
        if entries is None or self.positions.shape[1] < kind.ratio:  # no row ends an entry
            return memory._attend(layer, queries, scale, sinks)[:, 0], memory
        assert layer not in self.kept, "draft steps do not support compressed entries"
        made, visible = self._compressed(kind, entries)
        _, first = self._first(layer, 0)
        row = jnp.arange(self.positions.shape[1])
        window = (row >= first[:, :, None]) & (row <= row[:, None])
        vectors = jnp.concatenate([keys, made[:, :, None]], axis=1)
        seen = jnp.concatenate([window, visible], axis=2)
        attended = _attend_visible(queries, vectors, vectors, seen, scale=scale, sinks=sinks)
        return attended.reshape(-1, *attended.shape[3:]), memory

    def _compressed(self, kind: CompressedAttention, entries: Entries) -> tuple[jax.Array, jax.Array]:
        """The entries of every sequence, [B, E, D], and which of them each row sees, bool[B, S, E]."""
        size = self.positions.shape[1]
        count = size // kind.ratio
        is_end = (self.positions + 1) % kind.ratio == 0
        # Behind the last entry of a sequence stand ends past all rows.
        ends = jax.vmap(lambda each: jnp.nonzero(each, size=count, fill_value=size)[0])(is_end)

        def at(x: jax.Array, rows: jax.Array) -> jax.Array:
            return jax.vmap(lambda x, rows: x.at[rows].get(mode="clip"))(x, rows)

        starts = self._starts()
        begins = at(starts, ends)
        sources = ends[..., None] + jnp.arange(1 - kind.num_sources, 1)
        there = (sources >= begins[..., None]) & (ends < size)[..., None]
        states = at(self._by_sequence(entries.states), jnp.maximum(sources, 0))
        first = at(self.positions, ends) - (kind.ratio - 1)
        flat = (x.reshape(-1, *x.shape[2:]) for x in (states, there, first))
        made, *keys = (x.reshape(*ends.shape, -1) for x in entries.make(*flat))
        rows = jnp.arange(size)[:, None]
        visible = (ends[:, None] <= rows) & (ends[:, None] >= starts[..., None])
        if entries.choice is not None and entries.choice.keep < count:
            visible &= self._chosen(entries.choice, keys[0], visible)
        return made, visible

    def _chosen(self, choice: Choice, keys: jax.Array, visible: jax.Array) -> jax.Array:
        """Which entries each row chooses, bool[B, S, E], by their keys [B, E, D']."""
        queries, weights = self._by_sequence(choice.queries), self._by_sequence(choice.weights)
        by_head = jax.nn.relu(_einsum("bqid,bsd->bqis", queries, keys))
        scores = _einsum("bqi,bqis->bqs", weights, by_head)
        _, chosen = lax.top_k(jnp.where(visible, scores, -jnp.inf), choice.keep)
        return (chosen[..., None] == jnp.arange(keys.shape[1])).any(axis=2)

    def recur(self, layer: int, recurrence: Recurrence) -> tuple[jax.Array, "PackedMemory"]:
        rows = self._by_sequence(recurrence.rows)
        is_start = self._starts() == jnp.arange(rows.shape[1], dtype=jnp.int32)
        sequences, _, heads, _ = rows.shape

        def step(states: States, each: tuple[jax.Array, jax.Array]) -> tuple[States, jax.Array]:
            row, begins = each
            outputs, states = recurrence.step(reset(states, begins), row)
            return states, outputs

        def reset(states: States, begins: jax.Array) -> States:
            at = lambda array: begins.reshape(-1, *(1 for _ in array.shape[1:]))  # noqa: E731
            return tuple(jnp.where(at(array), jnp.zeros_like(array), array) for array in states)

        none = tuple(
            jnp.zeros((sequences, heads, *each), dtype or rows.dtype)
            for each, dtype in recurrence.shape.states
        )
        _, outputs = lax.scan(step, none, (jnp.swapaxes(rows, 0, 1), is_start.T))
        outputs = jnp.swapaxes(outputs, 0, 1)
        return outputs.reshape(-1, *outputs.shape[2:]), self

    def _attend(
        self, layer: int, queries: jax.Array, scale: float, sinks: jax.Array | None = None
    ) -> jax.Array:
        """Attends with queries [B, S, H, G, D] of the latest pass in `kept`; returns [N, H, G, D]."""
        (keys, values), *later = self.kept[layer]
        first, first_row = self._first(layer, len(later))
        own = tuple((*each, self.positions + j >= first) for j, each in enumerate(later, 1))
        attended = attend(queries, keys, values, first_row, scale=scale, own=own, sinks=sinks)
        return attended.reshape(-1, *attended.shape[2:])

    def _first(self, layer: int, ahead: int) -> tuple[jax.Array, jax.Array]:
        """The first position and the first row that each row sees when it is `ahead` positions further,
        i32[B, S] each."""
        first, _ = visible_range(self.kinds[layer], self.positions + ahead)
        row = jnp.arange(self.positions.shape[1], dtype=jnp.int32)
        return first, jnp.maximum(self._starts(), row - (self.positions - first))

    def _starts(self) -> jax.Array:
        """i32[B, S]: the first row of each row's text."""
        row = jnp.arange(self.positions.shape[1], dtype=jnp.int32)
        is_start = self.segments != jnp.pad(self.segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
        return lax.cummax(jnp.where(is_start, row, 0), axis=1)

    def _rotated(self, projected: jax.Array, rope: RopeTables) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, S, H, G, D], keys and values [B, S, H, D]."""
        queries, keys, values = projected[..., :-2, :], projected[..., -2, :], projected[..., -1, :]
        queries, keys = apply_rope(queries, rope), apply_rope(keys, rope)
        return self._by_sequence(queries), self._by_sequence(keys), self._by_sequence(values)

    def _as_cached(self, x: jax.Array) -> jax.Array:
        """Keys or values as a cache of `cache_dtype` holds them."""
        if self.cache_dtype is None:
            return x
        if self.cache_dtype == jnp.float8_e4m3fn:
            return decode(*encode(x)).astype(x.dtype)
        return narrow(x, self.cache_dtype).astype(x.dtype)

    def _by_sequence(self, x: jax.Array) -> jax.Array:
        """Reshapes x [N, ...] to [B, S, ...]."""
        return x.reshape(*self.positions.shape, *x.shape[1:])

    def _with(self, layer: int, keys: jax.Array, values: jax.Array) -> "PackedMemory":
        kept = (*self.kept.get(layer, ()), (keys, values))
        return replace(self, kept={**self.kept, layer: kept})


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    first: jax.Array,
    *,
    scale: float,
    own: tuple[OwnKey, ...] = (),
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention of every row over the rows first..itself, and over keys that only it sees.

    Args:
      queries: [B, S, H, G, D].
      keys, values: [B, S, H, D]; a value may be shorter than its key.
      first: i32[B, S], the first row that a row sees; never falls within a sequence.
      scale: factor of the dot products.
      own: keys that only one row sees.
      sinks: [H * G], one more logit per query head in the softmax, or None.

    Returns:
      [B, S, H, G, D] in the dtype of `queries`, D that of the values; softmax in float32.
    """
    return _attend(scale, queries, keys, values, first, own, sinks)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    scale: float,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    first: jax.Array,
    own: tuple[OwnKey, ...],
    sinks: jax.Array | None,
) -> jax.Array:
    return _forward(scale, queries, keys, values, first, own, sinks)[0]


def _forward(
    scale: float,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    first: jax.Array,
    own: tuple[OwnKey, ...],
    sinks: jax.Array | None,
) -> tuple[jax.Array, tuple]:
    attended, log_total = packed_attention(queries, keys, values, first, scale=scale)
    columns = [_own_scores(queries, key, seen, scale) for key, _, seen in own]
    if sinks is not None:
        columns.append(jnp.broadcast_to(_by_head(sinks, queries), log_total.shape))
    if columns:
        shared = log_total
        log_total = jax.nn.logsumexp(jnp.stack([shared, *columns]), axis=0)
        total = attended * jnp.exp(shared - log_total)[..., None]
        # The sink, which is the last column, has no value.
        for column, (_, value, _) in zip(columns, own, strict=False):
            total += jnp.exp(column - log_total)[..., None] * value[:, :, :, None]
        attended = total.astype(queries.dtype)
    return attended, (queries, keys, values, first, own, sinks, attended, log_total)


def _backward(scale: float, saved: tuple, gradient: jax.Array) -> tuple:
    queries, keys, values, first, own, sinks, attended, log_total = saved
    mean = _einsum("bqhgd,bqhgd->bqhg", gradient, attended)
    to_queries, to_keys, to_values = packed_attention_gradients(
        queries, keys, values, first, log_total, gradient, mean, scale=scale
    )
    to_own = []
    for key, value, seen in own:
        weight = jnp.exp(_own_scores(queries, key, seen, scale) - log_total)
        score = weight * (_einsum("bqhgd,bqhd->bqhg", gradient, value) - mean) * scale
        to_queries += score[..., None] * key[:, :, :, None]
        to_key = _einsum("bqhg,bqhgd->bqhd", score, queries).astype(key.dtype)
        to_value = _einsum("bqhg,bqhgd->bqhd", weight, gradient).astype(value.dtype)
        to_own.append((to_key, to_value, None))
    to_sinks: Any = None
    if sinks is not None:
        share = jnp.exp(_by_head(sinks, queries) - log_total)
        to_sinks = -(share * mean).sum(axis=(0, 1)).reshape(sinks.shape).astype(sinks.dtype)
    return to_queries.astype(queries.dtype), to_keys, to_values, None, tuple(to_own), to_sinks


_attend.defvjp(_forward, _backward)


def _own_scores(queries: jax.Array, key: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
    """f32[B, S, H, G], -inf where `seen` is false."""
    return jnp.where(seen[..., None, None], _einsum("bqhgd,bqhd->bqhg", queries, key) * scale, -jnp.inf)


def _by_head(sinks: jax.Array, queries: jax.Array) -> jax.Array:
    """f32[H, G]."""
    return sinks.astype(jnp.float32).reshape(queries.shape[2:4])


def _attend_visible(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: jax.Array,
    *,
    scale: float,
    sinks: jax.Array,
) -> jax.Array:
    """`attend` over keys and values [B, R, H, D] that need not be rows, where `visible`, bool[B, S, R]."""
    scores = _einsum("bqhgd,bshd->bhgqs", queries, keys) * scale
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    column = jnp.broadcast_to(_by_head(sinks, queries)[..., None, None], (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    return _einsum("bhgqs,bshd->bqhgd", weights.astype(queries.dtype), values).astype(queries.dtype)


def _einsum(equation: str, *args: jax.Array) -> jax.Array:
    precision = "highest" if args[-1].dtype == jnp.float32 else None
    return jnp.einsum(equation, *args, precision=precision, preferred_element_type=jnp.float32)
