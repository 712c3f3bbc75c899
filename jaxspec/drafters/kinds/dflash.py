"""DFlash: drafts a block of mask tokens in one pass, which attends to features of the target as context.

Source: arXiv 2602.06036; `z-lab/dflash` dflash/model.py; `vllm-project/speculators` models/dflash; vLLM
`model_executor/models/qwen3_dflash.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.attention import (
    AttentionKind,
    AttentionMetadata,
    LayerCache,
    PagedMemory,
    RowBlock,
    SlidingWindow,
)
from jaxspec.config import ConfigError, ModelConfig, inner_keys, joined
from jaxspec.drafters.base import Context, Needs, Rows, Target
from jaxspec.drafters.flags import Flag, key_flag, layer_flags, vocabulary_flags
from jaxspec.drafters.head import Head
from jaxspec.drafters.kinds.peagle import checked_mask_token
from jaxspec.drafters.layer_config import (
    architecture,
    captured_streams,
    check_only,
    is_speculators,
    layer_config,
)
from jaxspec.drafters.one_pass import OnePassDrafter
from jaxspec.drafters.vocabulary import vocabulary_buffers
from jaxspec.files import Checkpoint
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers.rope import rope_tables
from jaxspec.models.layers.transformer import DecoderLayer, Embedding, Linear, RMSNorm
from jaxspec.sharding import PendingSum, total


@dataclass(frozen=True)
class DFlashConfig:
    """The shape of a head.

    Attributes:
      layers: the draft transformer, of Qwen3's layers; its vocab_size is the target's.
      block_size: rows of the largest block: the last token and its masks.
      mask_token: id of the target's vocabulary that a mask row reads.
      capture: the target's hidden states that form a context feature; i is the stream before layer i.
      target_hidden_size: width of the target's hidden states.
      draft_vocab_size: W.
      causal: for each layer, whether a row of the block sees only the rows before it instead of all rows.
      window_before_block: whether a window counts back from the start of the block, for all of its rows alike
        (speculators), instead of from each row (z-lab).
      embedding_scale: factor of the token embeddings. z-lab's heads take those of transformers' target, whose
        scale is part of them; speculators' are trained with its rows alone.
      anchor_drafts: whether every row drafts the token after its own (DeepSpec), the last token's row, too,
        instead of every mask that of its own position.
      logit_scale: factor of the logits, a Markov head's included.
      logit_bound: their bound, which a tanh brings about; 0 for none, or for that of the target, whose logits
        a head without rows of its own takes.
      own_embedding, own_head: whether the checkpoint has a token embedding or an output head of its own.
    """

    layers: ModelConfig
    block_size: int
    mask_token: int
    capture: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    causal: tuple[bool, ...]
    window_before_block: bool = False
    embedding_scale: float = 1.0
    anchor_drafts: bool = False
    own_embedding: bool = False
    own_head: bool = False
    logit_scale: float = 1.0
    logit_bound: float = 0.0
    only: ClassVar[Mapping[str, Any]] = {
        "shift_label": False,
        "rope_is_neox_style": True,
        "attention_sink_bias": False,
        "use_swa": False,
        "is_neox_style": True,
        "output_multiplier": 1.0,
        "conv_kernel_size": 0,
        "markov_rank": 0,
        "enable_confidence_head": False,
    }
    """Keys of related heads, each with the only value that is supported here."""

    @property
    def most_drafts(self) -> int:
        """The drafts of the largest block."""
        return self.block_size if self.anchor_drafts else self.block_size - 1

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], tensors: Mapping[str, Any], target: ModelConfig
    ) -> "DFlashConfig":
        """Reads a head's `config.json` in z-lab's, DeepSpec's or speculators' format.

        Raises:
          ConfigError: the head does not fit the target, or a value is not supported.
        """
        speculators = is_speculators(config)
        if architecture(config).startswith("DFlash2") or any(n.startswith("candidate_") for n in tensors):
            raise ConfigError("DFlash2 is not supported; supported: DFlash")
        if architecture(config).startswith("Gemma4DSpark"):
            raise ConfigError("Gemma4DSparkModel, of Gemma 4's layers, is not supported")
        # z-lab's newer heads nest keys that its older ones have at the top level.
        config = joined(config, inner_keys(config, "dflash_config", is_named=False))
        check_only(config, cls.only, "DFlash")
        # The bound of logits is the head's, not that of its layers.
        own = {"model_type": "qwen3", "final_logit_softcapping": None}
        layers = ModelConfig.from_hf(joined(layer_config(config, target), own))
        if layers.vocab_size != target.vocab_size:
            raise ConfigError(
                f"the head is for a vocabulary of {layers.vocab_size}, the target's has {target.vocab_size}"
            )
        width = config.get("target_hidden_size") or layers.hidden_size
        if width != target.hidden_size:
            raise ConfigError(
                f"the head is for targets of hidden size {width}, this one has {target.hidden_size}"
            )
        block_size = config.get("block_size", 8 if speculators else 16)
        if not isinstance(block_size, int) or block_size < 2:
            raise ConfigError(f"block_size must be a whole number of at least 2, got {block_size!r}")
        draft_vocab_size = config.get("draft_vocab_size") or layers.vocab_size
        own_embedding = "embed_tokens.weight" in tensors
        own_head = "lm_head.weight" in tensors or draft_vocab_size != layers.vocab_size
        if layers.hidden_size != target.hidden_size and not (own_embedding and own_head):
            raise ConfigError(
                f"the head is {layers.hidden_size} wide, the target {target.hidden_size}, and the head "
                "does not bring both embed_tokens.weight and lm_head.weight"
            )
        return cls(
            layers=layers,
            block_size=block_size,
            mask_token=checked_mask_token(config.get("mask_token_id"), target),
            capture=_capture_ids(config, target.num_hidden_layers, speculators),
            target_hidden_size=target.hidden_size,
            draft_vocab_size=draft_vocab_size,
            causal=_causal(config, layers, speculators),
            window_before_block=speculators,
            embedding_scale=float(config.get("input_embedding_scale", 1.0))
            * (1.0 if speculators or own_embedding else target.embedding_scale),
            anchor_drafts=_anchor_drafts(config, speculators),
            own_embedding=own_embedding,
            own_head=own_head,
            logit_scale=float(config.get("logit_scale") or 1.0),
            logit_bound=_bound(config, target, own_head),
            **cls.own_fields(config, tensors),
        )

    @classmethod
    def own_fields(cls, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that a subclass adds.

        Args:
          config: the head's `config.json`, with the keys of `dflash_config` beside the others.
          tensors: its tensors by name.
        """
        return {}

    def over(self, devices: int) -> "DFlashConfig":
        return replace(self, layers=self.layers.over(devices))

    def reads(self, config: Mapping[str, Any], *, any_target: bool) -> str:
        return f"those before layers {', '.join(map(str, self.capture))}"

    def flags(self, checkpoint: Checkpoint) -> Iterator[Flag]:
        config = checkpoint.config
        merged = {**config, **(config.get("dflash_config") or {})}
        yield Flag("mask token", str(self.mask_token), "mask_token_id")
        reason = "the default of its producer's code"
        yield key_flag("block size", self.block_size, merged, "block_size", reason=reason)
        rows = (
            "all rows, each the token after its own" if self.anchor_drafts else "masks, each its own position"
        )
        yield key_flag("drafts come from", rows, merged, "sample_from_anchor", "architectures", reason=reason)
        is_windowed = "sliding_attention" in self.layers.layer_types
        if is_windowed or any(self.causal):
            keys = ("sliding_window_non_causal",) if is_speculators(config) else _CAUSAL
            causal = ", ".join("causal" if c else "bidirectional" for c in self.causal)
            reason = "its producer's code makes only windowed layers causal inside a block"
            yield key_flag("attention inside a block, by layer", causal, merged, *keys, reason=reason)
        if is_windowed:
            window = "before the block" if self.window_before_block else "before each row"
            yield Flag("window counts positions", window, None, "its producer's attention mask does so")
        yield from layer_flags(self.layers, config)
        yield from vocabulary_flags(self.draft_vocab_size, checkpoint)


