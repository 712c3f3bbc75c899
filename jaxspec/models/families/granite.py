"""Granite 3: Llama with factors on the embedding, attention logits, residual additions and logits.

Source: the `GraniteForCausalLM` of transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import AnyMemory, RopeTables
from jaxspec.config import ModelConfig
from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers.transformer import MLP, Attention, DecoderLayer
from jaxspec.sharding import PendingSum, total


@dataclass(frozen=True)
class GraniteConfig(ModelConfig):
    """Adds keys of this family.

    Attributes:
      embedding_multiplier, residual_multiplier: factors of the embedding, and of what a layer adds.
      logits_scaling: logits are divided by it.
    """

    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


class GraniteLayer(DecoderLayer):
    """A pre-norm layer that scales what it adds."""

    def __init__(
        self,
        config: GraniteConfig,
        name: str,
        *,
        attention: Callable[..., Any] = Attention,
        mlp: Callable[..., Any] = MLP,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, name, attention=attention, mlp=mlp, dtype=dtype, rngs=rngs)
        self.multiplier = config.residual_multiplier

    def __call__(
        self, x: jax.Array | PendingSum, memory: AnyMemory, layer: int, rope: RopeTables
    ) -> tuple[jax.Array | PendingSum, AnyMemory]:
        attended, memory = self.attention(self.input_norm(x), memory, layer, rope)
        x = memory.outputs(layer, total(x)) + attended * self.multiplier
        return x + self.mlp(self.mlp_norm(x)) * self.multiplier, memory


_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    return {name: scale for key, name in _SCALES.items() if (scale := meta.decimal(key, 0.0))}


class Granite(Decoder):
    """A target network.

    Like the heads that vLLM runs, EAGLE heads share the embedding and the output rows without the factors.
    """

    config: GraniteConfig
    config_type = GraniteConfig
    has_windows = False
    defaults: ClassVar = {"max_position_embeddings": 2048, "attention_multiplier": 1.0}
    gguf = GGUFArchitecture(
        "granite", "GraniteForCausalLM", interleaved=True, config=_gguf_config, scales=tuple(_SCALES)
    )

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"attention_scale": config["attention_multiplier"]}

    @classmethod
    def make_layer(cls, config: Any, index: int, **args: Any) -> nnx.Module:
        return GraniteLayer(config, f"model.layers.{index}", **args)

    def embed(self, tokens: jax.Array) -> jax.Array:
        return self.embedding(tokens) * self.config.embedding_multiplier

    def logits(self, hidden: jax.Array) -> jax.Array:
        return super().logits(hidden) / self.config.logits_scaling
