"""Chunks of prompt, packed into the arguments of one prefill program."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Sharding

from jaxspec.attention import PageTable
from jaxspec.engine.scheduler import Chunk
from jaxspec.engine.state import MAX_STOP_TOKENS, EngineState, PrefillBatch
from jaxspec.sampling import SamplingState, seed_words


def pack_prefill(
    chunks: Sequence[Chunk], state: EngineState, *, rows: int, width: int, whole: Sharding
) -> PrefillBatch:
    """Packs at most `rows` chunks of at most `width` tokens; rows left over name a slot past the end."""
    num_slots, table_width = state.page_table.pages.shape
    tokens = np.zeros((rows, width + 1), np.int32)
    arrays = {
        "slot": np.full(rows, num_slots, np.int32),
        "start": np.zeros(rows, np.int32),
        "count": np.zeros(rows, np.int32),
        "is_last": np.zeros(rows, bool),
        "known": np.full(rows, -1, np.int32),
        "pages": np.zeros((rows, table_width), np.int32),
        "remaining": np.zeros(rows, np.int32),
        "stop_tokens": np.full((rows, MAX_STOP_TOKENS), -1, np.int32),
    }
    sampling = {
        "temperature": np.zeros(rows, np.float32),
        "top_k": np.zeros(rows, np.int32),
        "top_p": np.ones(rows, np.float32),
        "min_p": np.zeros(rows, np.float32),
        "seed": np.zeros((rows, 2), np.uint32),
    }
    for row, chunk in enumerate(chunks):
        running, request = chunk.running, chunk.running.request
        # One token more than the chunk: the drafter pairs every row with the token after it.
        piece = running.tokens[chunk.start : chunk.start + chunk.count + 1]
        tokens[row, : len(piece)] = piece
        arrays["slot"][row] = running.slot
        arrays["start"][row] = chunk.start
        arrays["count"][row] = chunk.count
        arrays["is_last"][row] = chunk.is_last
        arrays["pages"][row, : len(running.pages)] = running.pages
        arrays["known"][row] = -1 if running.known is None else running.known
        arrays["remaining"][row] = running.remaining
        arrays["stop_tokens"][row, : len(request.stop_tokens)] = request.stop_tokens
        for name in ("temperature", "top_p", "min_p"):
            sampling[name][row] = getattr(request.params, name)
        sampling["top_k"][row] = min(request.params.top_k, np.iinfo(np.int32).max)
        sampling["seed"][row] = seed_words(request.seed)
    arrays |= {"tokens": tokens[:, :-1], "next_tokens": tokens[:, 1:]}
    placed, placed_sampling = jax.device_put((arrays, sampling), whole)
    page_table = PageTable(placed.pop("pages"), state.page_table.page_size)
    return PrefillBatch(**placed, page_table=page_table, sampling=SamplingState(**placed_sampling))
