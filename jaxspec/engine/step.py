"""The device side of the engine: one step drafts, verifies, commits and refreshes, and reads prompts beside.

Drafting comes first, from the hidden state that the last refresh left, so a prompt needs no draft loop of its
own, and drafts and their distributions are temporaries of the step instead of state.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxspec_kernels.random import Purpose

from jaxspec.attention import PagedMemory, RowBlock
from jaxspec.attention.rows import join_rows
from jaxspec.drafters.base import Drafter, Proposal, Rows, Target
from jaxspec.engine.packing import read_pieces, read_served
from jaxspec.engine.state import Emitted, EngineState, FirstTokens, Pieces, Served, StepOutput
from jaxspec.sampling import SamplingMode, process_logits, sample, verify, verify_synthetic
from jaxspec.sharding import all_parts, split_over


class Models(nnx.Module):
    """The target and its drafter, the weights that every program takes."""

    def __init__(self, target: Target, drafter: Drafter):
        self.target = target
        self.drafter = drafter


@dataclass(frozen=True)
class StepSettings:
    """What is compiled into the programs.

    Attributes:
      page_size: P.
      steps_per_dispatch: S.
      synthetic_acceptance_length: see `EngineConfig`.
    """

    page_size: int
    steps_per_dispatch: int = 1
    synthetic_acceptance_length: float | None = None


def dispatch(
    models: Models,
    state: EngineState,
    served: jax.Array,
    pieces: jax.Array | None,
    *,
    settings: StepSettings,
    mode: SamplingMode | None,
) -> tuple[EngineState, StepOutput]:
    """The engine steps of one program: S of them, or one that reads prompts.

    Args:
      served: of `pack_served`: b slots.
      pieces: of `pack_pieces`: what is read of prompts; None for nothing.
      mode: how the slots sample; None where nobody decodes.

    Returns:
      The state, and what came out: `emitted` of every step, with a leading axis.
    """
    slots = read_served(served, settings.page_size)
    step = partial(engine_step, models, served=slots, settings=settings, mode=mode)
    whole, state = state, state.take(slots)
    if pieces is not None:
        state, output = step(state, pieces=read_pieces(pieces))
        emitted = jax.tree.map(lambda of_step: of_step[None], output.emitted)
        return whole.put(slots, state), replace(output, emitted=emitted)

    # Its trip count is static: one that XLA does not know would be copied to the host in every iteration.
    state, outputs = lax.scan(
        lambda state, _: step(state, pieces=None), state, length=settings.steps_per_dispatch
    )
    return whole.put(slots, state), outputs


def engine_step(
    models: Models,
    state: EngineState,
    served: Served,
    pieces: Pieces | None,
    *,
    settings: StepSettings,
    mode: SamplingMode | None,
) -> tuple[EngineState, StepOutput]:
    """Draft, verify and read, accept, commit, refresh. Without drafts, decoding rows do not refresh."""
    proposal = None
    if mode is not None:
        proposal, draft_cache = draft(models, state, served, mode=mode)
        state = replace(state, draft_cache=draft_cache)
    return verify_and_commit(models, state, served, proposal, pieces, settings=settings, mode=mode)


def draft(
    models: Models, state: EngineState, served: Served, *, mode: SamplingMode
) -> tuple[Proposal, tuple]:
    """K drafts for every slot, and the drafter's cache."""
    if models.drafter.num_speculative_tokens:
        context = state.context(served)
        return models.drafter.propose(models.target, context, state.draft_cache, mode=mode)
    none = jnp.zeros((len(state.length), 0), jnp.int32)
    return Proposal(none, jnp.zeros_like(state.length), None), state.draft_cache


