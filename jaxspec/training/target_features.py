"""The target's forward pass over packed rows: features for the head and what it is trained to predict."""

from typing import cast

import jax

from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import DecoderLayer
from jaxspec.models.rope import rope_tables
from jaxspec.training.packed_rows import PackedRows, attend, visible_rows

FAMILIES = ("llama", "mistral", "qwen3")
"""Targets whose blocks are computed here as their own `__call__` computes them."""


def target_features(
    target: Decoder, rows: PackedRows, capture: tuple[int, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """What `Decoder.__call__` returns, without a cache.

    Returns:
      The hidden states after the final norm [B, S, M], and those that `capture` names.
    """
    x = target.embedding(rows.tokens)
    rope = rope_tables(target.config.rope, target.config.head_dim, rows.positions)
    visible = {kind: visible_rows(kind, rows) for kind in dict.fromkeys(target.kinds)}
    streams = [x]
    for block, kind in zip(target.layers, target.kinds, strict=True):
        layer = cast(DecoderLayer, block)
        queries, keys, values = layer.attention.project(layer.input_norm(x), rope)
        x = x + layer.attention.combine(attend(queries, keys, values, visible[kind]))
        x = x + layer.mlp(layer.mlp_norm(x))
        streams.append(x)
    return target.norm(x), tuple(streams[i] for i in capture)
