"""The device side of the engine: a step drafts, verifies, commits and refreshes; it may read prompts too.

Drafting comes first, from the hidden state that the last refresh left. So a prompt needs no draft loop of its
own, and drafts and their distributions are temporaries of the step instead of state.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxspec_kernels.argmax import row_max
from jaxspec_kernels.random import Purpose

from jaxspec.attention import PagedMemory, RowBlock, join_rows, output_rows, take_rows
from jaxspec.config import ResolvedEngineConfig
from jaxspec.drafters.base import Drafter, Proposal, Rows, Target
from jaxspec.drafters.checks import check_rows, checked_proposal, checked_refresh
from jaxspec.engine.device.plan import read_batch, read_chunks
from jaxspec.engine.device.state import Batch, Chunks, Emitted, EngineState, FirstTokens, StepOutput, put_rows
from jaxspec.sampling import SamplingMode, can_branch, process_logits, sample, verify, verify_synthetic
from jaxspec.sharding import all_gather, split_over


class Models(nnx.Module):
    """The target and its drafter; their weights are an argument of every program."""

    def __init__(self, target: Target, drafter: Drafter):
        self.target = target
        self.drafter = drafter


def dispatch(
    models: Models,
    state: EngineState,
    batch: jax.Array,
    chunks: jax.Array | None,
    *,
    config: ResolvedEngineConfig,
    mode: SamplingMode | None,
) -> tuple[EngineState, StepOutput]:
    """The engine steps of one program: up to S that decode, or a single one that only reads prompts.

    The first step may read prompts too; a slot whose prompt ends in it decodes in the others. Where programs
    may branch, steps past `Batch.steps` are left out, and those after the end of all slots.

    Args:
      state: of all B slots.
      batch: i32[b, …] of `pack_batch`, the b slots to serve.
      chunks: i32[G, …] of `pack_chunks`, the chunks of prompts to read; None for none.
      config: gives the page size, S and the synthetic acceptance length.
      mode: how the slots sample; None if no slot decodes.

    Returns:
      The state, and the output; its `emitted` has a leading axis of S steps.
    """
    slots = read_batch(batch, config.page_size)
    step = partial(engine_step, models, batch=slots, config=config, mode=mode)
    all_slots, state = state, state.gather(slots)
    first, outputs, num_steps = None, [], 0 if mode is None else config.steps_per_dispatch
    if chunks is not None:
        state, output = step(state, chunks=read_chunks(chunks))
        first, num_steps = output.first, num_steps - 1
        outputs.append(jax.tree.map(lambda of_step: of_step[None], output.emitted))
    if num_steps > 0:
        if can_branch():
            left = jnp.minimum(slots.steps.min() - len(outputs), num_steps)
            state, decoded = _decode_while_active(models, step, state, slots, num_steps, left)
            outputs.append(decoded)
        else:
            # A trip count that XLA does not know would be copied to the host in every iteration.
            state, output = lax.scan(lambda state, _: step(state, chunks=None), state, length=num_steps)
            outputs.append(output.emitted)
    emitted = jax.tree.map(lambda *of_steps: jnp.concatenate(of_steps), *outputs)
    return all_slots.scatter(slots, state), StepOutput(emitted, first)


def _decode_while_active(
    models: Models, step: Callable, state: EngineState, batch: Batch, max_steps: int, wanted: jax.Array
) -> tuple[EngineState, Emitted]:
    """Decodes `wanted` of `max_steps` steps, and stops when no slot is left; the others emit nothing."""
    # A dispatch without requests is there to be timed.
    is_timed = ~batch.is_decoding.any()

    def is_unfinished(carry: tuple) -> jax.Array:
        i, state, _ = carry
        return (i < wanted) & (state.active.any() | is_timed)

    def body(carry: tuple) -> tuple:
        i, state, emitted = carry
        state, output = step(state, chunks=None)
        put = partial(lax.dynamic_update_index_in_dim, index=i, axis=0, allow_negative_indices=False)
        return i + 1, state, jax.tree.map(put, emitted, output.emitted)

    none = Emitted.none(max_steps, len(state.length), models.drafter.num_speculative_tokens)
    _, state, emitted = lax.while_loop(is_unfinished, body, (jnp.int32(0), state, none))
    return state, emitted


def engine_step(
    models: Models,
    state: EngineState,
    batch: Batch,
    chunks: Chunks | None,
    *,
    config: ResolvedEngineConfig,
    mode: SamplingMode | None,
) -> tuple[EngineState, StepOutput]:
    """One step: draft, verify and read prompts, accept, commit, refresh.

    With K = 0 the decoding rows are not refreshed.

    Args:
      state: of the b slots of the batch.
      batch, chunks, config, mode: as in `dispatch`, unpacked.
    """
    proposal = None
    if mode is not None:
        proposal, draft_cache = draft(models, state, batch, mode=mode)
        state = replace(state, draft_cache=draft_cache)
    return verify_and_commit(models, state, batch, proposal, chunks, config=config, mode=mode)


def draft(models: Models, state: EngineState, batch: Batch, *, mode: SamplingMode) -> tuple[Proposal, tuple]:
    """K drafts for each of the b slots, and the drafter's cache."""
    if models.drafter.num_speculative_tokens:
        context = state.context(batch)
        target, drafter, cache = models.target, models.drafter, state.draft_cache
        proposed = drafter.propose(target, context, cache, mode=mode)
        return checked_proposal(drafter, target, context, cache, proposed)
    none = jnp.zeros((len(state.length), 0), jnp.int32)
    return Proposal(none, jnp.zeros_like(state.length), None), state.draft_cache


