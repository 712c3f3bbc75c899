"""The Llama family: pre-norm decoders with grouped-query attention (Llama, SmolLM2, Mistral, Qwen3)."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import (
    AnyMemory,
    AttentionKind,
    CacheShape,
    FullAttention,
    IndexedWindow,
    LayerCacheShape,
    SlidingWindow,
)
from jaxspec.config import ModelConfig
from jaxspec.models.layers import DecoderLayer, Embedding, Linear, RMSNorm, TiedEmbedding
from jaxspec.models.parameters import product
from jaxspec.models.rope import rope_tables


def attention_kinds(config: ModelConfig) -> tuple[AttentionKind, ...]:
    """The kind of attention of every layer."""
    if config.compress_ratios:
        return tuple(IndexedWindow(config.sliding_window or 0, ratio) for ratio in config.compress_ratios)
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
        self.kinds = attention_kinds(config)
        tied, sizes = config.tie_word_embeddings, (config.vocab_size, config.hidden_size)
        self.embedding: Any = (TiedEmbedding if tied else Embedding)(*sizes, "model.embed_tokens", **args)
        self.layers = nnx.List([self.make_layer(i, kind, **args) for i, kind in enumerate(self.kinds)])
        self.norm = self.norm_type(config.hidden_size, config.rms_norm_eps, "model.norm", **args)
        self.head = (
            None
            if tied
            else Linear(config.hidden_size, config.vocab_size, "lm_head", axes=("embed", "vocab"), **args)
        )

    def make_layer(self, index: int, kind: AttentionKind, **args: Any) -> nnx.Module:
        """One block of the network: what another family differs in."""
        return DecoderLayer(self.config, f"model.layers.{index}", **args)

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
        memory: AnyMemory,
        *,
        capture: tuple[int, ...] = (),
    ) -> tuple[jax.Array, tuple[jax.Array, ...], AnyMemory]:
        """One forward pass over N rows.

        Args:
          tokens, positions: i32[N].
          memory: what these rows attend to, made for layers of `kinds`.
          capture: hidden states to return: i is the residual stream before layer i, and the number of
            layers means the output of the last one before the final norm.

        Returns:
          The hidden states after the final norm [N, M], the captured ones, and the memory.
        """
        x = self.embed(tokens)
        rope = rope_tables(self.config.rope, self.config.head_dim, positions)
        local_rope = rope
        if self.config.local_rope is not None:
            local_rope = rope_tables(self.config.local_rope, self.config.head_dim, positions)
        streams = [x]
        for i, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=True)):
            x, memory = layer(x, memory, i, local_rope if isinstance(kind, SlidingWindow) else rope)
            streams.append(x)
        return self.norm(x), tuple(streams[i] for i in capture), memory

    @property
    def output_kernel(self) -> jax.Array:
        """[M, V], the output projection."""
        return (self.embedding if self.head is None else self.head).kernel[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """f32[..., V] of hidden states after the final norm [..., M]."""
        return product(hidden, self.output_kernel, out_dtype=jnp.float32)
