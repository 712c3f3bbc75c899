"""Multi-token prediction (MTP): drafts with the layer past the target's last one, from the same checkpoint.

The layer was trained to predict one token further than the target. For each further draft it runs again on
its own output; of several such layers, only the first is used, as in vLLM 0.26. Which output it recycles
depends on the family: DeepSeek-V3's layer reads its output after `shared_head.norm`, GLM-4.7-Flash's reads
it before (vLLM, `deepseek_mtp.py` and `glm4_moe_lite_mtp.py`; the `MtpLayer` of transformers 5.23 takes the
normed one for both). Draft 0 is the same either way; the acceptance of draft 1 with a real checkpoint would
tell which one is right. Qwen3-Next and Qwen3.5 recycle the normed output, give the layer tensors beside the
model's, `mtp.*`, and read the token at position 0 like every other (vLLM 0.33, `qwen3_next_mtp.py` and
`qwen3_5_mtp.py`).

DeepSeek-V4's layer reads and recycles all residual streams, and its token and hidden states have projections
of their own, which are added (vLLM 0.33, `models/deepseek_v4/nvidia/mtp.py`). Nemotron-H's is a row of layers
of the target's kinds, attention and experts; it reads the token at position 0 and recycles the normed output
(vLLM 0.33, `nemotron_h_mtp.py`).

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2; vLLM 0.26, as above.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import AnyMemory, LayerCacheShape, RopeTables
from jaxspec.config import ConfigError, DrafterConfig, ModelConfig
from jaxspec.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.drafters.base import Build, Description, DrafterReader, Needs, Target
from jaxspec.drafters.flags import RECYCLED, Flag
from jaxspec.drafters.layer_config import LAST_LAYER
from jaxspec.files import Checkpoint, open_checkpoint
from jaxspec.models.decoder import LAST_STREAMS
from jaxspec.models.language_model import language_model
from jaxspec.models.layers.hyper_connections import StreamHead
from jaxspec.models.layers.rope import rope_tables
from jaxspec.models.layers.transformer import Linear
from jaxspec.models.mtp_names import ALL_NAMES, MtpNames
from jaxspec.models.registry import FAMILIES
from jaxspec.models.target import target_config
from jaxspec.sharding import total
from jaxspec.weights.loading import IGNORED, matching, plan_module

COPIES = ("*.embed_tokens.weight", "*.shared_head.head.weight")
"""Copies of the target's embedding and output head among the layer's tensors. The target's own are used."""


def layer_names(config: ModelConfig) -> MtpNames:
    """The names of the layer's parts in a checkpoint."""
    family = FAMILIES[config.family]
    return family.mtp_names.of(config.num_hidden_layers, len(family.mtp_kinds(config)))


def mtp_config(checkpoint: Checkpoint, target: ModelConfig) -> ModelConfig:
    """The configuration of the checkpoint with the layer, which must be one of the target's model.

    Raises:
      ConfigError: the family has no such layer, the checkpoint has none, or it does not fit the target.
    """
    config, tensors = target_config(checkpoint), language_model(checkpoint).tensors
    if FAMILIES[config.family].recycles_normed is None:
        known = ", ".join(name for name, family in FAMILIES.items() if family.recycles_normed is not None)
        raise ConfigError(
            f"drafter.kind 'mtp' is not supported for model_type {config.family!r}; supported: {known}"
        )
    keys = checkpoint.config.get("text_config") or checkpoint.config
    if keys.get("mtp_use_dedicated_embeddings"):
        raise ConfigError("mtp_use_dedicated_embeddings true is not supported; supported: false")
    for name in ("family", "hidden_size", "vocab_size", "num_hidden_layers"):
        if getattr(config, name) != getattr(target, name):
            raise ConfigError(
                f"the layer is for a model of {name} {getattr(config, name)!r}, "
                f"the target has {getattr(target, name)!r}"
            )
    root = layer_names(config).root
    if not any(name.startswith(root) for name in tensors):
        raise ConfigError(f"{checkpoint.name}: holds no layer to draft with, {root}*")
    return config


