"""EAGLE-1 heads: one or more decoder layers over the token and the target's final hidden state.

Source: Y. Li et al., arXiv 2401.15077; `SafeAILab/EAGLE` eagle/model/cnets1.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import AnyMemory, RopeTables
from jaxspec.config import ConfigError, ModelConfig, joined
from jaxspec.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.drafters.base import Needs, Target
from jaxspec.drafters.flags import Flag, key_flag, layer_flags, tensor_flag
from jaxspec.drafters.head import Head
from jaxspec.drafters.layer_config import LAST_LAYER, layer_config
from jaxspec.files import Checkpoint
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers.rope import rope_tables
from jaxspec.models.layers.transformer import MLP, Attention, DecoderLayer, Embedding, Linear, RMSNorm
from jaxspec.sharding import PendingSum, total


@dataclass(frozen=True)
class Eagle1Config:
    """The shape of a head.

    Attributes:
      layers: the draft transformer, as wide as the target.
      fc_bias: whether the projection of token and hidden state has a bias.
      own_embedding: whether the checkpoint has a token embedding of its own.
    """

    own_head: ClassVar[bool] = False
    layers: ModelConfig
    fc_bias: bool = True
    own_embedding: bool = False

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], tensors: Mapping[str, Any], target: ModelConfig
    ) -> "Eagle1Config":
        """Reads a head's `config.json`.

        Raises:
          ConfigError: the head does not fit the target.
        """
        layers = ModelConfig.from_hf(
            joined({"num_hidden_layers": 1, "model_type": "llama"}, layer_config(config, target))
        )
        for name in ("hidden_size", "vocab_size"):
            if getattr(layers, name) != getattr(target, name):
                raise ConfigError(
                    f"the head has {name} {getattr(layers, name)}, the target {getattr(target, name)}"
                )
        # Heads without the key have the bias. The key only concerns `fc`.
        return cls(layers, bool(config.get("bias", True)), "embed_tokens.weight" in tensors)

    def over(self, devices: int) -> "Eagle1Config":
        return replace(self, layers=self.layers.over(devices))

    def reads(self, config: Mapping[str, Any], *, any_target: bool) -> str:
        return LAST_LAYER

    def flags(self, checkpoint: Checkpoint) -> Iterator[Flag]:
        config, tensors = checkpoint.config, checkpoint.tensors
        reason = "heads of Llama 2 and Vicuna have fc.bias and no key for it"
        yield key_flag("fc bias", self.fc_bias, config, "bias", reason=reason)
        yield from layer_flags(self.layers, config)
        yield tensor_flag("token embedding", "its own", "the target's", tensors, "embed_tokens.weight")
        yield Flag("output head", "the target's", "EAGLE-1 has none of its own")


class Eagle1FirstLayer(nnx.Module):
    """A decoder layer without a norm before its attention."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.attention = Attention(config, "layers.0.self_attn", **args)
        self.mlp_norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, "layers.0.post_attention_layernorm", **args
        )
        self.mlp = MLP(config, "layers.0.mlp", **args)

    def __call__(
        self, x: jax.Array, memory: AnyMemory, layer: int, rope: RopeTables
    ) -> tuple[jax.Array | PendingSum, AnyMemory]:
        attended, memory = self.attention(x, memory, layer, rope)
        y = memory.outputs(layer, x) + attended
        return y + self.mlp(self.mlp_norm(y)), memory


class Eagle1(Head, AutoregressiveDrafter):
    """A head that predicts the target's final hidden state and shares its output projection."""

    title = "an EAGLE-1 head"
    is_trainable = True
    config_type = Eagle1Config

    def __init__(self, config: Eagle1Config, *, dtype: jnp.dtype, rngs: nnx.Rngs, **settings: Any):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        layers = config.layers
        super().__init__(**settings)
        self.config = config
        self.needs = Needs(hidden=True, state_size=layers.hidden_size)
        self.trained_length = layers.max_position_embeddings
        self.kinds = Decoder.attention_kinds(layers)
        self.draft_vocab_size = layers.vocab_size
        self.embedding = (
            Embedding(layers.vocab_size, layers.hidden_size, "embed_tokens", **args)
            if config.own_embedding
            else None
        )
        self.fc = Linear(
            2 * layers.hidden_size,
            layers.hidden_size,
            "fc",
            axes=("embed", "embed"),
            bias=config.fc_bias,
            **args,
        )
        self.first = Eagle1FirstLayer(layers, **args)
        self.rest = nnx.List([DecoderLayer(layers, f"layers.{i}", **args) for i in range(1, len(self.kinds))])

    @classmethod
    def recognise(cls, checkpoint: Checkpoint) -> str | None:
        names = checkpoint.tensors
        # EAGLE-1's first layer has no norm before its attention.
        is_one = "fc.weight" in names and any(name.startswith("layers.0.") for name in names)
        return "SafeAILab" if is_one and "layers.0.input_layernorm.weight" not in names else None

    def advance(
        self, target: Target, tokens: jax.Array, hidden: jax.Array, positions: jax.Array, memory: AnyMemory
    ) -> tuple[jax.Array, AnyMemory]:
        rope = rope_tables(self.config.layers.rope, self.config.layers.head_dim, positions)
        embedded = (self.embedding or target.embedding)(tokens)
        x: jax.Array | PendingSum = self.fc(jnp.concatenate([embedded, hidden], axis=-1))
        for i, layer in enumerate((self.first, *self.rest)):
            x, memory = layer(x, memory, i, rope)
        return total(x), memory

    # Its logits are the target's, without a norm: the head predicts states after the target's final norm.
