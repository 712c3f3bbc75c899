"""Gemma 3: norms before and after attention and feed-forward network, a scaled embedding, two ropes.

Source: the `Gemma3ForCausalLM` of transformers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxspec_kernels.rms_norm import rms_norm

from jaxspec.config import ModelConfig, RopeConfig, joined
from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.models.decoder import Decoder
from jaxspec.models.families.qwen.qwen3 import QK_NORMS
from jaxspec.models.layers.transformer import MLP, Attention, SandwichLayer
from jaxspec.sharding import PendingSum, total
from jaxspec.weights.parameters import Whole, parameter


class Gemma3Norm(nnx.Module):
    """Root-mean-square norm over the last axis in float32; the stored weight is an offset from 1."""

    def __init__(self, width: int, eps: float, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.eps = eps
        self.offset = parameter(
            rngs, (width,), (None,), Whole(f"{name}.weight", (width,)), dtype=dtype, init="zeros"
        )

    def factors(self) -> jax.Array:
        """f32[width], the factors of normed rows."""
        return 1 + self.offset[...].astype(jnp.float32)

    def __call__(self, x: jax.Array | PendingSum) -> jax.Array:
        x = total(x)
        return rms_norm(x.astype(jnp.float32), self.factors(), self.eps).astype(x.dtype)


class Gemma3Attention(Attention):
    """Attention with this family's norms on queries and keys."""

    norm_type = Gemma3Norm


class Gemma3MLP(MLP):
    """down(gelu(gate(x)) * up(x)), with the tanh approximation of GELU."""

    def activation(self, x: jax.Array) -> jax.Array:
        return jax.nn.gelu(x, approximate=True)


_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_LAYERS_OF_27B = 62


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    """GGUFs omit `query_pre_attn_scalar`: head_dim, or hidden_size / num_heads in the 27B model."""
    head_dim = meta.size("attention.key_length")
    per_head = meta.size("embedding_length") // meta.size("attention.head_count")
    return {
        "sliding_window": meta.size("attention.sliding_window"),
        "sliding_window_pattern": meta.positive("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": meta.decimal("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": per_head if meta.size("block_count") == _LAYERS_OF_27B else head_dim,
    }


class Gemma3(Decoder):
    """A target network.

    Only the target's first layer reads the scaled embedding. EAGLE heads share the unscaled table: they are
    trained on a copy of its weights in a plain embedding (sgl-project/SpecForge, `load_embedding`), and vLLM
    shares the module whose output the target then scales.
    """

    defaults: ClassVar = {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    }
    gguf = GGUFArchitecture(
        "gemma3",
        "Gemma3ForCausalLM",
        (*QK_NORMS, *_NORMS[2:]),
        norm_offset=1.0,
        config=_gguf_config,
    )
    activation = ("hidden_activation", "gelu_pytorch_tanh")
    norm_type = Gemma3Norm

    @classmethod
    def is_windowed(cls, config: Mapping[str, Any], layer: int) -> bool:
        return (layer + 1) % config["sliding_window_pattern"] > 0

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        # Published files give the sliding layers' rope in rope_local_base_freq; transformers 5 nests
        # rope_parameters by kind of layer.
        nested = config.get("rope_parameters") or {}
        # transformers reads the older name of "rope_type" for other families only.
        scaling = {k: v for k, v in (config.get("rope_scaling") or {}).items() if k != "type"}
        own = {"rope_scaling": scaling, "rope_parameters": nested.get("full_attention")}
        local = {
            "rope_theta": config.get("rope_local_base_freq"),
            "rope_parameters": nested.get("sliding_attention"),
            "max_position_embeddings": config["max_position_embeddings"],
        }
        scalar = config["query_pre_attn_scalar"]
        return {
            "qk_norm": True,
            "rope": RopeConfig.from_hf(joined(config, own), default_theta=1e6),
            "local_rope": RopeConfig.from_hf(local, default_theta=1e4),
            "attention_scale": scalar and scalar**-0.5,
            "embedding_scale": config["hidden_size"] ** 0.5,
        }

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, **args: Any) -> nnx.Module:
        return SandwichLayer(
            config,
            f"model.layers.{index}",
            _NORMS,
            norm=Gemma3Norm,
            attention=Gemma3Attention,
            mlp=Gemma3MLP,
            **args,
        )