class Mtp(AutoregressiveDrafter):
    """A layer of the target's family over token and hidden state; shares the target's embedding and head."""

    title = "a model with multi-token-prediction layers"
    is_trainable = True
    weights_from = "target"
    reads = ()
    ignored = (*IGNORED, *COPIES)

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, **settings: Any):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        width, eps, self.names = config.hidden_size, config.rms_norm_eps, layer_names(config)
        super().__init__(**settings)
        self.config = config
        self.needs = Needs(hidden=True, state_size=width)
        self.trained_length = config.max_position_embeddings
        family = FAMILIES[config.family]
        self.kinds = family.mtp_kinds(config)
        self.recycles_normed = family.recycles_normed
        self.draft_vocab_size = config.vocab_size
        norm = partial(family.norm_type, width, eps, **args)
        self.token_norm, self.hidden_norm = norm(self.names.token_norm), norm(self.names.hidden_norm)
        self.declare(config, **args)
        self.layer = family.make_mtp_layer(config, **args)
        self.norm = norm(self.names.norm)

    @classmethod
    def for_model(cls, config: ModelConfig) -> "type[Mtp]":
        """The class of a layer of this model."""
        return StreamsMtp if config.streams else cls

    def declare(self, config: ModelConfig, **args: Any) -> None:
        """Declares what joins token and hidden state."""
        width = config.hidden_size
        self.projection = Linear(2 * width, width, self.names.projection, axes=("embed", "embed"), **args)

    @classmethod
    def recognise(cls, checkpoint: Checkpoint) -> str | None:
        config = checkpoint.config.get("text_config") or checkpoint.config
        last = config.get("num_hidden_layers")
        places = (f"{names.of(last or 0, 1).projection}.weight" for names in ALL_NAMES)
        is_there = any(place in checkpoint.tensors for place in places)
        return f"model_type {config.get('model_type')}" if is_there else None

    @classmethod
    def describe(cls, checkpoint: Checkpoint, target: ModelConfig | None) -> Description:
        own = target_config(checkpoint)
        recycled = str(FAMILIES[own.family].recycles_normed)
        return Description(
            target="the model itself",
            layers=LAST_LAYER,
            flags=(Flag(RECYCLED, recycled, None, f"as vLLM runs the layer of {own.family}"),),
            ignored=matching(
                language_model(checkpoint),
                tuple(layer_names(own).root + p.removeprefix("*.") for p in COPIES),
            ),
            stand_in=own,
        )

    @classmethod
    def plan(cls, config: DrafterConfig, target: ModelConfig, build: Build) -> DrafterReader:
        assert config.source is not None  # DrafterConfig sets it to the target's
        checkpoint = open_checkpoint(
            config.source, file=config.file, sha256=config.sha256, progress=build.progress
        )
        layer = mtp_config(checkpoint, target).over(build.devices)
        make = cls.for_model(layer)
        plan = plan_module(
            lambda rngs: make(layer, **config.settings, dtype=build.dtype, rngs=rngs),
            _of_layer(checkpoint, layer),
            ignore=cls.ignored,
        )
        return lambda _: plan.read(
            build.mesh, packed=build.packed, codes=build.codes, activations=build.activations
        )

    def update_tensors(self, checkpoint: Checkpoint, target: Target) -> Checkpoint:
        return _of_layer(checkpoint, self.config)

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        family = FAMILIES[self.config.family]
        return tuple(family.layer_cache(self.config, kind) for kind in self.kinds)

    def advance(
        self, target: Target, tokens: jax.Array, hidden: jax.Array, positions: jax.Array, memory: AnyMemory
    ) -> tuple[jax.Array, AnyMemory]:
        embedded = target.embedding(tokens)
        if self.names.drops_first:  # as in vLLM
            embedded = jnp.where(positions[:, None] == 0, 0, embedded)
        x = self.projection(jnp.concatenate([self.token_norm(embedded), self.hidden_norm(hidden)], axis=-1))
        x, memory = self.layer(x, memory, 0, self.rope(positions))
        return (self.norm(x) if self.recycles_normed else total(x)), memory

    def rope(self, positions: jax.Array) -> RopeTables:
        """The tables of the layer's rope."""
        return rope_tables(
            FAMILIES[self.config.family].mtp_rope(self.config), self.config.head_dim, positions
        )

    def normed(self, hidden: jax.Array) -> jax.Array:
        # The output head reads a state that is normed exactly once, whichever form is recycled.
        return hidden if self.recycles_normed else self.norm(hidden)


class StreamsMtp(Mtp):
    """A layer of a family with several residual streams, all of which it reads and hands on side by side."""

    def declare(self, config: ModelConfig, **args: Any) -> None:
        assert config.streams is not None
        width, self.num_streams = config.hidden_size, config.streams.count
        self.needs = Needs(capture=(LAST_STREAMS,), state_size=width * self.num_streams)
        self.token_projection, self.hidden_projection = (
            Linear(width, width, name, axes=("embed", "embed"), **args)
            for name in (self.names.projection, f"{self.names.root}h_proj")
        )
        self.stream_head = StreamHead(config, f"{self.names.root}hc_head", rngs=args["rngs"])

    def fuse(self, hidden: jax.Array | None, captured: tuple[jax.Array, ...]) -> jax.Array:
        (streams,) = captured
        return streams

    def advance(
        self, target: Target, tokens: jax.Array, hidden: jax.Array, positions: jax.Array, memory: AnyMemory
    ) -> tuple[jax.Array, AnyMemory]:
        embedded = jnp.where(positions[:, None] == 0, 0, target.embedding(tokens))
        token = self.token_projection(self.token_norm(embedded))
        x = token[:, None] + self.hidden_projection(self.hidden_norm(self._streams(hidden)))
        x, memory = self.layer(x, memory, 0, self.rope(positions), tokens)
        return x.reshape(len(x), -1), memory

    def normed(self, hidden: jax.Array) -> jax.Array:
        return self.norm(self.stream_head(self._streams(hidden)))

    def _streams(self, hidden: jax.Array) -> jax.Array:
        return hidden.reshape(len(hidden), self.num_streams, -1)


def _of_layer(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """The checkpoint with the layer's tensors alone."""
    checkpoint, root = language_model(checkpoint), layer_names(config).root
    own = {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith(root)}
    return replace(checkpoint, tensors=own)
