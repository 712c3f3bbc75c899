"""Finds the first operation of a target whose rows depend on what is computed beside them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.op import recorded

from jaxspec.attention import LayerCache, PagedMemory
from jaxspec.attention.cache import init_cache
from jaxspec.attention.rows import PageTable, RowBlock
from jaxspec.engine import Engine
from jaxspec.engine.device.oracle import Oracle
from jaxspec.engine.device.step import Models
from jaxspec.sharding import make_mesh

LOGITS = "logits"


@dataclass(frozen=True)
class BitDifference:
    """The first operation whose result for a row is not what it is for the row alone.

    Attributes:
      operation: its name, that of an `Op` of `jaxspec_kernels`, or "logits".
      number: how many operations of the target come before it.
      before: the name of the one before it, between which and this one the cause may also lie; "" if none.
      position: the position of the row.
      rows: what was computed in one pass.
      share: how much of the row's result differs, above 0 to 1.
    """

    operation: str
    number: int
    before: str
    position: int
    rows: str
    share: float

    def __str__(self) -> str:
        after = f", after {self.before}" if self.before else ""
        return (
            f"{self.operation} (operation {self.number}{after}) differs in {self.share:.0%} of the row at "
            f"position {self.position} between the row alone and {self.rows}"
        )


@dataclass(frozen=True)
class _Way:
    """A way to compute a text.

    Attributes:
      slots: texts side by side, or chunks of the same one.
      width: rows of each in a pass.
      is_one_text: whether they are chunks.
      rejected: how many of the rows, the last ones, are other tokens; later passes compute the text's.
    """

    name: str
    slots: int
    width: int
    is_one_text: bool = False
    rejected: int = 0

    def passes(self, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The texts and positions i32[G, Q] of every pass; texts other than 0 are a few rows behind."""
        if self.is_one_text:
            step = self.slots * self.width
            for start in range(0, length, step):
                yield (
                    np.zeros(self.slots, np.int32),
                    start + np.arange(step, dtype=np.int32).reshape(self.slots, self.width),
                )
            return
        texts, row = np.arange(self.slots, dtype=np.int32), np.arange(self.width, dtype=np.int32)
        for start in range(0, length, self.width - self.rejected):
            yield texts, start + row - texts[:, None] * self.width // 2


def first_difference_in_bits(
    engine: Engine, tokens: Sequence[int], *, drafts: int = 4, slots: int = 8, chunk: int = 16
) -> BitDifference | None:
    """Computes a text row by row, and again as verified drafts, in company and as chunks of a prompt.

    The first pass of which any operation gives any row other bits than alone ends the search; of its
    operations, the first is named. Results include the logits of every row. The engine does not run.

    Args:
      engine: an engine on one device, whose settings decide how operations are computed.
      tokens: the text, at least one token.
      drafts: K.
      slots: texts side by side.
      chunk: rows of a chunk; several chunks are computed together.

    Returns:
      None if all bits are equal.
    """
    search = _Search(engine, np.asarray(tokens, np.int32), slots, max(drafts + 1, chunk))
    search.run(_Way("the row alone", 1, 1))
    for way in (
        _Way(f"{drafts + 1} rows of its text", 1, drafts + 1),
        _Way(f"a row and {drafts} rejected drafts", 1, drafts + 1, rejected=drafts),
        _Way(f"one row of {slots} texts each", slots, 1),
        _Way(f"{drafts + 1} rows of {slots} texts each", slots, drafts + 1),
        _Way(f"a chunk of {chunk} rows", 1, chunk),
        _Way(f"{slots} chunks of {chunk} rows", slots, chunk, is_one_text=True),
    ):
        if (difference := search.run(way)) is not None:
            return difference
    return None


