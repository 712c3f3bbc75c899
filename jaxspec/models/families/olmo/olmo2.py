"""OLMo 2: norms after attention and feed-forward network alone, and over all heads of queries and keys.

Source: the `Olmo2ForCausalLM` of transformers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import AnyMemory, RopeTables
from jaxspec.config import ModelConfig
from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.models.decoder import Decoder
from jaxspec.models.families.qwen.qwen3 import QK_NORMS
from jaxspec.models.layers.all_heads_norm import AllHeadsAttention
from jaxspec.models.layers.transformer import MLP, RMSNorm


class Olmo2Layer(nnx.Module):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    def __init__(self, config: ModelConfig, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        width, eps = config.hidden_size, config.rms_norm_eps
        self.attention = AllHeadsAttention(config, f"{name}.self_attn", **args)
        self.attention_norm = RMSNorm(width, eps, f"{name}.post_attention_layernorm", **args)
        self.mlp = MLP(config, f"{name}.mlp", **args)
        self.mlp_norm = RMSNorm(width, eps, f"{name}.post_feedforward_layernorm", **args)

    def __call__(
        self, x: jax.Array, memory: AnyMemory, layer: int, rope: RopeTables
    ) -> tuple[jax.Array, AnyMemory]:
        """Maps x [N, M] to [N', M]; also returns the memory. `layer` is the layer's index in the memory."""
        attended, memory = self.attention(x, memory, layer, rope)
        x = memory.outputs(layer, x) + self.attention_norm(attended)
        return x + self.mlp_norm(self.mlp(x)), memory


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    window = meta.positive("attention.sliding_window", None)
    if window is None:
        return {}
    pattern = meta.list("attention.sliding_window_pattern", bool, [])
    types = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in pattern]
    # OLMo 3 has no architecture of its own.
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": types or None,
    }


class Olmo2(Decoder):
    """A target network."""

    defaults: ClassVar = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    has_windows: ClassVar[bool] = False
    gguf: ClassVar[GGUFArchitecture | None] = GGUFArchitecture(
        "olmo2", "Olmo2ForCausalLM", (*QK_NORMS, "post_feedforward_layernorm"), config=_gguf_config
    )

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        # The family's class in transformers ignores a file's mlp_bias.
        return {"qk_norm": True, "mlp_bias": False}

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, **args: Any) -> nnx.Module:
        return Olmo2Layer(config, f"model.layers.{index}", **args)
