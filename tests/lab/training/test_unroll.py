"""The training graph sees what the real draft loop sees: same logits, row by row, step by step."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.attention import PackedMemory, PageTable, RowBlock, init_cache, join_rows
from jaxspec.config import ModelConfig, RopeConfig
from jaxspec.drafters.base import Context, Rows
from jaxspec.drafters.kinds.eagle3 import Eagle3, Eagle3Config
from jaxspec.lab.training.packed_rows import PackedRows, run_target
from jaxspec.lab.training.unroll import unroll_step
from jaxspec.models.families.llama import Llama
from jaxspec.sampling import SamplingMode, SamplingState
from jaxspec.sharding import make_mesh

STEPS, PAGE = 4, 4
TARGET = ModelConfig("llama", 40, 32, 48, 5, 4, 2, 8, tie_word_embeddings=True)


def make_head(**changes) -> Eagle3:
    layers = replace(
        TARGET, num_hidden_layers=changes.pop("num_layers", 1), layer_types=(), rope=RopeConfig(500.0)
    )
    if window := changes.pop("window", None):
        kinds = ("sliding_attention",) * layers.num_hidden_layers
        layers = replace(layers, layer_types=kinds, sliding_window=window)
    config = Eagle3Config(layers, 40, 32, (1, 2, 4), **changes)
    return Eagle3(config, num_speculative_tokens=STEPS, dtype=jnp.float32, rngs=nnx.Rngs(1))


def trained_shape_logits(head, target, rows: PackedRows) -> jax.Array:
    """[row, step, W]."""
    hidden, captured = run_target(target, rows, head.needs.capture)
    memory = PackedMemory(head.kinds, rows.positions, rows.segments)
    x, logits = head.fuse(hidden, captured), []
    for _ in range(STEPS):
        x, memory = unroll_step(head, target, rows, x, memory)
        logits.append(head.logits(target, x))
    return jnp.stack(logits, axis=1)


def drafted_logits(head, target, tokens: jax.Array) -> jax.Array:
    """[row, step, W]: the real loop, slot i drafting from row i, fed the true tokens as its drafts."""
    count = len(tokens) - 1 - STEPS
    pages = -(-len(tokens) // PAGE)
    table = PageTable(1 + jnp.arange(count * pages, dtype=jnp.int32).reshape(count, pages), PAGE)
    positions = jnp.broadcast_to(jnp.arange(count), (count, count))
    alone = PackedRows(
        *(jnp.asarray(x)[None] for x in (tokens, np.arange(len(tokens)), np.ones(len(tokens), int))), None
    )
    hidden, captured = run_target(target, alone, head.needs.capture)

    def rows_of(x):
        return join_rows([jnp.broadcast_to(x[:count], (count, count, *x.shape[1:]))])

    last = jnp.arange(count)
    rows = Rows(
        tokens=rows_of(jnp.asarray(tokens)),
        next_tokens=rows_of(jnp.asarray(tokens)[1:]),
        hidden=rows_of(hidden),
        captured=tuple(rows_of(x) for x in captured),
        blocks=(RowBlock(positions, positions <= last[:, None], table),),
    )
    cache = init_cache(
        head.cache_shapes, num_pages=1 + count * pages, page_size=PAGE, dtype=jnp.float32, mesh=make_mesh()
    )
    states, cache = head.refresh(target, rows, cache)
    start = states.reshape(count, count, -1)[last, last]
    zeros = jnp.zeros(count)
    greedy = SamplingState(
        zeros, zeros.astype(jnp.int32), zeros + 1, zeros, jnp.zeros((count, 2), jnp.uint32)
    )
    history = jnp.broadcast_to(jnp.asarray(tokens), (count, len(tokens)))
    context = Context(start, history, last + 1, jnp.ones(count, bool), table, greedy)
    state = head.start(target, context, cache, num_drafts=STEPS, mode=SamplingMode.GREEDY)
    logits = [head.logits(target, state.hidden)]
    for k in range(1, STEPS):
        true = jnp.asarray(tokens)[last + 1 + k]
        state = replace(state, tokens=state.tokens.at[:, k - 1].set(true))
        state = head.step(target, context, state, jnp.int32(k))
        logits.append(head.logits(target, state.hidden))
    return jnp.stack(logits, axis=1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True, "fc_norm": True},
        {"num_layers": 2, "norm_output": True},
        {"window": 6},
    ],
    ids=["safeailab", "normed", "two-layers", "sliding-window"],
)
def test_step_k_has_the_draft_loops_logits(changes):
    target, head = Llama(TARGET, dtype=jnp.float32, rngs=nnx.Rngs(0)), make_head(**changes)
    first, second = np.random.default_rng(0).integers(0, 40, (2, 13)).astype(np.int32)
    # Packed: another conversation goes before, padding follows.
    tokens = np.concatenate([first, second, np.zeros(3, np.int32)])
    positions = np.concatenate([np.arange(13), np.arange(13), np.zeros(3, int)])
    segments = np.repeat([1, 2, 0], [13, 13, 3])
    packed = PackedRows(*(jnp.asarray(x)[None] for x in (tokens, positions, segments, segments > 0)))
    trained = jax.jit(partial(trained_shape_logits, head, target))(packed)
    drafted = jax.jit(partial(drafted_logits, head, target))
    for begin, alone in ((0, first), (13, second)):
        real = drafted(alone)
        np.testing.assert_allclose(trained[begin : begin + len(real)], real, atol=2e-5)