def verify_and_commit(
    models: Models,
    state: EngineState,
    batch: Batch,
    proposal: Proposal | None,
    chunks: Chunks | None,
    *,
    config: ResolvedEngineConfig,
    mode: SamplingMode | None,
) -> tuple[EngineState, StepOutput]:
    """Verifies drafts and reads prompts in one target pass, commits the results and refreshes the drafter.

    Args:
      proposal: the drafts; None if no slot decodes.
      chunks: the chunks of prompts to read; None for none.
      config: gives the synthetic acceptance length.
      mode: how the slots sample; None if no slot decodes.
    """
    target, drafter = models.target, models.drafter
    # Plain decoding leaves the drafter as it is: then only the prompts' rows refresh it.
    is_plain = proposal is not None and not proposal.tokens.shape[1]
    # Of a block that verifies, the logits of every row are needed; of a chunk, only those of its last row.
    tokens, blocks = [], []
    if proposal is not None:
        proposal = replace(proposal, count=jnp.minimum(proposal.count, batch.limit))
        index = jnp.arange(proposal.tokens.shape[1] + 1, dtype=jnp.int32)[None, :]
        positions = state.length[:, None] + index
        valid = jnp.broadcast_to(state.active[:, None], positions.shape)
        tokens.append(jnp.concatenate([state.context(batch).last_token[:, None], proposal.tokens], axis=1))
        blocks.append(RowBlock(positions, valid, batch.page_table))
    if chunks is not None:
        index = jnp.arange(chunks.tokens.shape[1], dtype=jnp.int32)[None, :]
        table = jax.tree.map(lambda of_slot: _take(of_slot, chunks.batch_index), batch.page_table)
        tokens.append(chunks.tokens)
        last = jnp.maximum(chunks.count - 1, 0)
        blocks.append(RowBlock(chunks.start[:, None] + index, index < chunks.count[:, None], table, last))
    reads_last_layer = drafter.reads_hidden or len(target.kinds) in drafter.capture
    run = [replace(block, output=None) if reads_last_layer else block for block in blocks]
    hidden, captured, memory = target(
        join_rows(tokens),
        join_rows(block.positions for block in blocks),
        PagedMemory.build(target.kinds, state.target_cache, tuple(run)),
        capture=drafter.capture,
    )
    check_rows(hidden, run, type(target).__name__)
    rows = take_rows(hidden, output_rows(tuple(blocks))) if reads_last_layer else hidden
    # Where programs may branch, a pass that only reads prompts computes logits only if one of them ends.
    logits = None if proposal is None and can_branch() else target.logits(rows)

    next_tokens, emitted, first = [], None, None
    if proposal is not None and logits is not None:
        groups, width = blocks[0].shape
        verify_logits = logits[: groups * width].reshape(groups, width, -1)
        if mode is not SamplingMode.GREEDY:
            verify_logits, proposal = _whole_rows(verify_logits, proposal, models)
        emitted, accepted = accept(
            verify_logits,
            state,
            batch,
            proposal,
            drafter,
            config=config,
            mode=mode,
            vocab_size=target.config.vocab_size,
        )
        valid = state.active[:, None] & (jnp.arange(width) <= accepted[:, None]) & (not is_plain)
        blocks[0] = replace(blocks[0], valid=valid, output=accepted)
        next_tokens.append(emitted.tokens)
    if chunks is not None:
        num_chunks = len(chunks.batch_index)

        def first_tokens(last_rows: jax.Array) -> FirstTokens:
            axis = split_over(last_rows.shape[-1], target.config.vocab_size)
            return sample_first(all_gather(last_rows, axis), batch, chunks)

        if logits is not None:
            first = first_tokens(logits[-num_chunks:])
        else:
            first = lax.cond(
                chunks.is_last.any(),
                lambda: first_tokens(target.logits(rows)),
                lambda: FirstTokens.none(num_chunks),
            )
        is_end = chunks.is_last[:, None] & (index == last[:, None])
        next_tokens.append(jnp.where(is_end, first.token[:, None], chunks.next_tokens))
    state = replace(state, target_cache=memory.caches)
    if chunks is not None or not is_plain:
        features = hidden if drafter.reads_hidden else None
        read = Rows(join_rows(tokens), join_rows(next_tokens), features, captured, tuple(blocks))
        draft_hidden, state = refresh(models, state, read)
    if emitted is not None:
        hidden = state.hidden if is_plain else draft_hidden[: len(state.length)]
        state = commit_emitted(state, emitted, hidden)
    if chunks is not None and first is not None:
        state = commit_chunks(state, chunks, first, draft_hidden[-len(chunks.batch_index) :])
    return state, StepOutput(emitted, first)


