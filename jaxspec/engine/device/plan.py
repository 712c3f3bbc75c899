"""Packs the arguments and the results of a dispatch into few arrays, since each array costs host time."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.attention import PageTable
from jaxspec.engine.device.state import MAX_STOP_TOKENS, Batch, Chunks, StepOutput
from jaxspec.engine.host.scheduler import Dispatch
from jaxspec.sampling import SamplingState, seed_words

_FIELD = 4
"""Words from the start of a field to the next. XLA passes a field of a single row to a kernel without copying
it, and Triton's kernels expect arrays to start at a multiple of 16 bytes."""
_LARGEST = np.iinfo(np.int32).max
_SLOT, _IS_DECODING, _TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _SEED, _LIMIT, _STEPS, _STOP = range(
    0, 10 * _FIELD, _FIELD
)
_PAGES = _STOP + MAX_STOP_TOKENS
_BATCH_INDEX, _START, _COUNT, _IS_LAST, _GIVEN_TOKEN, _REMAINING, _TOKENS = range(0, 7 * _FIELD, _FIELD)


def empty_batch(size: int, table_width: int) -> np.ndarray:
    """i32[size, words] for `read_batch`, with no slot in any entry."""
    words = np.zeros((size, _PAGES + table_width), np.int32)
    words[:, _SLOT] = words[:, _STEPS] = _LARGEST
    words[:, _STOP:_PAGES] = -1
    return words


def pack_batch(dispatch: Dispatch, *, size: int, table_width: int) -> np.ndarray:
    """i32[size, words] for `read_batch`; floats and seeds as their bits."""
    all_words = empty_batch(size, table_width)
    words = all_words[: len(dispatch.batch)]
    floats, unsigned = words.view(np.float32), words.view(np.uint32)
    requests = [running.request for running in dispatch.batch]
    params = [request.params for request in requests]
    # A column at a time: NumPy takes as long for a number as for a short list.
    words[:, _SLOT] = [running.slot for running in dispatch.batch]
    words[:, _IS_DECODING], words[:, _LIMIT] = dispatch.is_decoding, dispatch.limits
    words[:, _STEPS] = dispatch.steps
    floats[:, _TEMPERATURE] = [of_request.temperature for of_request in params]
    floats[:, _TOP_P] = [of_request.top_p for of_request in params]
    floats[:, _MIN_P] = [of_request.min_p for of_request in params]
    words[:, _TOP_K] = [min(of_request.top_k, _LARGEST) for of_request in params]
    unsigned[:, _SEED : _SEED + 2] = [seed_words(request.seed) for request in requests]
    for row, running, request in zip(words, dispatch.batch, requests, strict=True):
        row[_STOP : _STOP + len(request.stop_tokens)] = request.stop_tokens
        row[_PAGES : _PAGES + len(running.pages)] = running.pages
    return all_words


def read_batch(words: jax.Array, page_size: int) -> Batch:
    """Unpacks, inside a program, what `pack_batch` packed."""

    def floats(column: int) -> jax.Array:
        return lax.bitcast_convert_type(words[:, column], jnp.float32)

    return Batch(
        slot=words[:, _SLOT],
        is_decoding=words[:, _IS_DECODING] > 0,
        limit=words[:, _LIMIT],
        steps=words[:, _STEPS],
        page_table=PageTable(words[:, _PAGES:], page_size),
        stop_tokens=words[:, _STOP:_PAGES],
        sampling=SamplingState(
            temperature=floats(_TEMPERATURE),
            top_k=words[:, _TOP_K],
            top_p=floats(_TOP_P),
            min_p=floats(_MIN_P),
            seed=lax.bitcast_convert_type(words[:, _SEED : _SEED + 2], jnp.uint32),
        ),
    )


def empty_chunks(num_chunks: int, width: int) -> np.ndarray:
    """i32[num_chunks, words] for `read_chunks`, with no work in any chunk."""
    words = np.zeros((num_chunks, _TOKENS + width + 1), np.int32)
    words[:, _BATCH_INDEX] = _LARGEST
    return words


def pack_chunks(dispatch: Dispatch, *, num_chunks: int, width: int) -> np.ndarray:
    """i32[num_chunks, words] for `read_chunks`; the dispatch's chunks have at most `width` tokens."""
    index_of = {running: i for i, running in enumerate(dispatch.batch)}
    words = empty_chunks(num_chunks, width)
    for row, chunk in zip(words, dispatch.chunks, strict=False):
        running = chunk.running
        row[:_TOKENS:_FIELD] = (
            index_of[running],
            chunk.start,
            chunk.count,
            chunk.is_last,
            -1 if running.given_token is None else running.given_token,
            running.remaining,
        )
        # One token more than the chunk, because the drafter pairs every row with the token after it.
        tokens = running.tokens[chunk.start : chunk.start + chunk.count + 1]
        row[_TOKENS : _TOKENS + len(tokens)] = tokens
    return words


def read_chunks(words: jax.Array) -> Chunks:
    """Unpacks, inside a program, what `pack_chunks` packed."""
    tokens = words[:, _TOKENS:]
    return Chunks(
        batch_index=words[:, _BATCH_INDEX],
        tokens=tokens[:, :-1],
        next_tokens=tokens[:, 1:],
        start=words[:, _START],
        count=words[:, _COUNT],
        is_last=words[:, _IS_LAST] > 0,
        given_token=words[:, _GIVEN_TOKEN],
        remaining=words[:, _REMAINING],
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
