"""GPT-OSS: routed experts, attention sinks, and a sliding window in every other layer.

Source: the `GptOssForCausalLM` of transformers; openai/gpt-oss, `gpt_oss/torch/model.py`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from jaxspec.config import MoeConfig, RopeConfig, joined
from jaxspec.files import TensorSource
from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers.moe import STACKED_EXPERTS, MoE
from jaxspec.weights.expert_sources import ExpertSources, InterleavedGateUp
from jaxspec.weights.parameters import Whole

if TYPE_CHECKING:
    from jaxspec.files.gguf.tensor import GGUFTensor


class GptOssMoE(MoE):
    """Experts with biases and a clamped activation; a tensor holds all experts of a layer."""

    router_name = "router"
    router_bias = True

    @classmethod
    def sources(cls, name: str, count: int, width: int, inner: int) -> ExpertSources:
        return ExpertSources(
            gate_up=InterleavedGateUp(f"{name}.gate_up_proj", (count, width, 2 * inner)),
            down=Whole(f"{name}.down_proj", (count, inner, width)),
            gate_up_bias=InterleavedGateUp(f"{name}.gate_up_proj_bias", (count, 2 * inner)),
            down_bias=Whole(f"{name}.down_proj_bias", (count, width)),
        )

    def activate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        limit = self.config.swiglu_limit
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(self.config.swiglu_alpha * gate) * (up + 1)


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "intermediate_size": meta.size("expert_feed_forward_length"),
        "sliding_window": meta.size("attention.sliding_window"),
        "rope_scaling": {"truncate": False},
    }


def _gguf_tensors(tensors: Mapping[str, "GGUFTensor"], config: Mapping[str, Any]) -> dict[str, TensorSource]:
    from jaxspec.files.gguf.experts import fuse_experts  # imports slowly

    fused = fuse_experts(tensors)
    return {name.replace(".sinks.weight", ".sinks"): tensor for name, tensor in fused.items()}


_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOss(Decoder):
    """A target network."""

    defaults: ClassVar = {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "rope_theta": 150000.0,
    }
    moe_type = GptOssMoE
    gguf = GGUFArchitecture(
        "gpt-oss",
        "GptOssForCausalLM",
        ("self_attn.sinks", "mlp.router", *STACKED_EXPERTS),
        config=_gguf_config,
        tensors=_gguf_tensors,
    )

    @classmethod
    def is_windowed(cls, config: Mapping[str, Any], layer: int) -> bool:
        return layer % 2 == 0

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        moe = MoeConfig(
            num_experts=config["num_local_experts"],
            experts_per_token=config["num_experts_per_tok"],
            intermediate_size=config["intermediate_size"],
            swiglu_limit=config["swiglu_limit"],
            swiglu_alpha=config["swiglu_alpha"],
        )
        # A file that describes its rope, under either key, takes nothing from the default. An empty
        # `rope_scaling` says nothing, as in transformers.
        if not config.get("rope_scaling") and config.get("rope_parameters") is None:
            config = joined(config, {"rope_scaling": _DEFAULT_ROPE})
        return {"attention_sinks": True, "moe": moe, "rope": RopeConfig.from_hf(config)}