def accept(
    logits: jax.Array,
    state: EngineState,
    batch: Batch,
    proposal: Proposal,
    drafter: Drafter,
    *,
    config: ResolvedEngineConfig,
    mode: SamplingMode | None,
    vocab_size: int,
) -> tuple[Emitted, jax.Array]:
    """Accepts or rejects the drafts by the target's logits.

    Args:
      logits: [b, K+1, V]; with `GREEDY`, V may be this device's part of the vocabulary.
      config: gives the synthetic acceptance length.
      vocab_size: V over all devices.

    Returns:
      What is emitted, and the number of accepted drafts, i32[b].
    """
    assert mode is not None
    drafts = proposal.tokens
    index = jnp.arange(drafts.shape[1] + 1, dtype=jnp.int32)[None, :]
    verify_drafts = verify
    if config.synthetic_acceptance_length is not None and drafts.shape[1]:
        length = min(config.synthetic_acceptance_length, drafts.shape[1] + 1)
        verify_drafts = partial(verify_synthetic, mean_acceptance_length=length)
    verdict = verify_drafts(
        logits,
        drafts,
        proposal.count,
        proposal.logits,
        drafter.draft_vocab,
        batch.sampling,
        state.length[:, None] + index,
        mode=mode,
        vocab_size=vocab_size,
    )
    accepted = verdict.accepted
    # e_0..e_{a-1} are the accepted drafts, e_a is the recovered or bonus token.
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    tokens = jnp.where(index < accepted[:, None], padded, verdict.token[:, None])
    is_stop = (tokens[:, :, None] == batch.stop_tokens[:, None, :]).any(axis=2)
    is_stop &= index <= accepted[:, None]
    up_to_stop = jnp.where(is_stop, index + 1, accepted[:, None] + 1).min(axis=1)
    wanted = jnp.minimum(up_to_stop, state.remaining)
    # Row i gives token i, so the tokens before the first row that is not finite are still valid.
    finite = finite_rows(logits, split_over(logits.shape[-1], vocab_size))
    sound = jnp.where(finite, wanted[:, None], index).min(axis=1)
    failed = state.active & (sound < wanted)
    count = jnp.where(state.active, jnp.minimum(wanted, sound), 0)
    stopped = (is_stop & (index == count[:, None] - 1)).any(axis=1)
    ran = count > 0
    emitted = Emitted(
        tokens=tokens,
        num_tokens=count,
        drafted=jnp.where(ran, proposal.count, 0),
        accepted=jnp.where(ran, accepted, 0),
        done=state.active & (stopped | (count >= state.remaining) | failed),
        failed=failed,
    )
    return emitted, accepted


def refresh(models: Models, state: EngineState, rows: Rows) -> tuple[jax.Array, EngineState]:
    """The state [N', M'] that each group of rows may go on drafting from, and the engine's state."""
    drafter, cache = models.drafter, state.draft_cache
    hidden, cache = checked_refresh(drafter, rows, cache, drafter.refresh(models.target, rows, cache))
    return hidden.astype(state.hidden.dtype), replace(state, draft_cache=cache)


