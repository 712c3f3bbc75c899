"""Packs the arguments and the results of a dispatch into few arrays, since each array costs host time."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.attention import PageTable
from jaxspec.engine.scheduler import Dispatch
from jaxspec.engine.state import MAX_STOP_TOKENS, Pieces, Served, StepOutput
from jaxspec.sampling import SamplingState, seed_words

_SERVED = 10
"""Columns before the stop tokens: slot, goes on, temperature, top-k, top-p, min-p, seed (two), limit, steps.
"""
_PIECE = 6
"""Columns before the tokens: place, start, count, is last, known, remaining."""


def empty_served(places: int, table_width: int) -> np.ndarray:
    """i32[places, 10 + MAX_STOP_TOKENS + table_width] for `read_served`, with no slot in any place."""
    words = np.zeros((places, _SERVED + MAX_STOP_TOKENS + table_width), np.int32)
    words[:, 0] = words[:, 9] = np.iinfo(np.int32).max
    words[:, _SERVED : _SERVED + MAX_STOP_TOKENS] = -1
    return words


def pack_served(dispatch: Dispatch, *, places: int, table_width: int) -> np.ndarray:
    """i32[places, 10 + MAX_STOP_TOKENS + table_width] for `read_served`; floats and seeds as their bits."""
    words = empty_served(places, table_width)
    floats, unsigned = words.view(np.float32), words.view(np.uint32)
    served = zip(dispatch.served, dispatch.goes_on, dispatch.limits, strict=True)
    for place, (running, goes_on, limit) in enumerate(served):
        request, params = running.request, running.request.params
        row = words[place]
        row[0], row[1] = running.slot, goes_on
        floats[place, 2], floats[place, 4], floats[place, 5] = params.temperature, params.top_p, params.min_p
        row[3] = min(params.top_k, np.iinfo(np.int32).max)
        unsigned[place, 6:8] = seed_words(request.seed)
        row[8], row[9] = limit, dispatch.steps
        row[_SERVED : _SERVED + len(request.stop_tokens)] = request.stop_tokens
        start = _SERVED + MAX_STOP_TOKENS
        row[start : start + len(running.pages)] = running.pages
    return words


def read_served(words: jax.Array, page_size: int) -> Served:
    """Unpacks, inside a program, what `pack_served` packed."""

    def floats(column: int) -> jax.Array:
        return lax.bitcast_convert_type(words[:, column], jnp.float32)

    return Served(
        slot=words[:, 0],
        goes_on=words[:, 1] > 0,
        limit=words[:, 8],
        steps=words[:, 9],
        page_table=PageTable(words[:, _SERVED + MAX_STOP_TOKENS :], page_size),
        stop_tokens=words[:, _SERVED : _SERVED + MAX_STOP_TOKENS],
        sampling=SamplingState(
            temperature=floats(2),
            top_k=words[:, 3],
            top_p=floats(4),
            min_p=floats(5),
            seed=lax.bitcast_convert_type(words[:, 6:8], jnp.uint32),
        ),
    )


def empty_pieces(pieces: int, width: int) -> np.ndarray:
    """i32[pieces, 6 + width + 1] for `read_pieces`, with no work in any piece."""
    words = np.zeros((pieces, _PIECE + width + 1), np.int32)
    words[:, 0] = np.iinfo(np.int32).max
    return words


def pack_pieces(dispatch: Dispatch, *, pieces: int, width: int) -> np.ndarray:
    """i32[pieces, 6 + width + 1] for `read_pieces`; the dispatch's chunks have at most `width` tokens."""
    place_of = {running: place for place, running in enumerate(dispatch.served)}
    words = empty_pieces(pieces, width)
    for row, chunk in zip(words, dispatch.chunks, strict=False):
        running = chunk.running
        row[:_PIECE] = (
            place_of[running],
            chunk.start,
            chunk.count,
            chunk.is_last,
            -1 if running.known is None else running.known,
            running.remaining,
        )
        # One token more than the chunk, because the drafter pairs every row with the token after it.
        tokens = running.tokens[chunk.start : chunk.start + chunk.count + 1]
        row[_PIECE : _PIECE + len(tokens)] = tokens
    return words


def read_pieces(words: jax.Array) -> Pieces:
    """Unpacks, inside a program, what `pack_pieces` packed."""
    tokens = words[:, _PIECE:]
    return Pieces(
        place=words[:, 0],
        tokens=tokens[:, :-1],
        next_tokens=tokens[:, 1:],
        start=words[:, 1],
        count=words[:, 2],
        is_last=words[:, 3] > 0,
        known=words[:, 4],
        remaining=words[:, 5],
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedOutput:
    """A `StepOutput` as one array on the device, which one transfer brings to the host.

    Attributes:
      words: i32[N], all its arrays, one after another.
      shapes: a `ShapeDtypeStruct` for each of them; static.
    """

    words: jax.Array
    shapes: StepOutput = field(metadata={"static": True})


def pack_output(output: StepOutput) -> PackedOutput:
    """Packs, inside a program, what `read_output` unpacks on the host."""
    words = jnp.concatenate([leaf.astype(jnp.int32).ravel() for leaf in jax.tree.leaves(output)])
    return PackedOutput(words, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), output))


def read_output(packed: PackedOutput) -> StepOutput:
    """Unpacks what `pack_output` packed into arrays on the host; waits for the program to end."""
    leaves, structure = jax.tree.flatten(packed.shapes)
    ends = np.cumsum([leaf.size for leaf in leaves])
    parts = np.split(np.asarray(packed.words), ends[:-1])
    arrays = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, arrays)