def _bound(config: Mapping[str, Any], target: ModelConfig, own_head: bool) -> float:
    """The bound of a head's logits that is not the target's own.

    Raises:
      ConfigError: the head takes the target's logits and states another bound, or scales what is bounded.
    """
    bound = float(config.get("final_logit_softcapping") or 0.0)
    of_target = float(getattr(target, "final_logit_softcapping", 0.0))
    if bound and (config.get("logit_scale") or 1.0) != 1.0:
        raise ConfigError("DFlash: logit_scale beside final_logit_softcapping is not supported")
    if own_head:
        return bound
    if target.family and bound and bound != of_target:
        raise ConfigError(
            f"the head is for logits with final_logit_softcapping {bound}, and the target's have {of_target}"
        )
    return 0.0


def _capture_ids(config: Mapping[str, Any], depth: int, speculators: bool) -> tuple[int, ...]:
    """The hidden states that the head reads; z-lab counts layer outputs, speculators streams before a layer.

    There is no default, because the layers are chosen in training.
    """
    key, offset = ("aux_hidden_state_layer_ids", 0) if speculators else ("target_layer_ids", 1)
    ids = config.get(key)
    if not ids:
        raise ConfigError(f"DFlash: config.json names no {key}, the target's layers that the head reads")
    return captured_streams(ids, depth, offset=offset)


