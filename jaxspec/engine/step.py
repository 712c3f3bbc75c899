"""The device side of the engine: prefill, and the step that drafts, verifies and commits.

One step is draft -> verify -> accept -> commit -> refresh. Drafting comes first, from the hidden state
that the last refresh left, so prefill needs no draft loop of its own and the drafts and their
distributions are temporaries of the step instead of state.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxspec_kernels.random import Purpose

from jaxspec.attention import PagedMemory, RowBlock
from jaxspec.drafters.base import Drafter, Proposal, Rows, Target
from jaxspec.engine.state import EngineState, PrefillBatch, PrefillOutput, StepOutput
from jaxspec.sampling import SamplingMode, process_logits, sample, verify, verify_synthetic


class Models(nnx.Module):
    """The target and its drafter, the weights that every program takes."""

    def __init__(self, target: Target, drafter: Drafter):
        self.target = target
        self.drafter = drafter


@dataclass(frozen=True)
class StepSettings:
    """What is compiled into the programs.

    Attributes:
      steps_per_dispatch: S.
      synthetic_acceptance_length: see `EngineConfig`.
    """

    steps_per_dispatch: int = 1
    synthetic_acceptance_length: float | None = None


def prefill(
    models: Models, state: EngineState, batch: PrefillBatch, *, settings: StepSettings
) -> tuple[EngineState, PrefillOutput]:
    """Runs a chunk of prompt tokens; where it ends a prompt, samples the first token and starts the slot."""
    target, drafter = models.target, models.drafter
    index = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None, :]
    positions = batch.start[:, None] + index
    valid = index < batch.count[:, None]
    last_row = jnp.maximum(batch.count - 1, 0)
    block = RowBlock(positions, valid, batch.page_table)
    hidden, captured, memory = target(
        batch.tokens.reshape(-1),
        positions.reshape(-1),
        PagedMemory.build(target.kinds, state.target_cache, (block,)),
        capture=drafter.capture,
    )
    logits = target.logits(_row_of_each(hidden, block, last_row))[:, None]
    failed = batch.is_last & ~finite_rows(logits)[:, 0]
    # One row of a whole prompt: a program per mode would not pay.
    logits = process_logits(logits, batch.sampling, mode=SamplingMode.TRUNCATED)[:, 0]
    token = sample(logits, batch.sampling, batch.start + last_row, Purpose.BONUS)
    token = jnp.where(batch.known < 0, token, batch.known)

    is_end = batch.is_last[:, None] & (index == last_row[:, None])
    next_tokens = jnp.where(is_end, token[:, None], batch.next_tokens)
    rows = Rows(batch.tokens.reshape(-1), next_tokens.reshape(-1), hidden, captured, (block,))
    draft_hidden, draft_cache = drafter.refresh(target, rows, state.draft_cache)

    done = (token[:, None] == batch.stop_tokens).any(axis=1) | (batch.remaining <= 1) | failed
    end = batch.start + batch.count
    slot = batch.slot
    # Rows without work name slot B: past the end, so dropped. (An index of -1 would write the last slot.)
    history_at = jnp.where(valid, positions, state.history.shape[1])
    history = state.history.at[slot[:, None], history_at].set(batch.tokens, mode="drop")
    first_at = jnp.where(batch.is_last, end, state.history.shape[1])

    def put(into: jax.Array, rows: jax.Array) -> jax.Array:
        return into.at[slot].set(rows, mode="drop")

    state = replace(
        state,
        target_cache=memory.caches,
        draft_cache=draft_cache,
        page_table=jax.tree.map(put, state.page_table, batch.page_table),
        history=history.at[slot, first_at].set(token, mode="drop"),
        length=put(state.length, end),
        hidden=put(state.hidden, _row_of_each(draft_hidden, block, last_row)),
        remaining=put(state.remaining, batch.remaining - 1),
        active=put(state.active, batch.is_last & ~done),
        stop_tokens=put(state.stop_tokens, batch.stop_tokens),
        sampling=jax.tree.map(put, state.sampling, batch.sampling),
    )
    return state, PrefillOutput(token, done & batch.is_last, failed)


def verify_and_commit(
    models: Models, state: EngineState, proposal: Proposal, *, settings: StepSettings, mode: SamplingMode
) -> tuple[EngineState, StepOutput]:
    """Verifies K drafts per slot in one target pass, commits what stands, and refreshes the drafter."""
    target, drafter = models.target, models.drafter
    drafts = proposal.tokens
    index = jnp.arange(drafts.shape[1] + 1, dtype=jnp.int32)[None, :]
    tokens = jnp.concatenate([state.context.last_token[:, None], drafts], axis=1)
    positions = state.length[:, None] + index
    valid = jnp.broadcast_to(state.active[:, None], positions.shape)
    block = RowBlock(positions, valid, state.page_table)
    hidden, captured, memory = target(
        tokens.reshape(-1),
        positions.reshape(-1),
        PagedMemory.build(target.kinds, state.target_cache, (block,)),
        capture=drafter.capture,
    )
    logits = target.logits(hidden).reshape(*tokens.shape, -1)
    if settings.synthetic_acceptance_length is None:
        verdict = verify(
            logits,
            drafts,
            proposal.count,
            proposal.logits,
            drafter.draft_vocab,
            state.sampling,
            positions,
            mode=mode,
        )
    else:
        verdict = verify_synthetic(
            logits,
            drafts,
            proposal.count,
            proposal.logits,
            drafter.draft_vocab,
            state.sampling,
            positions,
            mode=mode,
            mean_acceptance_length=settings.synthetic_acceptance_length,
        )
    accepted = verdict.accepted

    # e_0..e_{a-1} are the accepted drafts, e_a is the recovered or bonus token.
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    emitted = jnp.where(index < accepted[:, None], padded, verdict.token[:, None])
    is_stop = (emitted[:, :, None] == state.stop_tokens[:, None, :]).any(axis=2)
    is_stop &= index <= accepted[:, None]
    up_to_stop = jnp.where(is_stop.any(axis=1), is_stop.argmax(axis=1) + 1, accepted + 1)
    wanted = jnp.minimum(up_to_stop, state.remaining).astype(jnp.int32)
    # Row i gives token i, so what comes before the first row of NaN still stands.
    finite = finite_rows(logits)
    sound = jnp.where(finite.all(axis=1), wanted, finite.argmin(axis=1)).astype(jnp.int32)
    failed = state.active & (sound < wanted)
    count = jnp.where(state.active, jnp.minimum(wanted, sound), 0)
    stopped = jnp.take_along_axis(is_stop, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    done = state.active & (stopped | (count >= state.remaining) | failed)

    block = replace(block, valid=state.active[:, None] & (index <= accepted[:, None]))
    rows = Rows(tokens.reshape(-1), emitted.reshape(-1), hidden, captured, (block,))
    draft_hidden, draft_cache = drafter.refresh(target, rows, state.draft_cache)

    slots = jnp.arange(drafts.shape[0])[:, None]
    history_at = jnp.where(index < count[:, None], positions + 1, state.history.shape[1])
    state = replace(
        state,
        target_cache=memory.caches,
        draft_cache=draft_cache,
        history=state.history.at[slots, history_at].set(emitted, mode="drop"),
        length=state.length + count,
        hidden=jnp.where(state.active[:, None], _row_of_each(draft_hidden, block, accepted), state.hidden),
        remaining=state.remaining - count,
        active=state.active & ~done,
    )
    ran = count > 0
    return state, StepOutput(
        tokens=emitted,
        num_tokens=count,
        drafted=jnp.where(ran, proposal.count, 0),
        accepted=jnp.where(ran, accepted, 0),
        done=done,
        failed=failed,
    )


def finite_rows(logits: jax.Array) -> jax.Array:
    """bool[B, Q] of logits [B, Q, V]: none is NaN or +inf, and not all are -inf."""
    return jnp.isfinite(logits.max(axis=-1))


def _row_of_each(x: jax.Array, block: RowBlock, row: jax.Array) -> jax.Array:
    """[G, M] of x [N, M], the rows of one block: of each group the one at `row` i32[G]."""
    groups, width = block.shape
    return jnp.take(x, jnp.arange(groups, dtype=jnp.int32) * width + row, axis=0, mode="clip")


def engine_step(
    models: Models, state: EngineState, *, settings: StepSettings, mode: SamplingMode
) -> tuple[EngineState, StepOutput]:
    """Draft, verify, accept, commit, refresh."""
    proposal, draft_cache = models.drafter.propose(models.target, state.context, state.draft_cache, mode=mode)
    state = replace(state, draft_cache=draft_cache)
    return verify_and_commit(models, state, proposal, settings=settings, mode=mode)


def decode(
    models: Models, state: EngineState, live: jax.Array, *, settings: StepSettings, mode: SamplingMode
) -> tuple[EngineState, StepOutput]:
    """`steps_per_dispatch` engine steps in one program.

    Args:
      live: bool[B], False for slots whose request the host has ended.

    Returns:
      The state, and the steps' outputs stacked on a leading axis S.
    """
    state = replace(state, active=state.active & live)
    _, shapes = jax.eval_shape(lambda: engine_step(models, state, settings=settings, mode=mode))
    outputs = jax.tree.map(lambda s: jnp.zeros((settings.steps_per_dispatch, *s.shape), s.dtype), shapes)

    def body(i, carry):
        state, outputs = carry
        state, output = engine_step(models, state, settings=settings, mode=mode)
        outputs = jax.tree.map(
            lambda all_, one: lax.dynamic_update_index_in_dim(all_, one, i, 0), outputs, output
        )
        return state, outputs

    return lax.fori_loop(0, settings.steps_per_dispatch, body, (state, outputs))
