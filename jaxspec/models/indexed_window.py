"""A research family of ours: Llama blocks with DeepSeek-V4's kind of attention.

`config.json` has Llama's keys, `sliding_window`, and DeepSeek-V4's `compress_ratios`, one per layer. It is
there to be built on and tested with: metadata of this kind is what breaks first where it is not rebuilt
between draft steps.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import AttentionKind, IndexedWindow, LayerCacheShape
from jaxspec.config import ModelConfig
from jaxspec.models.indexed_window_attention import IndexedWindowAttention, cache_shape
from jaxspec.models.layers import MLP, PreNormLayer, RMSNorm
from jaxspec.models.llama import Llama


class IndexedWindowLayer(PreNormLayer):
    """Pre-norm block over an indexed window."""

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


class IndexedWindowModel(Llama):
    """A target network."""

    @classmethod
    def attention_kinds(cls, config: ModelConfig) -> tuple[AttentionKind, ...]:
        return tuple(IndexedWindow(config.sliding_window or 0, ratio) for ratio in config.compress_ratios)

    def make_layer(self, index: int, kind: AttentionKind, **args: Any) -> nnx.Module:
        return IndexedWindowLayer(self.config, kind, f"model.layers.{index}", **args)

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        return tuple(cache_shape(self.config, kind) for kind in self.kinds if isinstance(kind, IndexedWindow))
