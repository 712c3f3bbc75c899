"""EAGLE-3 heads, in the formats of SafeAILab and of speculators.

Source: Y. Li et al., arXiv 2503.01840; `SafeAILab/EAGLE` eagle/model/cnets.py;
`vllm-project/speculators` models/eagle3.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxspec.attention import AnyMemory, RopeTables
from jaxspec.config import ConfigError, ModelConfig, inner_keys, joined
from jaxspec.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.drafters.base import Needs, Target
from jaxspec.drafters.flags import RECYCLED, Flag, key_flag, layer_flags, tensor_flag, vocabulary_flags
from jaxspec.drafters.head import Head
from jaxspec.drafters.layer_config import (
    LAST_LAYER,
    architecture,
    captured_streams,
    check_only,
    is_speculators,
    layer_config,
)
from jaxspec.drafters.vocabulary import vocabulary_buffers
from jaxspec.files import Checkpoint
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers.rope import rope_tables
from jaxspec.models.layers.transformer import MLP, Attention, DecoderLayer, Embedding, Linear, RMSNorm
from jaxspec.sharding import PendingSum, total


@dataclass(frozen=True)
class Eagle3Config:
    """The shape of a head.

    Attributes:
      layers: the draft transformer; its vocab_size is the target's.
      draft_vocab_size: W.
      target_hidden_size: width of the target's hidden states.
      capture: the target's hidden states that are fused; i is the stream before layer i. Empty if the head
        reads the final hidden state directly, without `fc`.
      norm_before_residual: whether the first layer's residual is the normed hidden state.
      norm_before_fc: whether there is a norm over the concatenated features (speculators `input_norm`).
      fc_norm: whether there is a norm for each feature.
      norm_output: whether the recycled hidden state is the normed one (EAGLE-3.1).
      own_embedding: whether the checkpoint has a token embedding of its own.
      first_layer: name of the first layer in the checkpoint, "midlayer" or "layers.0".
    """

    own_head: ClassVar[bool] = True
    layers: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    capture: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    first_layer: str = "midlayer"

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], tensors: Mapping[str, Any], target: ModelConfig
    ) -> "Eagle3Config":
        """Reads a head's `config.json`, and from the names of its tensors what the config does not say.

        Raises:
          ConfigError: the head does not fit the target, or a value is not supported.
        """
        speculators = is_speculators(config)
        qwen3 = {"model_type": "qwen3"} if "Qwen3" in architecture(config) else {}
        layers = ModelConfig.from_hf(joined(layer_config(config, target), qwen3))
        eagle = inner_keys(config, "eagle_config")
        for place in (config, eagle):
            check_only(place, _ONLY, "EAGLE-3")
            _check_norms(place, tensors)
        depth = target.num_hidden_layers
        capture = () if eagle.get("use_aux_hidden_state") is False else _capture_ids(config, eagle, depth)
        head_target_width = config.get("target_hidden_size") or layers.hidden_size
        if head_target_width != target.hidden_size:
            raise ConfigError(
                f"the head is for targets of hidden size {head_target_width}, "
                f"this one has {target.hidden_size}"
            )
        if layers.vocab_size != target.vocab_size:
            raise ConfigError(
                f"the head is for a vocabulary of {layers.vocab_size}, the target's has {target.vocab_size}"
            )
        if not capture and layers.hidden_size != target.hidden_size:
            raise ConfigError(
                f"the head reads the target's final hidden state of width {target.hidden_size} directly, "
                f"but is {layers.hidden_size} wide"
            )
        own_embedding = "embed_tokens.weight" in tensors
        if layers.hidden_size != target.hidden_size and not own_embedding:
            raise ConfigError(
                f"the head is {layers.hidden_size} wide, the target {target.hidden_size}, and the head "
                "brings no embed_tokens.weight of its own"
            )
        return cls(
            layers=layers,
            draft_vocab_size=config.get("draft_vocab_size") or layers.vocab_size,
            target_hidden_size=target.hidden_size,
            capture=capture,
            norm_before_residual=config.get("norm_before_residual", speculators),
            norm_before_fc="input_norm.weight" in tensors,
            fc_norm="fc_norm.0.weight" in tensors,
            norm_output=bool(config.get("norm_output", False)),
            own_embedding=own_embedding,
            first_layer="midlayer" if any(k.startswith("midlayer.") for k in tensors) else "layers.0",
        )

    def over(self, devices: int) -> "Eagle3Config":
        return replace(self, layers=self.layers.over(devices))

    def reads(self, config: Mapping[str, Any], *, any_target: bool) -> str:
        if not self.capture:
            return LAST_LAYER
        places = (config, config.get("eagle_config") or {})
        named = any(place.get("eagle_aux_hidden_state_layer_ids") for place in places)
        by_default = any_target and not named
        layers = "2, n/2 and n-3 of a target of n layers" if by_default else ", ".join(map(str, self.capture))
        return f"those before layers {layers}{'' if named else ' (assumed: the default of all producers)'}"

    def flags(self, checkpoint: Checkpoint) -> Iterator[Flag]:
        config, tensors = checkpoint.config, checkpoint.tensors
        speculators = is_speculators(config)
        reason = (
            "the default of speculators' EAGLE-3 training"
            if speculators
            else "the default of other producers' code"
        )
        if "mask_hidden" in tensors:
            reason = "the default of P-EAGLE training"
        residual = self.norm_before_residual
        yield key_flag("norm before residual", residual, config, "norm_before_residual", reason=reason)
        yield tensor_flag("norm over all features", "yes", "no", tensors, "input_norm.weight")
        yield tensor_flag("norm per feature", "yes", "no", tensors, "fc_norm.0.weight")
        reason = "heads of EAGLE-3.1 say that they do"
        yield key_flag(RECYCLED, self.norm_output, config, "norm_output", reason=reason)
        yield from layer_flags(self.layers, config)
        yield from vocabulary_flags(self.draft_vocab_size, checkpoint)


_ONLY: Mapping[str, Any] = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "position_embedding_type": "rope",
    "parallel_draft_step": 1,
    "bias": False,
    "rope_is_neox_style": True,
    "is_neox_style": True,
}
"""Keys of ModelOpt's and other heads, at the top or in `eagle_config`, each with the supported value."""


