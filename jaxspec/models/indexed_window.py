"""A research family of ours: Llama blocks with DeepSeek-V4's kind of attention.

`config.json` has Llama's keys, `sliding_window`, and DeepSeek-V4's `compress_ratios`, one per layer. It is
there to be built on and tested with: metadata of this kind is what breaks first where it is not rebuilt
between draft steps.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import AttentionKind, IndexedWindow, IndexedWindowMetadata, LayerCache, LayerCacheShape
from jaxspec.config import ModelConfig
from jaxspec.models.indexed_window_attention import IndexedWindowAttention, cache_shape
from jaxspec.models.layers import MLP, RMSNorm, RopeTables
from jaxspec.models.llama import Llama


class IndexedWindowLayer(nnx.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, config: ModelConfig, kind: AttentionKind, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        assert isinstance(kind, IndexedWindow)
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(width, eps, f"{name}.input_layernorm", **args)
        self.attention = IndexedWindowAttention(config, kind, f"{name}.self_attn", **args)
        self.mlp_norm = RMSNorm(width, eps, f"{name}.post_attention_layernorm", **args)
        self.mlp = MLP(config, f"{name}.mlp", **args)

    def __call__(
        self, x: jax.Array, cache: LayerCache, metadata: IndexedWindowMetadata, rope: RopeTables
    ) -> tuple[jax.Array, LayerCache]:
        attended, cache = self.attention(self.input_norm(x), cache, metadata, rope)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache


class IndexedWindowModel(Llama):
    """A target network."""

    def make_layer(self, index: int, kind: AttentionKind, **args: Any) -> nnx.Module:
        return IndexedWindowLayer(self.config, kind, f"model.layers.{index}", **args)

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        return tuple(cache_shape(self.config, kind) for kind in self.kinds if isinstance(kind, IndexedWindow))
