"""What the host packs for a dispatch is what the program reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import EngineConfig
from jaxspec.engine.device.plan import Plan, Size, empty_plan, pack
from jaxspec.engine.host.request import Request
from jaxspec.engine.host.scheduler import Chunk, Dispatch, Running
from jaxspec.sampling import Constraints, SamplingParams

CONFIG = EngineConfig(page_size=8, prefill_chunk=4).resolve(backend="cpu", model_limit=40)
PARAMS = SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.1)


def running(slot, prompt, *, pages, seed=0, answered=(), given_token=None):
    request = Request(
        prompt=prompt, params=PARAMS, max_new_tokens=10, stop_tokens=(7, 5), seed=seed, tokenizer=None
    )
    return Running(request, slot, pages, [*prompt, *answered], given_token)


def dispatch(batch, is_decoding, chunks=()):
    counts = [1] * len(batch)
    limits = list(range(len(batch)))
    return Dispatch(batch, is_decoding, any(is_decoding), 2, list(chunks), counts, counts, 3, limits)


def packed(dispatch, size):
    return Plan.unpack(jnp.asarray(pack(dispatch, size, CONFIG)), size, CONFIG)


def test_served_slots_and_places_without_work():
    seed = 0x0123456789ABCDEF
    batch = [running(2, [1], pages=[4, 9], seed=seed), running(0, [1], pages=[3])]
    read = packed(dispatch(batch, [True, False]), Size(4, 0, width=4))
    assert read.slot.tolist()[:2] == [2, 0]
    # Past every slot, so that whatever is put there is dropped.
    assert (np.asarray(read.slot)[2:] > 1000).all()
    assert read.is_decoding.tolist() == [True, False, False, False]
    assert read.limit.tolist() == [0, 1, 0, 0]
    # Past every number of steps, so that the least of them is that of the slots in the batch.
    assert read.steps.tolist()[:2] == [2, 2]
    assert (np.asarray(read.steps)[2:] > 1000).all()
    assert read.page_table.pages.tolist() == [[4, 9, 0, 0, 0], [3, 0, 0, 0, 0], [0] * 5, [0] * 5]
    assert read.page_table.page_size == 8
    assert read.stop_tokens[:2, :3].tolist() == [[7, 5, -1]] * 2
    assert (read.stop_tokens[2:] == -1).all()
    sampling = jax.tree.map(lambda x: x[0].tolist(), read.sampling)
    assert (sampling.top_k, sampling.seed) == (9, [0x89ABCDEF, 0x01234567])
    expected = np.float32([0.7, 0.9, 0.1]).tolist()
    assert [sampling.temperature, sampling.top_p, sampling.min_p] == expected


def test_pieces_know_the_token_after_each_of_theirs():
    fresh = running(1, list(range(10, 16)), pages=[1])
    again = running(0, [20, 21], pages=[2], answered=[22, 23], given_token=24)
    chunks = [
        Chunk(fresh, 0, 4, True, False),
        Chunk(fresh, 4, 2, False, True),
        Chunk(again, 0, 4, True, True),
    ]
    chunks = packed(dispatch([again, fresh], [False, False], chunks), Size(2, 5)).chunks
    assert chunks.index.tolist()[:3] == [1, 1, 0]
    # Past every index, so that whatever is put there is dropped.
    assert (np.asarray(chunks.index)[3:] > 1000).all()
    assert chunks.tokens[:3].tolist() == [[10, 11, 12, 13], [14, 15, 0, 0], [20, 21, 22, 23]]
    assert chunks.next_tokens[:, :3].tolist()[0] == [11, 12, 13]
    assert [int(chunks.next_tokens[0, 3]), int(chunks.next_tokens[1, 0])] == [14, 15]
    assert chunks.start.tolist() == [0, 4, 0, 0, 0]
    assert chunks.count.tolist() == [4, 2, 4, 0, 0]
    assert chunks.is_last.tolist() == [False, True, True, False, False]
    assert chunks.given_token.tolist()[:3] == [-1, -1, 24]
    # Of ten, two stand before the given one.
    assert chunks.remaining.tolist()[:3] == [10, 10, 8]


@pytest.mark.parametrize("constraints", [Constraints.NONE, Constraints.PENALTIES | Constraints.TOKENS])
@pytest.mark.parametrize("slots", [1, 3])
def test_fields_start_where_triton_expects_arrays(slots, constraints):
    """The page table of a lone short prompt started at 100 bytes, and its program failed on a GPU."""
    size = Size(slots, 1, width=4, constraints=constraints)
    traced = jax.make_jaxpr(lambda words: Plan.unpack(words, size, CONFIG))(empty_plan(size, CONFIG)).jaxpr
    slices = [each for each in traced.eqns if each.primitive.name == "slice" and each.invars == traced.invars]
    assert len(slices) == 21 + 11 * bool(constraints)
    assert all(4 * each.params["start_indices"][0] % 16 == 0 for each in slices)