class _Search:
    def __init__(self, engine: Engine, text: np.ndarray, slots: int, most_rows: int):
        config, target = engine.programs.config, engine.target
        self.page_size = config.page_size
        self.text, self.oracle = text, Oracle(engine.programs)
        self.names: list[str] = []
        # No pass has as many rows as the cache has pages: that is how results of rows are recognised.
        self.pages = max(-(-len(text) // self.page_size), most_rows)
        rng = np.random.default_rng(0)
        self.table = 1 + rng.permutation(slots * self.pages).reshape(slots, self.pages).astype(np.int32)
        self.texts = np.stack([np.roll(text, i) for i in range(slots)])
        self.new_caches = partial(
            init_cache,
            target.cache_shapes,
            num_pages=slots * self.pages + 1,
            page_size=self.page_size,
            mesh=make_mesh(1, [engine.programs.mesh.devices.flat[0]]),
            dtype=jnp.dtype(config.dtype),
            pair_dtype=jnp.dtype(config.cache_dtype),
        )
        self.alone: list[list[np.ndarray]] = []

    def run(self, way: _Way) -> BitDifference | None:
        """Computes the text in a way; the first one is what others are compared with."""
        caches = self.new_caches()
        is_first = not self.alone
        for texts, positions in way.passes(len(self.text)):
            in_text = (positions >= 0) & (positions < len(self.text))
            at = np.clip(positions, 0, len(self.text) - 1)
            tokens = np.take_along_axis(self.texts[texts], at, axis=1)
            is_text = np.broadcast_to(np.arange(way.width) < way.width - way.rejected, at.shape)
            tokens = np.where(is_text, tokens, self.text[(3 * at + 1) % len(self.text)])
            results, caches = self.oracle.call(
                self._pass, tokens, at, in_text, self.table[texts], donated=caches
            )
            mine = [np.asarray(result)[texts.repeat(way.width) == 0] for result in results]
            rows = at[texts == 0].ravel()
            kept = (in_text & is_text)[texts == 0].ravel()
            if is_first:
                self.alone.append([result[0] for result in mine])
                continue
            for number, result in enumerate(mine):
                for row, position in zip(result[kept], rows[kept], strict=True):
                    differs = row != self.alone[position][number]
                    if differs.any():
                        names = ["", *self.names]
                        share = float(differs.mean())
                        return BitDifference(
                            names[number + 1], number, names[number], int(position), way.name, share
                        )
        return None

    def _pass(
        self,
        models: Models,
        caches: tuple[LayerCache, ...],
        tokens: jax.Array,
        positions: jax.Array,
        valid: jax.Array,
        pages: jax.Array,
    ) -> tuple[list[jax.Array], tuple[LayerCache, ...]]:
        """The results of all operations, as bits of every row, u8[N, ...], and the caches."""
        target: Any = models.target
        block = RowBlock(positions, valid, PageTable(pages, self.page_size))
        memory = PagedMemory.build(target.kinds, caches, (block,))
        with recorded() as results:
            hidden, _, memory = target(tokens.ravel(), positions.ravel(), memory)
            logits = target.logits(hidden)
        # What is computed inside a loop of the target is not seen here, but its result is.
        here = tokens._trace  # type: ignore[attr-defined]
        leaves = [(name, leaf) for name, result in results for leaf in jax.tree.leaves(result)]
        named = [(name, leaf) for name, leaf in leaves if leaf._trace is here]
        by_row = [(name, _by_row(leaf, block.shape)) for name, leaf in [*named, (LOGITS, logits)]]
        self.names = [name for name, rows in by_row if rows is not None]
        return [rows for _, rows in by_row if rows is not None], memory.caches


def _by_row(x: jax.Array, shape: tuple[int, int]) -> jax.Array | None:
    """The bits of a result for every row, [N, ...]; None if it is none of rows, but a cache."""
    count = shape[0] * shape[1]
    # Rows of experts come several to a row of the pass.
    is_chosen = x.ndim == 2 and x.shape[0] % count == 0
    if not (x.shape[:2] in (shape, (1, count)) or x.shape[0] == count or is_chosen):
        return None
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return bits.reshape(count, -1)
