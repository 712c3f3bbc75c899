"""P-EAGLE: an EAGLE-3 head that drafts K tokens in one pass, with mask rows in place of unknown tokens.

Source: arXiv 2602.01469; `vllm-project/speculators` models/peagle; vLLM `v1/spec_decode`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import LayerCache, LayerCacheShape, RowBlock
from jaxspec.config import ConfigError, ModelConfig, joined
from jaxspec.drafters.base import Context, Rows, Target
from jaxspec.drafters.flags import Flag
from jaxspec.drafters.head import Head
from jaxspec.drafters.kinds.eagle3 import Eagle3, Eagle3Config
from jaxspec.drafters.one_pass import OnePassDrafter
from jaxspec.files import Checkpoint
from jaxspec.sampling import DraftVocabulary
from jaxspec.weights.parameters import Whole, parameter

MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Producers' config keys for the token that a mask row reads."""


@dataclass(frozen=True)
class PEagleConfig:
    """The shape of a head.

    Attributes:
      head: the EAGLE-3 network, of one layer or several.
      mask_token: id of the target's vocabulary that a mask row reads.
    """

    own_head: ClassVar[bool] = True
    head: Eagle3Config
    mask_token: int

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], tensors: Mapping[str, Any], target: ModelConfig
    ) -> "PEagleConfig":
        """Reads a head's `config.json` like `Eagle3Config.from_hf`, with another default for one flag.

        Raises:
          ConfigError: the head does not fit the target, or has no mask token.
        """
        head = Eagle3Config.from_hf(joined({"norm_before_residual": False}, config), tensors, target)
        if not head.capture:
            raise ConfigError("a P-EAGLE head without aux hidden states is not supported")
        mask_token = next((each for each in map(config.get, MASK_TOKEN_KEYS) if each is not None), None)
        return cls(head, checked_mask_token(mask_token, target))

    def over(self, devices: int) -> "PEagleConfig":
        return replace(self, head=self.head.over(devices))

    def reads(self, config: Mapping[str, Any], *, any_target: bool) -> str:
        return self.head.reads(config, any_target=any_target)

    def flags(self, checkpoint: Checkpoint) -> Iterator[Flag]:
        key = next(key for key in MASK_TOKEN_KEYS if checkpoint.config.get(key) is not None)
        yield Flag("mask token", str(self.mask_token), key)
        yield from self.head.flags(checkpoint)


def checked_mask_token(token: Any, target: ModelConfig) -> int:
    """Returns `token` if it is an id of the target's vocabulary.

    Raises:
      ConfigError: it is not.
    """
    if not isinstance(token, int) or not 0 <= token < target.vocab_size:
        raise ConfigError(
            f"mask_token_id must be a token of the target, 0 to {target.vocab_size - 1}, got {token!r}"
        )
    return token


class PEagle(Head, OnePassDrafter):
    """A head that drafts token 0 from the last committed row and tokens 1 to K - 1 from mask rows after it.

    A mask row reads the mask token and the feature of `mask_hidden`. The next refresh overwrites the entries
    that mask rows have cached.
    """

    title = "a P-EAGLE head"
    config_type = PEagleConfig

    def __init__(self, config: PEagleConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, **settings: Any):
        super().__init__(**settings)
        self.config = config
        self.network = Eagle3(config.head, dtype=dtype, rngs=rngs, **settings)
        self.needs = self.network.needs
        self.trained_length = self.network.trained_length
        self.draft_vocab_size = self.network.draft_vocab_size
        shape = (1, 1, len(self.needs.capture) * config.head.target_hidden_size)
        self.mask_hidden = parameter(
            rngs, shape, (None, None, "embed"), Whole("mask_hidden", shape), dtype=dtype
        )

    @classmethod
    def recognise(cls, checkpoint: Checkpoint) -> str | None:
        return "an EAGLE-3 layout with mask_hidden" if "mask_hidden" in checkpoint.tensors else None

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        return self.network.cache_shapes

    @property
    def draft_vocab(self) -> DraftVocabulary | None:
        return self.network.draft_vocab

    def to_target(self, tokens: jax.Array) -> jax.Array:
        return self.network.to_target(tokens)

    def refresh(
        self, target: Target, rows: Rows, cache: tuple[LayerCache, ...]
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        return self.network.refresh(target, rows, cache)

    def block_logits(
        self, target: Target, context: Context, cache: tuple[LayerCache, ...], *, num_drafts: int
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        hidden = context.hidden[:, None]
        if num_drafts > 1:
            masked, cache = self._mask_rows(target, context, cache, num_drafts - 1)
            hidden = jnp.concatenate([hidden, masked.astype(hidden.dtype)], axis=1)
        return self.network.logits(target, hidden), cache

    def _mask_rows(
        self, target: Target, context: Context, cache: tuple[LayerCache, ...], count: int
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Runs the rows that draft tokens 1 to `count`; returns their states [B, count, M'] and the cache."""
        index = jnp.arange(count, dtype=jnp.int32)
        # The last real row, which drafts token 0, is at the position before `length`.
        positions = context.length[:, None] + index
        valid = jnp.broadcast_to(context.active[:, None], positions.shape)
        captured = tuple(jnp.split(self.mask_hidden[0], len(self.needs.capture), axis=-1))
        feature = self.network.fuse(None, captured)
        hidden, cache = self.network.run(
            target,
            jnp.full(positions.size, self.config.mask_token, jnp.int32),
            jnp.broadcast_to(feature, (positions.size, feature.shape[-1])),
            (RowBlock(positions, valid, context.page_table),),
            cache,
        )
        return hidden.reshape(*positions.shape, -1), cache