def _check_norms(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Checks that a config says the same as the tensors, which decide, of the norms before `fc`.

    Raises:
      ConfigError: it does not.
    """
    for key, tensor in (("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")):
        if config.get(key) not in (None, tensor in tensors):
            there = "there is" if tensor in tensors else "there is no"
            raise ConfigError(f"config.json: {key} is {config[key]!r}, but {there} {tensor!r}")


def _capture_ids(config: Mapping[str, Any], eagle: Mapping[str, Any], depth: int) -> tuple[int, ...]:
    """The hidden states that the head reads.

    A list at the top level counts streams before a layer; one nested in `eagle_config` counts layer outputs.
    Without a list it is the default of all producers.
    """
    if config.get("eagle_aux_hidden_state_layer_ids"):
        return captured_streams(config["eagle_aux_hidden_state_layer_ids"], depth)
    if eagle.get("eagle_aux_hidden_state_layer_ids"):
        return captured_streams(eagle["eagle_aux_hidden_state_layer_ids"], depth, offset=1)
    return captured_streams(default_capture(depth), depth)


def default_capture(num_layers: int) -> tuple[int, int, int]:
    """The default hidden states for a target of `num_layers` layers: a low, a middle and a high one."""
    return (2, num_layers // 2, num_layers - 3)


class Eagle3FirstLayer(nnx.Module):
    """The first layer, which attends over the concatenated token embedding and hidden state."""

    def __init__(self, config: Eagle3Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        layers, name = config.layers, config.first_layer
        width, eps = layers.hidden_size, layers.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.token_norm = RMSNorm(width, eps, f"{name}.input_layernorm", **args)
        self.hidden_norm = RMSNorm(width, eps, f"{name}.hidden_norm", **args)
        self.attention = Attention(layers, f"{name}.self_attn", in_width=2 * width, **args)
        self.mlp_norm = RMSNorm(width, eps, f"{name}.post_attention_layernorm", **args)
        self.mlp = MLP(layers, f"{name}.mlp", **args)

    def __call__(
        self, embedded: jax.Array, hidden: jax.Array, memory: AnyMemory, rope: RopeTables
    ) -> tuple[jax.Array | PendingSum, AnyMemory]:
        normed = self.hidden_norm(hidden)
        wide = jnp.concatenate([self.token_norm(embedded), normed], axis=-1)
        attended, memory = self.attention(wide, memory, 0, rope)
        x = memory.outputs(0, normed if self.norm_before_residual else hidden) + attended
        return x + self.mlp(self.mlp_norm(x)), memory


class Eagle3(Head, AutoregressiveDrafter):
    """A head that reads hidden states from several layers of the target."""

    title = "an EAGLE-3 head"
    is_trainable = True
    config_type = Eagle3Config

    def __init__(self, config: Eagle3Config, *, dtype: jnp.dtype, rngs: nnx.Rngs, **settings: Any):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        layers = config.layers
        width, eps = layers.hidden_size, layers.rms_norm_eps
        super().__init__(**settings)
        self.config = config
        self.needs = Needs(hidden=not config.capture, capture=config.capture, state_size=width)
        self.trained_length = layers.max_position_embeddings
        self.kinds = Decoder.attention_kinds(layers)
        self.draft_vocab_size = config.draft_vocab_size
        self.target_ids, self.draft_ids = vocabulary_buffers(config.draft_vocab_size, layers.vocab_size)
        self.embedding = (
            Embedding(layers.vocab_size, width, "embed_tokens", **args) if config.own_embedding else None
        )
        features, target_width = len(config.capture), config.target_hidden_size
        self.input_norm = (
            RMSNorm(features * target_width, eps, "input_norm", **args) if config.norm_before_fc else None
        )
        self.feature_norms = (
            nnx.List([RMSNorm(target_width, eps, f"fc_norm.{j}", **args) for j in range(features)])
            if config.fc_norm
            else None
        )
        self.fc = (
            Linear(features * target_width, width, "fc", axes=("embed", "embed"), **args)
            if features
            else None
        )
        self.first = Eagle3FirstLayer(config, **args)
        self.rest = nnx.List([DecoderLayer(layers, f"layers.{i}", **args) for i in range(1, len(self.kinds))])
        self.norm = RMSNorm(width, eps, "norm", **args)
        self.head = Linear(width, config.draft_vocab_size, "lm_head", axes=("embed", "vocab"), **args)

    @classmethod
    def recognise(cls, checkpoint: Checkpoint) -> str | None:
        config, names = checkpoint.config, checkpoint.tensors
        if "mask_hidden" in names:
            return None
        if "layers.0.hidden_norm.weight" in names or any(name.startswith("midlayer.") for name in names):
            serving = "Eagle3" in architecture(config) or "eagle_config" in config
            return "SpecForge or SGLang" if serving else "SafeAILab"
        return None

    def embed(self, target: Target, tokens: jax.Array) -> jax.Array:
        """Embeddings [..., M] of target ids i32[...], from the head's own table if it has one."""
        return (self.embedding or target.embedding)(tokens)

    def fuse(self, hidden: jax.Array | None, captured: tuple[jax.Array, ...]) -> jax.Array:
        if self.fc is None:
            assert hidden is not None
            return hidden
        if self.feature_norms is not None:
            captured = tuple(norm(x) for norm, x in zip(self.feature_norms, captured, strict=True))
        features = jnp.concatenate(captured, axis=-1)
        if self.input_norm is not None:
            features = self.input_norm(features)
        return self.fc(features)

    def advance(
        self, target: Target, tokens: jax.Array, hidden: jax.Array, positions: jax.Array, memory: AnyMemory
    ) -> tuple[jax.Array, AnyMemory]:
        rope = rope_tables(self.config.layers.rope, self.config.layers.head_dim, positions)
        x, memory = self.first(self.embed(target, tokens), hidden, memory, rope)
        for i, layer in enumerate(self.rest, 1):
            x, memory = layer(x, memory, i, rope)
        return (self.norm(x) if self.config.norm_output else total(x)), memory

    def normed(self, hidden: jax.Array) -> jax.Array:
        # The output head reads a state that is normed exactly once, whichever form is recycled.
        return hidden if self.config.norm_output else self.norm(hidden)

    def project(self, target: Target, state: jax.Array, *, out_dtype: DTypeLike = jnp.float32) -> jax.Array:
        return self.head(state, out_dtype=out_dtype)