_CAUSAL = ("causal", "is_causal", "causal_head")
"""Producers' keys that say of all layers whether they are causal inside a block; the last is JetSpec's."""


def is_deepspec(config: Mapping[str, Any]) -> bool:
    """Whether a head is in the format of DeepSpec, which has its keys at the top level."""
    return architecture(config).endswith("DSparkModel") and not is_speculators(config)


def is_dspark(checkpoint: Checkpoint) -> bool:
    """Whether a head in any format has one of the two heads that DSpark adds."""
    return any(name.startswith(("markov_head.", "confidence_head.")) for name in checkpoint.tensors)


def _anchor_drafts(config: Mapping[str, Any], speculators: bool) -> bool:
    """Whether every row of a block drafts the token after its own: if the config says so, or by its format.

    speculators' DSpark heads without the key are older than it, and their masks draft.
    """
    stated, kind = config.get("sample_from_anchor"), config.get("projector_type")
    if kind not in (None, "dflash", "dspark"):
        raise ConfigError(f"DFlash: projector_type {kind!r} is not supported; supported: dflash, dspark")
    is_dspark = "DSpark" in architecture(config) or kind == "dspark"
    return bool((is_dspark and not speculators) if stated is None else stated)


def _causal(config: Mapping[str, Any], layers: ModelConfig, speculators: bool) -> tuple[bool, ...]:
    """Which layers are causal inside a block: the windowed ones, unless the config says otherwise."""
    windowed = tuple(kind == "sliding_attention" for kind in layers.layer_types)
    if speculators:
        return tuple(w and not config.get("sliding_window_non_causal", False) for w in windowed)
    stated = next((each for each in map(config.get, _CAUSAL) if each is not None), None)
    return windowed if stated is None else (bool(stated),) * len(windowed)


