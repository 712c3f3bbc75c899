"""Drafting with a smaller model of the same vocabulary and a cache of its own.

Source: Y. Leviathan et al., arXiv 2211.17192.
"""

import jax
import jax.numpy as jnp

from jaxspec.attention import AnyMemory, LayerCache, LayerCacheShape, RowBlock, join_rows, split_rows
from jaxspec.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.drafters.base import Rows, Target
from jaxspec.models.llama import Llama


class DraftModel(AutoregressiveDrafter):
    """An independent network: it reads the same tokens at the same positions, and no hidden states."""

    target_ids = draft_ids = None
    lead = 1

    def __init__(self, model: Llama, *, num_speculative_tokens: int, probabilistic: bool = True):
        self.model = model
        self.num_speculative_tokens = num_speculative_tokens
        self.probabilistic = probabilistic
        self.hidden_size = model.config.hidden_size
        self.trained_length = model.config.max_position_embeddings
        self.kinds = model.kinds
        self.draft_vocab_size = model.config.vocab_size

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        return self.model.cache_shapes

    def refresh(
        self, target: Target, rows: Rows, cache: tuple[LayerCache, ...]
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Reads the first row's own token and, one position after each row, the token that follows it."""
        shapes = [block.shape for block in rows.blocks]
        tokens, blocks = [], []
        for block, own, following in zip(
            rows.blocks, split_rows(rows.tokens, shapes), split_rows(rows.next_tokens, shapes), strict=True
        ):
            tokens.append(_behind(own, following))
            positions = _behind(block.positions, block.positions + 1)
            blocks.append(RowBlock(positions, _behind(block.valid, block.valid), block.page_table))
        read = join_rows(tokens)
        hidden, cache = self.run(target, read, self._no_hidden(read, rows), tuple(blocks), cache)
        parts = split_rows(hidden, [block.shape for block in blocks])
        return join_rows(part[:, 1:] for part in parts), cache

    def advance(
        self, target: Target, tokens: jax.Array, hidden: jax.Array, positions: jax.Array, memory: AnyMemory
    ) -> tuple[jax.Array, AnyMemory]:
        hidden, _, memory = self.model(tokens, positions, memory)
        return hidden, memory

    def logits(self, target: Target, hidden: jax.Array) -> jax.Array:
        return self.model.logits(hidden)

    def _no_hidden(self, tokens: jax.Array, rows: Rows) -> jax.Array:
        return jnp.zeros((*tokens.shape, 0), rows.hidden.dtype)


def _behind(first: jax.Array, rest: jax.Array) -> jax.Array:
    """[G, Q + 1]: the first column of one, then all of the other."""
    return jnp.concatenate([first[:, :1], rest], axis=1)
