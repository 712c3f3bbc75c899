"""Multi-token prediction: the layer past the target's last one, out of the target's own checkpoint.

The layer was trained to predict one token further than the target, and is run again on its own output for
each further draft; of several such layers the first is used, as in vLLM 0.26. What it then reads of itself is
a convention of the family: DeepSeek-V3's reads its output after `shared_head.norm`, GLM-4.7-Flash's before it
(vLLM, `deepseek_mtp.py` and `glm4_moe_lite_mtp.py`; the `MtpLayer` of transformers 5.23 takes the normed one
for both). Draft 0 is the same either way.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2; vLLM 0.26, as above.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.attention import AnyMemory, FullAttention, LayerCache, LayerCacheShape
from jaxspec.checkpoints import Checkpoint
from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters.autoregressive import AutoregressiveDrafter, refresh_shifted
from jaxspec.drafters.base import Rows, Target
from jaxspec.models.deepseek import DeepseekLayer
from jaxspec.models.latent_attention import latent_cache_shape
from jaxspec.models.layers import Linear, RMSNorm
from jaxspec.models.rope import rope_tables

RECYCLES_NORMED: Mapping[str, bool] = {"deepseek_v3": True, "glm4_moe_lite": False}
"""By family, whether a step reads the previous one's output after `shared_head.norm` or before it."""

COPIES = ("*.embed_tokens.weight", "*.shared_head.head.weight")
"""Tensors of the layer that are copies of the target's embedding and output head, which are used instead."""


def layer_name(config: ModelConfig) -> str:
    """The name of the layer in a checkpoint."""
    return f"model.layers.{config.num_hidden_layers}"


def mtp_config(checkpoint: Checkpoint, target: ModelConfig) -> ModelConfig:
    """The config of the model whose checkpoint brings the layer, which must be the target's.

    Raises:
      ConfigError: its family has no such layer, the checkpoint holds none, or it does not fit the target.
    """
    config = ModelConfig.from_hf(checkpoint.config)
    if config.family not in RECYCLES_NORMED:
        known = ", ".join(RECYCLES_NORMED)
        raise ConfigError(
            f"drafter.kind 'mtp' is not supported for model_type {config.family!r}; supported: {known}"
        )
    for name in ("family", "hidden_size", "vocab_size", "num_hidden_layers"):
        if getattr(config, name) != getattr(target, name):
            raise ConfigError(
                f"the layer is for a model of {name} {getattr(config, name)!r}, "
                f"the target has {getattr(target, name)!r}"
            )
    if not any(name.startswith(f"{layer_name(config)}.") for name in checkpoint.tensors):
        raise ConfigError(f"{checkpoint.name}: holds no layer to draft with, {layer_name(config)}.*")
    return config


class Mtp(AutoregressiveDrafter):
    """One block of the target's family over the token and a hidden state; embedding and head are shared."""

    target_ids = draft_ids = None

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_speculative_tokens: int,
        probabilistic: bool = True,
        dtype: jnp.dtype,
        rngs: Any,
    ):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        width, eps, name = config.hidden_size, config.rms_norm_eps, layer_name(config)
        self.config = config
        self.num_speculative_tokens = num_speculative_tokens
        self.probabilistic = probabilistic
        self.hidden_size = width
        self.trained_length = config.max_position_embeddings
        self.kinds = (FullAttention(),)
        self.draft_vocab_size = config.vocab_size
        self.token_norm = RMSNorm(width, eps, f"{name}.enorm", **args)
        self.hidden_norm = RMSNorm(width, eps, f"{name}.hnorm", **args)
        self.projection = Linear(2 * width, width, f"{name}.eh_proj", axes=("embed", "embed"), **args)
        self.layer = DeepseekLayer(config, name, dense=False, **args)
        self.norm = RMSNorm(width, eps, f"{name}.shared_head.norm", **args)

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        return (latent_cache_shape(self.config),)

    def refresh(
        self, target: Target, rows: Rows, cache: tuple[LayerCache, ...]
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        return refresh_shifted(self, target, rows, rows.hidden, cache)

    def advance(
        self, target: Target, tokens: jax.Array, hidden: jax.Array, positions: jax.Array, memory: AnyMemory
    ) -> tuple[jax.Array, AnyMemory]:
        # As in vLLM: the row at position 0 goes without its token.
        embedded = jnp.where(positions[:, None] == 0, 0, target.embedding(tokens))
        x = self.projection(jnp.concatenate([self.token_norm(embedded), self.hidden_norm(hidden)], axis=-1))
        rope = rope_tables(self.config.rope, self.config.head_dim, positions)
        x, memory = self.layer(x, memory, 0, rope)
        return (self.norm(x) if RECYCLES_NORMED[self.config.family] else x), memory

    def logits(self, target: Target, hidden: jax.Array) -> jax.Array:
        # Exactly one norm feeds the head, whichever form of the hidden state is recycled.
        return target.logits(hidden if RECYCLES_NORMED[self.config.family] else self.norm(hidden))
