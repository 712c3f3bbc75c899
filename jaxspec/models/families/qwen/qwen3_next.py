"""Qwen3-Next: gated delta rules in most layers, gated attention in the others, routed experts.

Source: the `Qwen3NextForCausalLM` of transformers; its MTP layer is vLLM's `qwen3_next_mtp.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import (
    AnyMemory,
    AttentionKind,
    FullAttention,
    LayerCacheShape,
    Recurrent,
    RopeTables,
    within_to_halves,
)
from jaxspec.config import ConfigError, ModelConfig, MoeConfig, RopeConfig
from jaxspec.config.delta import DeltaConfig
from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.models.decoder import Decoder
from jaxspec.models.families.gemma.gemma3 import Gemma3Norm
from jaxspec.models.families.qwen.gated_delta_gguf import (
    EXPERT_TENSORS,
    LAYER_TENSORS,
    expert_config,
    from_tensors,
    grouped_tensors,
)
from jaxspec.models.layers.gated_delta import GatedDeltaNet, delta_state_shape
from jaxspec.models.layers.moe import MoE
from jaxspec.models.layers.transformer import MLP, Attention, DecoderLayer, Linear
from jaxspec.models.mtp_names import OWN_MODEL
from jaxspec.sharding import PendingSum
from jaxspec.weights.parameters import Source
from jaxspec.weights.sources_by_head import InputsByHead


class GatedAttention(Attention):
    """Attention whose output is gated; `q_proj` holds each head's query and, behind it, its gate."""

    norm_type = Gemma3Norm
    query_rows = 2

    def project(self, x: jax.Array) -> jax.Array:
        return self._project(x)[0]

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What `project` returns, and the gates [N, H, G, D]."""
        assert self.query_norm is not None
        assert self.key_norm is not None
        fused = self.fused(x)
        queries, gates = fused[..., :-2:2, :], fused[..., 1:-2:2, :]
        keys, values = fused[..., -2:-1, :], fused[..., -1:, :]
        rotated = jnp.concatenate([self.query_norm(queries), self.key_norm(keys)], axis=-2)
        return jnp.concatenate([within_to_halves(rotated, self.rotated), values], axis=-2), gates

    def __call__(
        self, x: jax.Array, memory: AnyMemory, layer: int, rope: RopeTables
    ) -> tuple[jax.Array | PendingSum, AnyMemory]:
        projected, gates = self._project(x)
        attended, memory = memory.attend(layer, projected, rope, scale=self.scale)
        return self.combine(attended * jax.nn.sigmoid(memory.outputs(layer, gates))), memory


class _GroupedDeltaNet(GatedDeltaNet):
    """The rule with its inputs in two tensors, the rows of each key head together."""

    @classmethod
    def input_source(cls, delta: DeltaConfig, name: str, width: int) -> Source:
        return InputsByHead.by_head(name, delta, width)


class _SharedMLP(MLP):
    """The network that every row goes through, scaled by a gate of its own."""

    def __init__(self, config: ModelConfig, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        super().__init__(config, name, dtype=dtype, rngs=rngs)
        self.gate = Linear(
            config.hidden_size, 1, f"{name}_gate", axes=("embed", None), dtype=dtype, rngs=rngs
        )

    def weigh(self, x: jax.Array, inner: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(self.gate(x)) * inner


class SharedMoE(MoE):
    """Routed experts, and a gated network that every row goes through."""

    has_both_forms = True

    def __init__(self, config: ModelConfig, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        assert config.moe is not None
        super().__init__(config, name, dtype=dtype, rngs=rngs)
        shared = replace(config, intermediate_size=config.moe.shared_size)
        self.shared = _SharedMLP(shared, f"{name}.shared_expert", dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, *tokens: jax.Array) -> jax.Array | PendingSum:
        return super().__call__(x, *tokens) + self.shared(x)


class Qwen3Next(Decoder):
    """A target network."""

    defaults: ClassVar = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
    }
    gguf = GGUFArchitecture(
        "qwen3next",
        "Qwen3NextForCausalLM",
        (*LAYER_TENSORS, *EXPERT_TENSORS),
        norm_offset=1.0,
        plain_norms=("linear_attn.norm",),
        config=expert_config,
        from_tensors=from_tensors,
        tensors=grouped_tensors,
    )
    has_windows = False
    recycles_normed = True
    mtp_names = OWN_MODEL
    norm_type = Gemma3Norm
    attention_type = GatedAttention
    moe_type = SharedMoE
    delta_type: ClassVar[type[GatedDeltaNet]] = _GroupedDeltaNet

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        layers = range(config["num_hidden_layers"])
        every = config["full_attention_interval"]
        kinds = config.get("layer_types") or [
            "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in layers
        ]
        if config.get("attn_output_gate", True) is not True:
            raise ConfigError(
                f"attn_output_gate {config['attn_output_gate']!r} is not supported; supported: true"
            )
        return {
            "qk_norm": True,
            "layer_types": tuple(kinds),
            "delta": DeltaConfig.from_hf(config),
            "moe": cls.experts(config),
            "rope": RopeConfig.from_hf(config, partial=True),
        }

    @classmethod
    def experts(cls, config: Mapping[str, Any]) -> MoeConfig | None:
        """The routed experts; None if every layer is dense."""
        step, dense = config["decoder_sparse_step"], config["mlp_only_layers"] or ()
        layers = range(config["num_hidden_layers"])
        return MoeConfig(
            num_experts=config["num_experts"],
            experts_per_token=config["num_experts_per_tok"],
            intermediate_size=config["moe_intermediate_size"],
            normalize=bool(config["norm_topk_prob"]),
            dense_layers=tuple(i for i in layers if i in dense or (i + 1) % step),
            shared_size=config["shared_expert_intermediate_size"],
        )

    @classmethod
    def attention_kinds(cls, config: ModelConfig) -> tuple[AttentionKind, ...]:
        return tuple(
            Recurrent() if kind == "linear_attention" else FullAttention() for kind in config.layer_types
        )

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, **args: Any) -> nnx.Module:
        name = f"model.layers.{index}"
        if config.layer_types[index] != "linear_attention":
            return cls._layer(config, name, index, **args)
        return cls._layer(config, name, index, attention=cls.delta_type, attention_name="linear_attn", **args)

    @classmethod
    def make_mtp_layer(cls, config: ModelConfig, **args: Any) -> nnx.Module:
        # As in vLLM, its experts are those of a layer 0.
        return cls._layer(config, "mtp.layers.0", 0, **args)

    @classmethod
    def _layer(cls, config: ModelConfig, name: str, index: int, **args: Any) -> nnx.Module:
        is_sparse = config.moe is not None and index not in config.moe.dense_layers
        args = {"attention": cls.attention_type, **args}
        return DecoderLayer(config, name, norm=Gemma3Norm, mlp=cls.moe_type if is_sparse else MLP, **args)

    @classmethod
    def layer_cache(cls, config: ModelConfig, kind: AttentionKind) -> LayerCacheShape:
        if isinstance(kind, Recurrent):
            assert config.delta is not None
            return delta_state_shape(config.delta)
        return super().layer_cache(config, kind)