class DFlash(Head, OnePassDrafter):
    """A head that runs the last token and masks; each row drafts the token of its own position or the next.

    The context of a committed position is a feature of the target, which `refresh` turns into keys and values
    for every layer. Nothing else is kept. The next refresh overwrites the entries that
    a block has cached.
    """

    title = "a DFlash head"
    config_type = DFlashConfig

    def __init__(self, config: DFlashConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, **settings: Any):
        """Makes a head with random weights.

        Raises:
          ConfigError: there are more drafts than the head's block has masks.
        """
        super().__init__(**settings)
        if self.num_speculative_tokens > config.most_drafts:
            raise ConfigError(
                f"drafter.num_speculative_tokens is {self.num_speculative_tokens}, and the head drafts "
                f"at most {config.most_drafts} (block_size {config.block_size})"
            )
        args: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        layers = config.layers
        width, eps = layers.hidden_size, layers.rms_norm_eps
        self.config = config
        self.needs = Needs(capture=config.capture)
        self.trained_length = layers.max_position_embeddings
        self.kinds = _block_kinds(config)
        self.draft_vocab_size = config.draft_vocab_size
        self.target_ids, self.draft_ids = vocabulary_buffers(config.draft_vocab_size, layers.vocab_size)
        self.embedding = (
            Embedding(layers.vocab_size, width, "embed_tokens", **args) if config.own_embedding else None
        )
        self.fc = Linear(
            len(config.capture) * config.target_hidden_size, width, "fc", axes=("embed", "embed"), **args
        )
        self.hidden_norm = RMSNorm(width, eps, "hidden_norm", **args)
        self.layers = nnx.List([DecoderLayer(layers, f"layers.{i}", **args) for i in range(len(self.kinds))])
        self.norm = RMSNorm(width, eps, "norm", **args)
        self.head = (
            Linear(width, config.draft_vocab_size, "lm_head", axes=("embed", "vocab"), **args)
            if config.own_head
            else None
        )

    @classmethod
    def recognise(cls, checkpoint: Checkpoint) -> str | None:
        config = checkpoint.config
        if is_dspark(checkpoint):
            return None
        if is_deepspec(config):
            return "DeepSpec"
        return "z-lab" if "dflash_config" in config or architecture(config).startswith("DFlash") else None

    def refresh(
        self, target: Target, rows: Rows, cache: tuple[LayerCache, ...]
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        context = self.hidden_norm(self.fc(jnp.concatenate(rows.captured, axis=-1)))
        rope = rope_tables(self.config.layers.rope, self.config.layers.head_dim, rows.positions)
        memory = PagedMemory.build(self.kinds, cache, rows.blocks)
        for i, layer in enumerate(self.layers):
            memory = layer.attention.write(context, memory, i, rope)
        return rows.no_state, memory.caches

    def block_logits(
        self, target: Target, context: Context, cache: tuple[LayerCache, ...], *, num_drafts: int
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        hidden, cache = self.block_states(target, context, cache, num_drafts=num_drafts)
        return self.row_logits(target, hidden), cache

    def row_logits(self, target: Target, hidden: jax.Array) -> jax.Array:
        """Logits f32[..., W] from normed states [..., M], or this device's part of W."""
        if self.head is None:
            return target.logits(hidden) * self.config.logit_scale
        bound = self.config.logit_bound
        logits = self.head(hidden, out_dtype=jnp.float32) * self.config.logit_scale
        return jnp.tanh(logits / bound) * bound if bound else logits

    def block_states(
        self, target: Target, context: Context, cache: tuple[LayerCache, ...], *, num_drafts: int
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """The states [B, K, M] after the last norm of the rows that give drafts, and the cache."""
        # Rows of a block see each other, so drafts depend on the number of masks: every K runs the largest.
        first = 0 if self.config.anchor_drafts else 1
        index = jnp.arange(self.num_speculative_tokens + first, dtype=jnp.int32)[None, :]
        positions = context.length[:, None] + index
        tokens = jnp.where(index == 0, context.last_token[:, None], self.config.mask_token)
        valid = jnp.broadcast_to(context.active[:, None], positions.shape)
        memory = self._block_memory(RowBlock(positions, valid, context.page_table), cache)
        rope = rope_tables(self.config.layers.rope, self.config.layers.head_dim, positions.reshape(-1))
        embedded = (self.embedding or target.embedding)(tokens.reshape(-1))
        x: jax.Array | PendingSum = embedded * jnp.asarray(self.config.embedding_scale, embedded.dtype)
        for i, layer in enumerate(self.layers):
            x, memory = layer(x, memory, i, rope)
        hidden = total(x).reshape(*positions.shape, -1)[:, first : num_drafts + first]
        return self.norm(hidden), memory.caches

    def _block_memory(self, block: RowBlock, cache: tuple[LayerCache, ...]) -> PagedMemory:
        """The memory of a block in which rows may see later rows."""
        memory = PagedMemory.build(self.kinds, cache, (block,))
        per_layer = (
            (block_metadata(metadata, kind, causal, self.config.window_before_block),)
            for (metadata,), kind, causal in zip(memory.metadata, self.kinds, self.config.causal, strict=True)
        )
        return replace(memory, metadata=tuple(per_layer))


def _block_kinds(config: DFlashConfig) -> tuple[AttentionKind, ...]:
    """The kind of attention of every layer; a window before the block does not count the row itself."""
    beside = 1 if config.window_before_block else 0
    return tuple(
        SlidingWindow(kind.size + beside) if isinstance(kind, SlidingWindow) else kind
        for kind in Decoder.attention_kinds(config.layers)
    )


def block_metadata(
    metadata: AttentionMetadata, kind: AttentionKind, causal: bool, window_before_block: bool
) -> AttentionMetadata:
    """The metadata of a block whose rows may see later rows, from the causal metadata of the same rows.

    If a block runs past its request's pages, its rows see no further than the last row with a page: the rows
    beyond would be read from page 0. Its drafts are verified against the logits of the shorter block, so
    sampling stays exact.

    Args:
      metadata: causal metadata, [B, Q], of consecutive rows.
      kind: the kind of attention that it was built for.
      causal: whether rows see no later row.
      window_before_block: whether every row sees as far back as the first one.
    """
    first, last = metadata.first, metadata.last
    if not causal:
        end = last.max(axis=1, keepdims=True)
        if isinstance(kind, SlidingWindow) and not window_before_block:
            end = jnp.minimum(end, last + kind.size - 1)
        last = jnp.where(last >= 0, end, -1)
    if window_before_block:
        first = jnp.broadcast_to(first[:, :1], first.shape)
    return replace(metadata, first=first, last=last)
