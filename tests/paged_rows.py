"""Feeding rows of several slots to a target through a paged cache, as the engine's programs do."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.attention import NumStates, PagedMemory, PageTable, RowBlock, StatePlaces, init_cache
from jaxspec.models.decoder import Decoder
from jaxspec.sharding import make_mesh


@partial(nnx.jit, static_argnames=("capture",))
def forward(model, tokens, block, cache, *, capture):
    """One forward pass over a block: (logits, hidden states after the final norm, captured, cache)."""
    memory = PagedMemory.build(model.kinds, cache, (block,))
    hidden, captured, memory = model(tokens.reshape(-1), block.positions.reshape(-1), memory, capture=capture)
    by_slot = jax.tree.map(lambda x: x.reshape(*block.shape, -1), (model.logits(hidden), hidden, captured))
    return *by_slot, memory.caches


@dataclass
class PagedTarget:
    """A target with its own cache, whose pages are given to the slots in random order.

    Attributes:
      slots: B.
      length: positions for which every slot has pages.
      width: Q; shorter rows are padded, so that one program serves all.
      capture: indices of the hidden states that `feed` returns.
      fill: initial value of the cache.
    """

    model: Decoder
    slots: int
    length: int
    page_size: int
    width: int
    capture: tuple[int, ...] = ()
    fill: float = 0.0
    cache: Any = field(init=False)
    page_table: PageTable = field(init=False)

    def __post_init__(self) -> None:
        width = -(-self.length // self.page_size)
        pages = 1 + np.random.default_rng(0).permutation(self.slots * width)
        pages = jnp.asarray(pages.reshape(self.slots, width), jnp.int32)
        self.page_table = PageTable(pages, self.page_size)
        self.cache = self.new_cache(self.model.cache_shapes)

    def new_cache(self, shapes: Any) -> Any:
        """A cache with these layers over this target's pages, for a drafter."""
        pages = self.page_table.pages.size + 1
        cache = init_cache(
            shapes,
            num_pages=pages,
            page_size=self.page_size,
            dtype=jnp.float32,
            mesh=make_mesh(),
            num_states=NumStates(self.slots),
        )
        return jax.tree.map(lambda layer: jnp.full_like(layer, self.fill), cache)

    def feed(self, tokens: Sequence[Sequence[int]], starts: Sequence[int]) -> Any:
        """Runs each slot's tokens from its position in `starts`; shorter rows are padded with invalid rows.

        Returns:
          (logits [B, Q, V], hidden [B, Q, M], captured); rows past a slot's tokens are undefined.
        """
        padded = np.zeros((self.slots, self.width), np.int32)
        valid = np.zeros((self.slots, self.width), bool)
        for slot, row in enumerate(tokens):
            padded[slot, : len(row)], valid[slot, : len(row)] = row, True
        positions = np.asarray(starts, np.int32)[:, None] + np.arange(self.width, dtype=np.int32)
        slots = jnp.arange(self.slots, dtype=jnp.int32)
        states = StatePlaces(slots, slots, slots + self.slots, slots[:0])
        logits, hidden, captured, self.cache = forward(
            self.model,
            jnp.asarray(padded),
            RowBlock(jnp.asarray(positions), jnp.asarray(valid), self.page_table, states=states),
            self.cache,
            capture=self.capture,
        )
        return logits, hidden, captured
