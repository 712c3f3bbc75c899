"""Drafts with a smaller model that has the target's vocabulary and a cache of its own.

The two vocabularies may have different numbers of rows: models of one series are padded to different sizes.

Source: Y. Leviathan et al., arXiv 2211.17192.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.attention import (
    AnyMemory,
    LayerCache,
    LayerCacheShape,
    RowBlock,
    has_states,
    join_rows,
    split_rows,
)
from jaxspec.config import ConfigError, DrafterConfig, ModelConfig
from jaxspec.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.drafters.base import Build, Description, DrafterReader, Needs, Rows, Target
from jaxspec.drafters.flags import Flag
from jaxspec.drafters.formats import open_drafter
from jaxspec.drafters.vocabulary import check_tokens, vocabulary_buffers
from jaxspec.files import Checkpoint
from jaxspec.models.decoder import Decoder
from jaxspec.models.language_model import has_bare_names
from jaxspec.models.target import decoder_tensors, plan_target, target_config
from jaxspec.sharding import local_start, make_mesh, sharding
from jaxspec.weights.loading import IGNORED, ModulePlan, matching
from jaxspec.weights.memory import ArrayTensor

SPLIT_FROM = 160 << 20
"""Bytes per layer from which a draft model is split over devices. A split layer needs two sums over devices,
and these take about as long as reading half of this many bytes, so a smaller model drafts faster unsplit."""


class DraftModel(AutoregressiveDrafter):
    """An independent network that reads the same tokens at the same positions, but no hidden states."""

    title = "a whole model"
    weights_from = "own"
    reads = ()
    lead = 1

    def __init__(self, model: Decoder, vocab_size: int, *, is_split: bool = True, **settings: Any):
        """A draft model for a target with a vocabulary of `vocab_size`."""
        super().__init__(**settings)
        self.model = model
        self.needs = Needs(state_size=model.config.hidden_size, is_split=is_split)
        self.trained_length = model.config.max_position_embeddings
        self.kinds = model.kinds
        self.draft_vocab_size = model.config.vocab_size
        self.target_ids, self.draft_ids = vocabulary_buffers(self.draft_vocab_size, vocab_size)

    @classmethod
    def recognise(cls, checkpoint: Checkpoint) -> str | None:
        # The embedding of a head has no prefix in its name.
        parts = (".embed_tokens.weight", ".layers.0.input_layernorm.weight")
        whole = has_bare_names(checkpoint) or any(name.endswith(parts) for name in checkpoint.tensors)
        return f"model_type {checkpoint.config.get('model_type')}" if whole else None

    @classmethod
    def describe(cls, checkpoint: Checkpoint, target: ModelConfig | None) -> Description:
        own = target_config(checkpoint)
        fitting = f"any model with the same vocabulary of {own.vocab_size} tokens, whatever its padding"
        unread = (Flag("keys that are not read", ", ".join(own.unread), "config.json"),) if own.unread else ()
        ignored = matching(checkpoint, IGNORED)
        return Description(fitting, "none", flags=unread, ignored=ignored, stand_in=own)

    @classmethod
    def plan(cls, config: DrafterConfig, target: ModelConfig, build: Build) -> DrafterReader:
        checkpoint = open_drafter(config, progress=build.progress)
        sizes: dict[str, Any] = {"dtype": build.dtype, "max_model_len": build.max_model_len}
        plan = plan_target(checkpoint, **sizes)
        if has_states(plan.module.kinds):
            raise ConfigError(
                f"drafter.source: a draft model with recurrent layers ({plan.module.config.family}) is not "
                "supported"
            )
        check_tokens("a draft model", checkpoint.tokenizer, build.tokenizer)
        is_split = _bytes_of_a_layer(plan) >= SPLIT_FROM
        if is_split and build.devices > 1:
            plan = plan_target(checkpoint, devices=build.devices, **sizes)

        def read(target: Target) -> DraftModel:
            model = plan.read(
                build.mesh,
                is_split=is_split,
                packed=build.packed,
                codes=build.codes,
                activations=build.activations,
            )
            drafter = cls(model, target.config.vocab_size, is_split=is_split, **config.settings)
            for ids in filter(None, (drafter.target_ids, drafter.draft_ids)):
                ids.set_value(jax.device_put(ids[...], sharding(build.mesh or make_mesh(), None, ids.shape)))
            return drafter

        return read

    def update_tensors(self, checkpoint: Checkpoint, target: Target) -> Checkpoint:
        checkpoint = decoder_tensors(self.model, checkpoint)
        tensors = dict(checkpoint.tensors)
        for ids in filter(None, (self.target_ids, self.draft_ids)):  # the maps of ids stay
            source = ids.get_metadata("source")
            tensors[source.tensors[0][0]] = ArrayTensor(source.split(np.asarray(ids[...]))[0])
        return replace(checkpoint, tensors=tensors)

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        return self.model.cache_shapes

    def refresh(
        self, target: Target, rows: Rows, cache: tuple[LayerCache, ...]
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Reads the token of each group's first row, then every row's next token, one position later."""
        shapes = [block.shape for block in rows.blocks]
        tokens, blocks = [], []
        for block, own, following in zip(
            rows.blocks, split_rows(rows.tokens, shapes), split_rows(rows.next_tokens, shapes), strict=True
        ):
            tokens.append(_behind(own, following))
            positions = _behind(block.positions, block.positions + 1)
            output = None if block.output is None else block.output + 1
            blocks.append(RowBlock(positions, _behind(block.valid, block.valid), block.page_table, output))
        read = join_rows(tokens)
        unread = jnp.zeros((len(read), 0))
        hidden, cache = self.run(target, read, unread, tuple(blocks), cache)
        parts = split_rows(hidden, [block.outputs.shape for block in blocks])
        return join_rows(
            part[:, 1:] if block.output is None else part for part, block in zip(parts, blocks, strict=True)
        ), cache

    def advance(
        self, target: Target, tokens: jax.Array, hidden: jax.Array, positions: jax.Array, memory: AnyMemory
    ) -> tuple[jax.Array, AnyMemory]:
        hidden, _, memory = self.model(tokens, positions, memory)
        return hidden, memory

    def logits(self, target: Target, hidden: jax.Array) -> jax.Array:
        logits = self.model.logits(hidden)
        if self.draft_vocab_size <= target.config.vocab_size:
            return logits
        part = logits.shape[-1]
        start = 0 if part == self.draft_vocab_size else local_start(part)
        # The target has no such tokens.
        return jnp.where(start + jnp.arange(part) < target.config.vocab_size, logits, -jnp.inf)


def _bytes_of_a_layer(plan: ModulePlan[Decoder]) -> int:
    arrays = [variable.get_value() for variable, _ in plan.parameters]
    return sum(array.size * array.dtype.itemsize for array in arrays) // plan.module.config.num_hidden_layers


def _behind(first: jax.Array, rest: jax.Array) -> jax.Array:
    """[G, Q + 1]: the first column of `first`, then all of `rest`, both [G, Q]."""
    return jnp.concatenate([first[:, :1], rest], axis=1)
