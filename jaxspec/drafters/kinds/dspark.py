"""DSpark: a DFlash head whose drafts also depend on the draft before, by a small Markov head.

Source: `deepseek-ai/DeepSpec` modeling/dspark; SpecForge `modeling/draft/dspark.py`;
`vllm-project/speculators` models/dspark.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec.attention import LayerCache
from jaxspec.config import ConfigError
from jaxspec.drafters.base import Context, Proposal, Target
from jaxspec.drafters.flags import Flag, key_flag, tensor_flag
from jaxspec.drafters.kinds.dflash import DFlash, DFlashConfig, is_deepspec, is_dspark
from jaxspec.drafters.layer_config import is_speculators
from jaxspec.files import Checkpoint
from jaxspec.models.layers.transformer import Embedding, Linear
from jaxspec.sampling import SamplingMode

TYPES = ("vanilla", "gated", "rnn")
_CONFIDENCE = "confidence_head.proj.weight"


@dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
    """Adds the two small heads.

    Attributes:
      markov_rank: R, the width of a token in the Markov head; 0 for a head without one.
      markov_head_type: what the Markov head makes of the token before, one of `TYPES`.
      has_confidence: whether there is a head that estimates which drafts are accepted.
      confidence_head_with_markov: whether that head also reads the Markov head's embedding.
    """

    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    has_confidence: bool = False
    confidence_head_with_markov: bool = False
    only: ClassVar[Mapping[str, Any]] = {
        key: value
        for key, value in DFlashConfig.only.items()
        if key not in ("markov_rank", "enable_confidence_head")
    }

    def __post_init__(self) -> None:
        if self.markov_head_type not in TYPES:
            known = ", ".join(TYPES)
            raise ConfigError(
                f"DSpark: markov_head_type {self.markov_head_type!r} is not supported; supported: {known}"
            )
        if self.markov_head_type == "rnn" and self.markov_rank and not self.anchor_drafts:
            raise ConfigError("DSpark: markov_head_type 'rnn' is not supported without sample_from_anchor")
        if self.logit_bound and self.markov_rank:
            raise ConfigError("DSpark: final_logit_softcapping is not supported beside a Markov head")
        if self.confidence_head_with_markov and not self.markov_rank:
            raise ConfigError("DSpark: confidence_head_with_markov is true, but there is no markov_rank")

    @classmethod
    def own_fields(cls, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
        # As vLLM does, a head that left it out is taken: it makes no draft.
        has_confidence = config.get("enable_confidence_head") is not False and _CONFIDENCE in tensors
        # speculators' configs may leave out what is the default of its class.
        rank, with_markov = (256, True) if is_speculators(config) else (0, False)
        with_markov = config.get("confidence_head_with_markov", with_markov)
        return {
            "markov_rank": config.get("markov_rank", rank) or 0,
            "markov_head_type": str(config.get("markov_head_type") or "vanilla").lower(),
            "has_confidence": has_confidence,
            "confidence_head_with_markov": bool(with_markov) and has_confidence,
        }

    def flags(self, checkpoint: Checkpoint) -> Iterator[Flag]:
        merged = {**checkpoint.config, **(checkpoint.config.get("dflash_config") or {})}
        kind = f"{self.markov_head_type}, rank {self.markov_rank}" if self.markov_rank else "none"
        keys, reason = ("markov_head_type", "markov_rank"), "the default of its producer's code"
        yield key_flag("Markov head", kind, merged, *keys, reason=reason)
        yield tensor_flag("estimates which drafts are accepted", "yes", "no", checkpoint.tensors, _CONFIDENCE)
        yield from super().flags(checkpoint)


class MarkovHead(nnx.Module):
    """What the token before a draft adds to the draft's logits, through R numbers."""

    def __init__(self, config: DSparkConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        whole: dict[str, Any] = {"axes": (None, None), "bias": True, **args}
        rank, width, kind = config.markov_rank, config.layers.hidden_size, config.markov_head_type
        self.embedding = Embedding(config.layers.vocab_size, rank, "markov_head.markov_w1", **args)
        self.head = Linear(
            rank, config.draft_vocab_size, "markov_head.markov_w2", axes=(None, "vocab"), **args
        )
        self.gate = Linear(width + rank, rank, "markov_head.gate_proj", **whole) if kind == "gated" else None
        self.joint = (
            Linear(2 * rank + width, 3 * rank, "markov_head.joint_proj", **whole) if kind == "rnn" else None
        )

    def __call__(self, before: jax.Array, hidden: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What is added to a draft's row, f32[B, W] or this device's part of W, and the next state.

        Args:
          before: i32[B], the token before the draft.
          hidden: [B, M], the draft's row.
          state: [B, R], that after the draft before; zeros for the first one.
        """
        latent = self.embedding(before)
        if self.gate is not None:
            latent = jax.nn.sigmoid(self.gate(jnp.concatenate([hidden, latent], axis=-1))) * latent
        if self.joint is not None:
            joint = self.joint(jnp.concatenate([state, latent, hidden], axis=-1))
            gate, candidate, output = jnp.split(joint, 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            state = gate * state + (1 - gate) * jnp.tanh(candidate)
            latent = jnp.tanh(output)
        return self.head(latent, out_dtype=jnp.float32), state


class DSpark(DFlash):
    """A DFlash head that draws its drafts from left to right, each with a correction by the one before."""

    title = "a DSpark head"
    config_type = DSparkConfig
    config: DSparkConfig

    def __init__(self, config: DSparkConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, **settings: Any):
        super().__init__(config, dtype=dtype, rngs=rngs, **settings)
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.markov = MarkovHead(config, **args) if config.markov_rank else None
        width = config.layers.hidden_size
        width += config.markov_rank if config.confidence_head_with_markov else 0
        self.confidence = (
            Linear(width, 1, "confidence_head.proj", axes=(None, None), bias=True, **args)
            if config.has_confidence
            else None
        )

    @classmethod
    def recognise(cls, checkpoint: Checkpoint) -> str | None:
        if not is_dspark(checkpoint):
            return None
        return "DeepSpec" if is_deepspec(checkpoint.config) else "SpecForge"

    def propose(
        self,
        target: Target,
        context: Context,
        cache: tuple[LayerCache, ...],
        *,
        num_drafts: int,
        mode: SamplingMode,
    ) -> tuple[Proposal, tuple[LayerCache, ...]]:
        hidden, cache = self.block_states(target, context, cache, num_drafts=num_drafts)
        logits, markov = self.row_logits(target, hidden), self.markov
        if markov is None:
            proposal = self.draw(target, context, logits, mode=mode)
        else:

            def correction(i: jax.Array, before: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
                row = lax.dynamic_index_in_dim(hidden, i, 1, keepdims=False, allow_negative_indices=False)
                added, state = markov(before, row, state)
                return added * self.config.logit_scale, state

            state = jnp.zeros((len(hidden), self.config.markov_rank), hidden.dtype)
            proposal = self.draw(target, context, logits, mode=mode, correction=correction, state=state)
        return replace(proposal, confidence=self._estimates(context, hidden, proposal.tokens)), cache

    def _estimates(self, context: Context, hidden: jax.Array, tokens: jax.Array) -> jax.Array | None:
        """The estimated probability f32[B, K] that each draft is accepted if those before it are."""
        if self.confidence is None:
            return None
        if self.config.confidence_head_with_markov:
            assert self.markov is not None
            before = jnp.concatenate([context.last_token[:, None], tokens[:, :-1]], axis=1)
            hidden = jnp.concatenate([hidden, self.markov.embedding(before)], axis=-1)
        return jax.nn.sigmoid(self.confidence(hidden, out_dtype=jnp.float32)[..., 0])