def _whole_rows(logits: jax.Array, proposal: Proposal, models: Models) -> tuple[jax.Array, Proposal]:
    """Gathers the target's logits [b, K+1, V] and the drafts' logits from all devices.

    Greedy decoding needs only maxima. Sampling sums over the vocabulary several times. With whole rows on
    every device, these sums round as they do on a single device.
    """
    vocab_size, draft_vocab = models.target.config.vocab_size, models.drafter.draft_vocab
    logits = all_gather(logits, split_over(logits.shape[-1], vocab_size))
    if proposal.logits is None:
        return logits, proposal
    width = vocab_size if draft_vocab is None else draft_vocab.target_ids.size
    drawn_from = all_gather(proposal.logits, split_over(proposal.logits.shape[-1], width))
    return logits, replace(proposal, logits=drawn_from)


def sample_first(logits: jax.Array, batch: Batch, chunks: Chunks) -> FirstTokens:
    """The token after every chunk, from the logits [G, V] of its last row; used only where a prompt ends."""
    sampling = jax.tree.map(lambda of_slot: _take(of_slot, chunks.batch_index), batch.sampling)
    stop_tokens = _take(batch.stop_tokens, chunks.batch_index)
    last_position = chunks.start + jnp.maximum(chunks.count - 1, 0)
    failed = chunks.is_last & ~finite_rows(logits)
    # One row per prompt costs little, so there are no programs for simpler sampling modes.
    processed = process_logits(logits[:, None], sampling, mode=SamplingMode.TRUNCATED)[:, 0]
    token = sample(processed, sampling, last_position, Purpose.BONUS)
    token = jnp.where(chunks.given_token < 0, token, chunks.given_token)
    done = (token[:, None] == stop_tokens).any(axis=1) | (chunks.remaining <= 1) | failed
    return FirstTokens(token, done & chunks.is_last, failed)


def commit_emitted(state: EngineState, emitted: Emitted, hidden: jax.Array) -> EngineState:
    """Advances the slots by the tokens they emitted; `hidden` [b, M'] is the state they draft from next."""
    count = emitted.num_tokens
    index = jnp.arange(emitted.tokens.shape[1], dtype=jnp.int32)[None, :]
    at = jnp.where(index < count[:, None], state.length[:, None] + index + 1, state.history.shape[1])
    places = jnp.arange(len(count))[:, None]
    return replace(
        state,
        history=put_rows(state.history, (places, at), emitted.tokens),
        length=state.length + count,
        hidden=jnp.where(state.active[:, None], hidden, state.hidden),
        remaining=state.remaining - count,
        active=state.active & ~emitted.done,
    )


def commit_chunks(state: EngineState, chunks: Chunks, first: FirstTokens, hidden: jax.Array) -> EngineState:
    """Puts the chunks' tokens into the history and starts the slots whose prompts end.

    Args:
      hidden: [G, M'], the drafter's state behind each chunk's last token.
    """
    past = state.history.shape[1]
    index = jnp.arange(chunks.tokens.shape[1], dtype=jnp.int32)[None, :]
    at = jnp.where(index < chunks.count[:, None], chunks.start[:, None] + index, past)
    history = put_rows(state.history, (chunks.batch_index[:, None], at), chunks.tokens)
    end = chunks.start + chunks.count
    # An index past the end is dropped. At most one chunk per slot ends a prompt, so none is written twice.
    ended = jnp.where(chunks.is_last, chunks.batch_index, len(state.length))

    def put(into: jax.Array, of_chunk: jax.Array) -> jax.Array:
        return put_rows(into, ended, of_chunk)

    return replace(
        state,
        history=put_rows(history, (ended, jnp.where(chunks.is_last, end, past)), first.token),
        length=put(state.length, end),
        hidden=put(state.hidden, hidden),
        remaining=put(state.remaining, chunks.remaining - 1),
        active=put(state.active, ~first.done),
    )


def finite_rows(logits: jax.Array, axis: str | None = None) -> jax.Array:
    """bool[...] for logits [..., V]: whether none is NaN or +inf and not all are -inf.

    Args:
      axis: the mesh axis that V is split over, as for `all_gather`; None if V is whole.
    """
    best = row_max(logits)
    return jnp.isfinite(best if axis is None else row_max(all_gather(best[..., None], axis)))


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(x, index, axis=0, mode="clip")
