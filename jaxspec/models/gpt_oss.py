"""GPT-OSS: a Llama of routed experts, with attention sinks and every other layer behind a window.

Source: the `GptOssForCausalLM` of transformers; openai/gpt-oss, `gpt_oss/torch/model.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import AttentionKind
from jaxspec.config import ModelConfig
from jaxspec.models.expert_sources import InterleavedGateUp
from jaxspec.models.layers import DecoderLayer
from jaxspec.models.llama import Llama
from jaxspec.models.moe import ExpertSources, MoE
from jaxspec.models.parameters import Whole


class GptOssMoE(MoE):
    """Experts with biases, all of a layer in one tensor, and a clamped activation."""

    def __init__(self, config: ModelConfig, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        assert config.moe is not None
        count, width, inner = config.moe.num_experts, config.hidden_size, config.moe.intermediate_size
        experts = f"{name}.experts"
        sources = ExpertSources(
            gate_up=InterleavedGateUp(f"{experts}.gate_up_proj", (count, width, 2 * inner)),
            down=Whole(f"{experts}.down_proj", (count, inner, width)),
            gate_up_bias=InterleavedGateUp(f"{experts}.gate_up_proj_bias", (count, 2 * inner)),
            down_bias=Whole(f"{experts}.down_proj_bias", (count, width)),
        )
        super().__init__(config, f"{name}.router", sources, router_bias=True, dtype=dtype, rngs=rngs)

    def activate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        limit = self.config.swiglu_limit
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(self.config.swiglu_alpha * gate) * (up + 1)


class GptOss(Llama):
    """A target network."""

    def make_layer(self, index: int, kind: AttentionKind, **args: Any) -> nnx.Module:
        return DecoderLayer(self.config, f"model.layers.{index}", mlp=GptOssMoE, **args)
