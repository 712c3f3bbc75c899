"""A research family of this package: Llama blocks with DeepSeek-V4's kind of attention.

Its `config.json` has Llama's keys, `sliding_window`, and DeepSeek-V4's `compress_ratios`, one per layer. It
serves for research and tests: of all kinds of attention metadata, this one is the first to break if it is not
rebuilt between draft steps.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from flax import nnx

from jaxspec.attention import AttentionKind, IndexedWindow, LayerCacheShape
from jaxspec.config import ConfigError, ModelConfig
from jaxspec.models.decoder import Decoder
from jaxspec.models.indexed_window_attention import IndexedWindowAttention, cache_shape
from jaxspec.models.layers import DecoderLayer


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
                "config.json: compress_ratios is missing; it has one ratio per layer, 1 for a window alone"
            )
        return {"compress_ratios": tuple(ratios)}

    @classmethod
    def attention_kinds(cls, config: ModelConfig) -> tuple[AttentionKind, ...]:
        return tuple(IndexedWindow(config.sliding_window or 0, ratio) for ratio in config.compress_ratios)

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, **args: Any) -> nnx.Module:
        attention = partial(IndexedWindowAttention, ratio=config.compress_ratios[index])
        return DecoderLayer(config, f"model.layers.{index}", attention=attention, **args)

    @classmethod
    def layer_cache(cls, config: ModelConfig, kind: AttentionKind) -> LayerCacheShape:
        assert isinstance(kind, IndexedWindow)
        return cache_shape(config, kind)
