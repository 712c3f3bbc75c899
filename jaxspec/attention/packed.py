"""The memory of whole texts without a cache, for training and evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jaxspec.attention.builder import AttentionKind
from jaxspec.attention.indexed_window import IndexedWindow
from jaxspec.attention.memory import Pool
from jaxspec.attention.metadata import visible_range
from jaxspec.attention.rope import RopeTables, apply_rope

KeysValues = tuple[jax.Array, jax.Array]
"""[B, S, H, D] each."""


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
    """

    kinds: tuple[AttentionKind, ...] = field(metadata={"static": True})
    positions: jax.Array
    segments: jax.Array
    kept: Mapping[int, tuple[KeysValues, ...]] = field(default_factory=dict)

    @property
    def ahead(self) -> int:
        """By how many positions the rows of the next pass are ahead of `positions`."""
        return len(self.kept.get(0, ()))

    def attend(
        self,
        layer: int,
        projected: jax.Array,
        rope: RopeTables,
        *,
        scale: float,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, "PackedMemory"]:
        queries, keys, values = self._rotated(projected, rope)
        memory = self._with(layer, keys, values)
        return memory._attend(layer, queries, scale, sinks), memory

    def attend_latent(
        self, layer: int, queries: jax.Array, rows: jax.Array, *, value_dim: int, scale: float
    ) -> tuple[jax.Array, "PackedMemory"]:
        keys = self._by_sequence(rows[:, None])
        memory = self._with(layer, keys, keys[..., :value_dim])
        return memory._attend(layer, self._by_sequence(queries[:, None]), scale)[:, 0], memory

    def attend_indexed(
        self, layer: int, projected: jax.Array, rope: RopeTables, pool: Pool | None, *, scale: float
    ) -> tuple[jax.Array, "PackedMemory"]:
        kind = self.kinds[layer]
        assert isinstance(kind, IndexedWindow)
        assert layer not in self.kept, "draft steps do not support this kind of attention"
        queries, keys, values = self._rotated(projected, rope)
        memory = self._with(layer, keys, values)
        visible = self._visible(layer, 0)
        if pool is not None:
            ends = (self.positions + 1) % kind.ratio == 0
            entry_keys, entry_values = self._entries(pool, kind.ratio)
            keys = jnp.concatenate([keys, entry_keys], axis=1)
            values = jnp.concatenate([values, entry_values], axis=1)
            past = self._same_text() & (self.positions[:, None, :] <= self.positions[:, :, None])
            visible = jnp.concatenate([visible, past & ends[:, None, :]], axis=2)
        attended = attend(queries, keys, values, visible, scale=scale)
        return attended.reshape(-1, *attended.shape[2:]), memory

    def _attend(
        self, layer: int, queries: jax.Array, scale: float, sinks: jax.Array | None = None
    ) -> jax.Array:
        """Attends with queries [B, S, H, G, D] of the latest pass in `kept`; returns [N, H, G, D]."""
        (keys, values), *later = self.kept[layer]
        ahead = len(later)
        first, _ = visible_range(self.kinds[layer], self.positions + ahead)
        own = tuple((*each, self.positions + j >= first) for j, each in enumerate(later, 1))
        visible = self._visible(layer, ahead)
        attended = attend(queries, keys, values, visible, scale=scale, own=own, sinks=sinks)
        return attended.reshape(-1, *attended.shape[2:])

    def _visible(self, layer: int, ahead: int) -> jax.Array:
        """bool[B, S, S]: the rows (last axis) that each row sees when it is `ahead` positions further."""
        first, _ = visible_range(self.kinds[layer], self.positions + ahead)
        position = self.positions[:, None, :]
        return self._same_text() & (position >= first[:, :, None]) & (position <= self.positions[:, :, None])

    def _same_text(self) -> jax.Array:
        return self.segments[:, :, None] == self.segments[:, None, :]

    def _entries(self, pool: Pool, ratio: int) -> KeysValues:
        """For every row, the keys and values of the entry that would end at it, [B, S, H, D] each."""

        def last_rows(x: jax.Array) -> jax.Array:
            x = self._by_sequence(x)
            padded = jnp.pad(x, [(0, 0), (ratio - 1, 0), (0, 0), (0, 0)])
            shifted = [padded[:, j : j + x.shape[1]] for j in range(ratio)]
            return jnp.stack(shifted, axis=2).reshape(-1, ratio, *x.shape[2:])

        starts = (self.positions - (ratio - 1)).reshape(-1)
        keys, values = pool.entry(last_rows(pool.contents), last_rows(pool.gates), starts)
        return self._by_sequence(keys), self._by_sequence(values)

    def _rotated(self, projected: jax.Array, rope: RopeTables) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, S, H, G, D], keys and values [B, S, H, D]."""
        queries, keys, values = projected[..., :-2, :], projected[..., -2, :], projected[..., -1, :]
        queries, keys = apply_rope(queries, rope), apply_rope(keys, rope)
        return self._by_sequence(queries), self._by_sequence(keys), self._by_sequence(values)

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
    visible: jax.Array,
    *,
    scale: float,
    own: tuple[tuple[jax.Array, jax.Array, jax.Array], ...] = (),
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention of every row over the rows that it sees, and over keys that only it sees.

    Args:
      queries: [B, S, H, G, D].
      keys, values: [B, R, H, D]; a value may be shorter than its key.
      visible: bool[B, S, R]; every row sees at least one.
      scale: factor of the dot products.
      own: tuples of keys and values [B, S, H, D] and bool[B, S]. Only row i sees the key at i, and only
        where the mask is true.
      sinks: [H * G], one more logit per query head in the softmax, or None.

    Returns:
      [B, S, H, G, D] in the dtype of `queries`, D that of the values; softmax in float32.
    """
    if not own and sinks is None and _fits_cudnn(queries, values):
        return _fused(queries, keys, values, visible, scale)
    precision = "highest" if queries.dtype == jnp.float32 else None

    def einsum(equation: str, *args: jax.Array) -> jax.Array:
        return jnp.einsum(equation, *args, precision=precision, preferred_element_type=jnp.float32)

    scores = jnp.where(visible[:, None, None], einsum("bqngd,bsnd->bngqs", queries, keys) * scale, -jnp.inf)
    columns = [
        jnp.where(seen[:, None, None], einsum("bqngd,bqnd->bngq", queries, k) * scale, -jnp.inf)
        for k, _, seen in own
    ]
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, *queries.shape[2:4], 1)
        columns.append(jnp.broadcast_to(sink, scores.shape[:-1]))
    peak = scores.max(axis=-1)
    for column in columns:
        peak = jnp.maximum(peak, column)
    peak = jax.lax.stop_gradient(peak)
    weights = jnp.exp(scores - peak[..., None])
    own_weights = [jnp.exp(column - peak) for column in columns]
    total = weights.sum(axis=-1) + sum(own_weights)
    attended = einsum("bngqs,bsnd->bqngd", weights.astype(queries.dtype), values)
    # The sink, which is the last column, has no value.
    for weight, (_, v, _) in zip(own_weights, own, strict=False):
        attended += einsum("bngq,bqnd->bqngd", weight.astype(queries.dtype), v)
    return (attended / jnp.moveaxis(total, -1, 1)[..., None]).astype(queries.dtype)


def _fits_cudnn(queries: jax.Array, values: jax.Array) -> bool:
    size = queries.shape[-1]
    return (
        queries.dtype == jnp.bfloat16
        and jax.default_backend() == "gpu"
        and size == values.shape[-1] <= 128
        and size % 8 == 0
    )


def _fused(
    queries: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, scale: float
) -> jax.Array:
    """cuDNN's attention, which does not store the scores."""
    batch, length, kv_heads, group, size = queries.shape
    attended = jax.nn.dot_product_attention(
        queries.reshape(batch, length, kv_heads * group, size),
        keys,
        values,
        mask=visible[:, None],
        scale=scale,
        implementation="cudnn",
    )
    return attended.reshape(queries.shape)
