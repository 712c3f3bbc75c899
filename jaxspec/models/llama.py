"""The Llama family: pre-norm decoders with grouped-query attention (Llama, SmolLM2, Mistral, Qwen3)."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import (
    AttentionKind,
    AttentionMetadata,
    CacheShape,
    FullAttention,
    LayerCache,
    LayerCacheShape,
    SlidingWindow,
)
from jaxspec.config import ModelConfig, RopeConfig
from jaxspec.models.layers import DecoderLayer, Embedding, Linear, RMSNorm, TiedEmbedding
from jaxspec.models.parameters import product
from jaxspec.models.rope import rope_tables


def attention_kinds(config: ModelConfig) -> tuple[AttentionKind, ...]:
    """The kind of attention of every layer, full or behind a window."""
    return tuple(
        SlidingWindow(config.sliding_window or 0) if kind == "sliding_attention" else FullAttention()
        for kind in config.layer_types
    )


class Llama(nnx.Module):
    """A target network.

    Source: the `LlamaForCausalLM`, `MistralForCausalLM` and `Qwen3ForCausalLM` of transformers.
    """

    norm_type: ClassVar[Callable[..., Any]] = RMSNorm

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.config = config
        self.kinds = self.attention_kinds(config)
        self.ropes = self.layer_ropes(config)
        tied, sizes = config.tie_word_embeddings, (config.vocab_size, config.hidden_size)
        self.embedding: Any = (TiedEmbedding if tied else Embedding)(*sizes, "model.embed_tokens", **args)
        self.layers = nnx.List([self.make_layer(i, kind, **args) for i, kind in enumerate(self.kinds)])
        self.norm = self.norm_type(config.hidden_size, config.rms_norm_eps, "model.norm", **args)
        self.head = (
            None
            if tied
            else Linear(config.hidden_size, config.vocab_size, "lm_head", axes=("embed", "vocab"), **args)
        )

    @classmethod
    def attention_kinds(cls, config: ModelConfig) -> tuple[AttentionKind, ...]:
        """The kind of attention of every layer."""
        return attention_kinds(config)

    @classmethod
    def layer_ropes(cls, config: ModelConfig) -> tuple[RopeConfig, ...]:
        """The rope of every layer."""
        return (config.rope,) * config.num_hidden_layers

    def make_layer(self, index: int, kind: AttentionKind, **args: Any) -> nnx.Module:
        """One block of the network: what another family differs in."""
        return DecoderLayer(self.config, kind, f"model.layers.{index}", **args)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """What the first layer reads of `tokens`; `embedding` is what heads share."""
        return self.embedding(tokens)

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        """What each layer keeps in the paged cache."""
        return (CacheShape(self.config.num_key_value_heads, self.config.head_dim),) * len(self.kinds)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: tuple[LayerCache, ...],
        metadata: dict[AttentionKind, AttentionMetadata],
        *,
        capture: tuple[int, ...] = (),
    ) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[LayerCache, ...]]:
        """One forward pass over Q rows per slot.

        Args:
          tokens, positions: i32[B, Q].
          cache: one array per layer, rewritten at `metadata`'s slots.
          metadata: of every kind in `kinds`, built for `positions`.
          capture: hidden states to return: i is the residual stream before layer i, and the number of
            layers means the output of the last one before the final norm.

        Returns:
          The hidden states after the final norm [B, Q, M], the captured ones, and the cache.
        """
        x = self.embed(tokens)
        rope = rope_tables(self.config.rope, self.config.head_dim, positions)
        local_rope = rope
        if self.config.local_rope is not None:
            local_rope = rope_tables(self.config.local_rope, self.config.head_dim, positions)
        streams, new_cache = [x], []
        for layer, kind, layer_cache in zip(self.layers, self.kinds, cache, strict=True):
            tables = local_rope if isinstance(kind, SlidingWindow) else rope
            x, layer_cache = layer(x, layer_cache, metadata[kind], tables)
            streams.append(x)
            new_cache.append(layer_cache)
        return self.norm(x), tuple(streams[i] for i in capture), tuple(new_cache)

    @property
    def output_kernel(self) -> jax.Array:
        """[M, V], the output projection."""
        return (self.embedding if self.head is None else self.head).kernel[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """f32[..., V] of hidden states after the final norm [..., M]."""
        return product(hidden, self.output_kernel, out_dtype=jnp.float32)