def verify_and_commit(
    models: Models,
    state: EngineState,
    served: Served,
    proposal: Proposal | None,
    pieces: Pieces | None,
    *,
    settings: StepSettings,
    mode: SamplingMode | None,
) -> tuple[EngineState, StepOutput]:
    """Verifies drafts and reads prompts in one target pass, commits what stands, and refreshes the drafter.

    Args:
      proposal, mode: of the slots that decode; None for none.
      pieces: of the prompts; None for none.
    """
    target, drafter = models.target, models.drafter
    # Plain decoding leaves the drafter as it is; only what is read of prompts reaches it then.
    is_plain = proposal is not None and not proposal.tokens.shape[1]
    # Blocks of rows, and of each the rows that give tokens: all that verify, and the last of every piece.
    tokens, blocks, giving = [], [], []
    if proposal is not None:
        proposal = replace(proposal, count=jnp.minimum(proposal.count, served.limit))
        index = jnp.arange(proposal.tokens.shape[1] + 1, dtype=jnp.int32)[None, :]
        positions = state.length[:, None] + index
        valid = jnp.broadcast_to(state.active[:, None], positions.shape)
        tokens.append(jnp.concatenate([state.context(served).last_token[:, None], proposal.tokens], axis=1))
        blocks.append(RowBlock(positions, valid, served.page_table))
        giving.append(jnp.arange(positions.size, dtype=jnp.int32).reshape(positions.shape))
    if pieces is not None:
        index = jnp.arange(pieces.tokens.shape[1], dtype=jnp.int32)[None, :]
        table = jax.tree.map(lambda of_slot: _take(of_slot, pieces.place), served.page_table)
        tokens.append(pieces.tokens)
        blocks.append(RowBlock(pieces.start[:, None] + index, index < pieces.count[:, None], table))
        before = giving[0].size if giving else 0
        last = jnp.maximum(pieces.count - 1, 0)
        giving.append(before + jnp.arange(len(last), dtype=jnp.int32) * pieces.tokens.shape[1] + last)
    hidden, captured, memory = target(
        join_rows(tokens),
        join_rows(block.positions for block in blocks),
        PagedMemory.build(target.kinds, state.target_cache, tuple(blocks)),
        capture=drafter.capture,
    )
    everything = pieces is None
    logits = target.logits(
        hidden if everything else _take(hidden, jnp.concatenate([*map(jnp.ravel, giving)]))
    )

    next_tokens, ends, emitted, first = [], [], None, None
    if proposal is not None:
        judged = logits[: giving[0].size].reshape(*giving[0].shape, -1)
        if mode is not SamplingMode.GREEDY:
            judged, proposal = _whole_rows(judged, proposal, models)
        emitted, accepted = accept(
            judged,
            state,
            served,
            proposal,
            drafter,
            settings=settings,
            mode=mode,
            vocab_size=target.config.vocab_size,
        )
        valid = state.active[:, None] & (jnp.arange(judged.shape[1]) <= accepted[:, None]) & (not is_plain)
        blocks[0] = replace(blocks[0], valid=valid)
        next_tokens.append(emitted.tokens)
        ends.append(jnp.take_along_axis(giving[0], accepted[:, None], axis=1)[:, 0])
    if pieces is not None:
        last_rows = logits[-len(pieces.place) :]
        axis = split_over(last_rows.shape[-1], target.config.vocab_size)
        first = sample_first(all_parts(last_rows, axis), served, pieces)
        is_end = pieces.is_last[:, None] & (index == last[:, None])
        next_tokens.append(jnp.where(is_end, first.token[:, None], pieces.next_tokens))
        ends.append(giving[-1])
    state = replace(state, target_cache=memory.caches)
    if pieces is not None or not is_plain:
        rows = Rows(join_rows(tokens), join_rows(next_tokens), hidden, captured, tuple(blocks))
        draft_hidden, draft_cache = drafter.refresh(target, rows, state.draft_cache)
        state = replace(state, draft_cache=draft_cache)
    if emitted is not None:
        state = commit_emitted(state, emitted, state.hidden if is_plain else _take(draft_hidden, ends[0]))
    if pieces is not None and first is not None:
        state = commit_pieces(state, pieces, first, _take(draft_hidden, ends[-1]))
    return state, StepOutput(emitted, first)


