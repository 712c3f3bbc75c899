"""A research family of ours: Llama blocks with DeepSeek-V4's kind of attention.

`config.json` has Llama's keys, `sliding_window`, and DeepSeek-V4's `compress_ratios`, one per layer. It is
there to be built on and tested with: metadata of this kind is what breaks first where it is not rebuilt
between draft steps.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import AttentionKind, IndexedWindow, LayerCacheShape
from jaxspec.config import ConfigError, ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.indexed_window_attention import IndexedWindowAttention, cache_shape
from jaxspec.models.layers import MLP, PreNormLayer, RMSNorm


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


class IndexedWindowModel(Decoder):
    """A target network."""

    defaults: ClassVar = {"max_position_embeddings": 2048, "sliding_window": 128}

    @classmethod
    def is_windowed(cls, config: Mapping[str, Any], layer: int) -> bool:
        return True

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        ratios = config.get("compress_ratios")
        if not ratios:
            raise ConfigError(
                "config.json: compress_ratios is missing: one per layer, 1 where only a window is seen"
            )
        return {"compress_ratios": tuple(ratios)}

    @classmethod
    def attention_kinds(cls, config: ModelConfig) -> tuple[AttentionKind, ...]:
        return tuple(IndexedWindow(config.sliding_window or 0, ratio) for ratio in config.compress_ratios)

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, **args: Any) -> nnx.Module:
        return IndexedWindowLayer(config, cls.attention_kinds(config)[index], f"model.layers.{index}", **args)

    @classmethod
    def layer_cache(cls, config: ModelConfig, kind: AttentionKind) -> LayerCacheShape:
        assert isinstance(kind, IndexedWindow)
        return cache_shape(config, kind)