def accept(
    logits: jax.Array,
    state: EngineState,
    served: Served,
    proposal: Proposal,
    drafter: Drafter,
    *,
    settings: StepSettings,
    mode: SamplingMode | None,
    vocab_size: int,
) -> tuple[Emitted, jax.Array]:
    """Judges the drafts by the target's logits [b, K+1, V]: what is emitted, and drafts accepted i32[b].

    In `GREEDY` the logits may be this device's part of V, `vocab_size`.
    """
    assert mode is not None
    drafts = proposal.tokens
    index = jnp.arange(drafts.shape[1] + 1, dtype=jnp.int32)[None, :]
    judge = verify
    if settings.synthetic_acceptance_length is not None and drafts.shape[1]:
        length = min(settings.synthetic_acceptance_length, drafts.shape[1] + 1)
        judge = partial(verify_synthetic, mean_acceptance_length=length)
    verdict = judge(
        logits,
        drafts,
        proposal.count,
        proposal.logits,
        drafter.draft_vocab,
        served.sampling,
        state.length[:, None] + index,
        mode=mode,
        vocab_size=vocab_size,
    )
    accepted = verdict.accepted
    # e_0..e_{a-1} are the accepted drafts, e_a is the recovered or bonus token.
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    tokens = jnp.where(index < accepted[:, None], padded, verdict.token[:, None])
    is_stop = (tokens[:, :, None] == served.stop_tokens[:, None, :]).any(axis=2)
    is_stop &= index <= accepted[:, None]
    up_to_stop = jnp.where(is_stop.any(axis=1), is_stop.argmax(axis=1) + 1, accepted + 1)
    wanted = jnp.minimum(up_to_stop, state.remaining).astype(jnp.int32)
    # Row i gives token i, so what comes before the first row of NaN still stands.
    finite = finite_rows(logits, split_over(logits.shape[-1], vocab_size))
    sound = jnp.where(finite.all(axis=1), wanted, finite.argmin(axis=1)).astype(jnp.int32)
    failed = state.active & (sound < wanted)
    count = jnp.where(state.active, jnp.minimum(wanted, sound), 0)
    stopped = jnp.take_along_axis(is_stop, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
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


def _whole_rows(logits: jax.Array, proposal: Proposal, models: Models) -> tuple[jax.Array, Proposal]:
    """The target's logits [b, K+1, V] and the drafts' with the parts of all devices.

    Greedy decoding asks for no more than maxima. Sampling sums over the vocabulary several times, and sums of
    whole rows round as on one device: every device gets the few rows and computes the same.
    """
    vocab_size, draft_vocab = models.target.config.vocab_size, models.drafter.draft_vocab
    logits = all_parts(logits, split_over(logits.shape[-1], vocab_size))
    if proposal.logits is None:
        return logits, proposal
    width = vocab_size if draft_vocab is None else draft_vocab.target_ids.size
    drawn_from = all_parts(proposal.logits, split_over(proposal.logits.shape[-1], width))
    return logits, replace(proposal, logits=drawn_from)


def sample_first(logits: jax.Array, served: Served, pieces: Pieces) -> FirstTokens:
    """The token after every piece, by the logits [G, V] of its last row; it counts where a prompt ends."""
    sampling = jax.tree.map(lambda of_slot: _take(of_slot, pieces.place), served.sampling)
    stop_tokens = _take(served.stop_tokens, pieces.place)
    last_position = pieces.start + jnp.maximum(pieces.count - 1, 0)
    failed = pieces.is_last & ~finite_rows(logits)
    # A row or two of a whole prompt: a program per mode would not pay.
    processed = process_logits(logits[:, None], sampling, mode=SamplingMode.TRUNCATED)[:, 0]
    token = sample(processed, sampling, last_position, Purpose.BONUS)
    token = jnp.where(pieces.known < 0, token, pieces.known)
    done = (token[:, None] == stop_tokens).any(axis=1) | (pieces.remaining <= 1) | failed
    return FirstTokens(token, done & pieces.is_last, failed)


def commit_emitted(state: EngineState, emitted: Emitted, hidden: jax.Array) -> EngineState:
    """Moves the slots on by what they emitted; `hidden` [b, M'] is what they draft from next."""
    count = emitted.num_tokens
    index = jnp.arange(emitted.tokens.shape[1], dtype=jnp.int32)[None, :]
    at = jnp.where(index < count[:, None], state.length[:, None] + index + 1, state.history.shape[1])
    places = jnp.arange(len(count))[:, None]
    return replace(
        state,
        history=state.history.at[places, at].set(emitted.tokens, mode="drop"),
        length=state.length + count,
        hidden=jnp.where(state.active[:, None], hidden, state.hidden),
        remaining=state.remaining - count,
        active=state.active & ~emitted.done,
    )


def commit_pieces(state: EngineState, pieces: Pieces, first: FirstTokens, hidden: jax.Array) -> EngineState:
    """Puts pieces into the history, and starts the slots whose prompts end; `hidden` is [G, M']."""
    past = state.history.shape[1]
    index = jnp.arange(pieces.tokens.shape[1], dtype=jnp.int32)[None, :]
    at = jnp.where(index < pieces.count[:, None], pieces.start[:, None] + index, past)
    history = state.history.at[pieces.place[:, None], at].set(pieces.tokens, mode="drop")
    end = pieces.start + pieces.count
    # Past the end, so dropped, unless the prompt ends: then the slot has one such piece.
    ended = jnp.where(pieces.is_last, pieces.place, len(state.length))

    def put(into: jax.Array, of_piece: jax.Array) -> jax.Array:
        return into.at[ended].set(of_piece, mode="drop")

    return replace(
        state,
        history=history.at[ended, jnp.where(pieces.is_last, end, past)].set(first.token, mode="drop"),
        length=put(state.length, end),
        hidden=put(state.hidden, hidden),
        remaining=put(state.remaining, pieces.remaining - 1),
        active=put(state.active, ~first.done),
    )


def finite_rows(logits: jax.Array, axis: str | None = None) -> jax.Array:
    """bool[...] of logits [..., V]: none is NaN or +inf, and not all are -inf; `axis` as for `all_parts`."""
    best = logits.max(axis=-1)
    return jnp.isfinite(best if axis is None else all_parts(best[..., None], axis).max(axis=-1))


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(x, index, axis=0, mode="clip")
