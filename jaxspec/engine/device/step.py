"""The device side of the engine: a step drafts, verifies, accepts, refreshes and commits.

Its target pass may read chunks of prompts too. Drafting comes first, from the hidden state that the last
refresh left. So a prompt needs no draft loop of its own, and drafts and their distributions are temporaries
of the step instead of state.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxspec_kernels.argmax import row_max

from jaxspec.attention import (
    PagedMemory,
    RowBlock,
    StatePlaces,
    join_rows,
    output_rows,
    split_rows,
    take_rows,
)
from jaxspec.config import ResolvedEngineConfig
from jaxspec.drafters.base import Drafter, Proposal, Rows, Target
from jaxspec.drafters.checks import Caches, check_rows, checked_proposal, checked_refresh
from jaxspec.engine.device.outcome import Outcome, Outcomes
from jaxspec.engine.device.plan import Plan, Size
from jaxspec.engine.device.state import EngineState, put_rows
from jaxspec.models.decoder import LAST_STREAMS
from jaxspec.sampling import (
    Columns,
    Constrained,
    Constraints,
    Logprobs,
    SamplingMode,
    SamplingState,
    TokenLogprobs,
    can_branch,
    token_logprobs,
    verify_synthetic,
)
from jaxspec.sampling import verify as verify_drafts
from jaxspec.sampling.grammar_table import MAX_FORCED
from jaxspec.sharding import all_gather, split_over

_ROWS_FORCED = {True: 7, False: 64}
"""The rows of a pass up to which it has room for forced tokens, by whether programs may branch: on a CPU
every row costs time, on a GPU a few dozen cost little."""
_WORTH = 4
"""The rows that a forced token may cost where programs may branch. For a single slot of the default model on
two cores, six rows take about as long as one token."""


class Models(nnx.Module):
    """The target and its drafter; their weights are an argument of every program."""

    def __init__(self, target: Target, drafter: Drafter):
        self.target = target
        self.drafter = drafter


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Group:
    """The rows of n slots that decode, or of n chunks of prompts, in a target pass.

    Attributes:
      slot: i32[n], index among the b slots of the plan; of size zero if row i is slot i.
      tokens: i32[n, Q], the tokens to read.
      next_tokens: i32[n, Q], the token after each, as far as it is known before they are judged.
      block: their positions and pages. The rows whose output is needed are judged: of a slot that decodes,
        every row; of a chunk, the last one.
      proposal: the drafts that the judged rows verify.
      length: i32[n], position of the first judged row.
      remaining: i32[n], tokens that the request may still emit.
      active: bool[n], whether what the rows emit counts.
      given: i32[n], the token to emit whatever is sampled, -1 for none; of size zero if none is given.
      stop_tokens, sampling, is_processed: of the request, as in `Plan`.
      constrained: what changes the logits of the judged rows.
      mode: how to sample; static.
      logprobs: what to report of the tokens that are emitted; static.
    """

    slot: jax.Array
    tokens: jax.Array
    next_tokens: jax.Array
    block: RowBlock
    proposal: Proposal
    length: jax.Array
    remaining: jax.Array
    active: jax.Array
    given: jax.Array
    stop_tokens: jax.Array
    sampling: SamplingState
    is_processed: jax.Array
    constrained: Constrained
    mode: SamplingMode = field(metadata={"static": True})
    logprobs: Logprobs = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carry:
    """What the phases of a step hand on; what a later phase makes is empty before.

    Attributes:
      state: of the b slots of the plan.
      proposal: from `draft`, the slots' drafts.
      groups, rows, judged, logits: from `verify`: the slots that decode, if any do, and then the chunks, if
        there are any; what the drafter may see of the pass; the target's hidden states [N', M] of the rows
        that are judged; and of each group their logits [n, W, V], which `accept` computes if they are not
        needed in every pass.
      outcomes: from `accept`, of each group.
      hidden: from `refresh`, of each group [n, M'], the state that its slot drafts from next.
    """

    state: EngineState
    proposal: Proposal
    groups: tuple[Group, ...] = ()
    rows: tuple[Rows, ...] = ()
    judged: tuple[jax.Array, ...] = ()
    logits: tuple[jax.Array, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    hidden: tuple[jax.Array, ...] = ()


def num_forced(size: Size) -> int:
    """The rows of every slot for tokens that a grammar forces behind its K drafts."""
    if not size.drafts or not size.constraints & Constraints.GRAMMAR:
        return 0
    return max(min(MAX_FORCED, _ROWS_FORCED[can_branch()] // size.slots - size.width), 0)


def num_rows(size: Size) -> int:
    """Q, the rows of the target's pass for every slot that decodes."""
    return size.width + num_forced(size)


def _may_be_narrow(plan: Plan) -> bool:
    """Whether a step leaves out the rows for forced tokens where too few tokens are forced."""
    return num_forced(plan.size) > 0 and not plan.size.chunks and can_branch()


def draft(models: Models, plan: Plan, carry: Carry) -> Carry:
    """K drafts for each of the b slots."""
    if not plan.size.drafts:
        return carry
    context = carry.state.context(plan, models.drafter.needs.target_caches)
    cache = carry.state.draft_cache
    proposed = models.drafter.propose(
        models.target, context, cache, num_drafts=plan.size.drafts, mode=plan.size.mode
    )
    return with_drafts(models, plan, carry, proposed)


def with_drafts(models: Models, plan: Plan, carry: Carry, proposed: tuple[Proposal, Caches]) -> Carry:
    """What `draft` hands on, from what the drafter's `propose` returned."""
    state = carry.state
    sizes = {"batch_size": len(state.length), "num_drafts": plan.size.drafts}
    proposal, cache = checked_proposal(models.drafter, models.target, state.draft_cache, proposed, **sizes)
    proposal = replace(proposal, count=jnp.minimum(proposal.count, plan.limit))
    if plan.size.constraints & Constraints.GRAMMAR:
        drafts, forced = plan.size.drafts, num_forced(plan.size)
        proposal = proposal.with_more(forced)
        tokens, count = state.context(plan).constrained.with_forced(proposal.tokens, proposal.count)
        count = jnp.where(state.active, jnp.minimum(count, plan.limit), 0)
        if _may_be_narrow(plan):
            is_wide = jnp.maximum(count - drafts, 0).sum() * _WORTH > forced * len(count)
            count = jnp.where(is_wide, count, jnp.minimum(count, drafts))
        proposal = replace(proposal, tokens=tokens, count=count)
    return replace(carry, state=replace(state, draft_cache=cache), proposal=proposal)


def verify(models: Models, plan: Plan, carry: Carry) -> Carry:
    """One target pass over every slot's last token and drafts, and over the chunks of prompts."""
    carry = replace(carry, state=_with_chunks(plan, carry.state))
    target, needs, state = models.target, models.drafter.needs, carry.state
    decoding = (decoding_slots(plan, carry),) if plan.size.width else ()
    groups = (*decoding, chunks_of_prompts(plan, state)) if plan.size.chunks else decoding
    blocks = tuple(group.block for group in groups)
    tokens = join_rows(group.tokens for group in groups)
    reads_last_layer = needs.hidden or not {len(target.kinds), LAST_STREAMS}.isdisjoint(needs.capture)
    run = tuple(replace(block, output=None) for block in blocks) if reads_last_layer else blocks
    hidden, captured, memory = target(
        tokens,
        join_rows(block.positions for block in blocks),
        PagedMemory.build(target.kinds, state.target_cache, run),
        capture=needs.capture,
    )
    check_rows(hidden, run, type(target).__name__)
    judged = take_rows(hidden, output_rows(blocks)) if reads_last_layer else hidden
    rows = Rows(tokens, tokens, hidden if needs.hidden else None, captured, blocks)
    return replace(
        carry,
        state=replace(state, target_cache=memory.caches),
        groups=groups,
        rows=(rows,),
        judged=(judged,),
        logits=() if _is_optional(plan) else _logits(models, groups, judged),
    )


def accept(models: Models, plan: Plan, carry: Carry) -> Carry:
    """Accepts or rejects drafts by the target's logits, and draws the token after them or after a prompt."""
    groups = carry.groups

    def outcomes() -> tuple[Outcome, ...]:
        every = carry.logits or _logits(models, groups, *carry.judged)
        judged = zip(groups, every, strict=True)
        return tuple(judge(models, plan.config, group, logits) for group, logits in judged)

    def none() -> tuple[Outcome, ...]:
        return tuple(_no_outcome(models, plan, len(group.length), 1) for group in groups)

    if _is_optional(plan):
        return replace(carry, outcomes=lax.cond(plan.chunks.is_last.any(), outcomes, none))
    return replace(carry, outcomes=outcomes())


def refresh(models: Models, plan: Plan, carry: Carry) -> Carry:
    """Runs the drafter over the rows of committed tokens. Plain decoding leaves the drafter as it is."""
    is_plain, state = plan.size.width == 1, carry.state
    if is_plain and not plan.size.chunks:
        return replace(carry, hidden=(state.hidden,))
    settled = [
        _settle(group, outcome, is_kept=not is_plain or bool(group.slot.size))
        for group, outcome in zip(carry.groups, carry.outcomes, strict=True)
    ]
    next_tokens, blocks = join_rows(tokens for tokens, _ in settled), tuple(block for _, block in settled)
    rows = replace(carry.rows[0], next_tokens=next_tokens, blocks=blocks)
    drafter, cache = models.drafter, state.draft_cache
    hidden, cache = checked_refresh(drafter, rows, cache, drafter.refresh(models.target, rows, cache))
    hidden = hidden.astype(state.hidden.dtype)
    parts = [part[:, 0] for part in split_rows(hidden, [block.outputs.shape for block in blocks])]
    if is_plain:
        parts[0] = state.hidden
    return replace(carry, state=replace(state, draft_cache=cache), hidden=tuple(parts))


def commit(models: Models, plan: Plan, carry: Carry) -> Carry:
    """Advances the slots by what they emitted, and starts those whose prompts end."""
    state = carry.state
    for group, outcome, hidden in zip(carry.groups, carry.outcomes, carry.hidden, strict=True):
        state = _advance(state, group, outcome, hidden)
    return replace(carry, state=state)


Phase = Callable[[Models, Plan, Carry], Carry]
PHASES: tuple[Phase, ...] = (draft, verify, accept, refresh, commit)
"""The phases of a step, in order."""


def engine_step(models: Models, plan: Plan, state: EngineState) -> Carry:
    """One step of the b slots of the plan; hands on its state and outcomes."""
    first, *others = PHASES
    carry = first(models, plan, Carry(state, Proposal.none(len(state.length))))

    def run(carry: Carry) -> Carry:
        for phase in others:
            carry = phase(models, plan, carry)
        return carry

    if not _may_be_narrow(plan):
        return run(carry)
    proposal, drafts = carry.proposal, plan.size.drafts
    is_wide = (proposal.count > drafts).any()
    outcome = _no_outcome(models, plan, *proposal.tokens.shape[:1], num_rows(plan.size))
    state = carry.state
    for is_wanted, columns in ((is_wide, proposal), (~is_wide, proposal.first(drafts))):
        # Loops of one iteration or none, as XLA copies what goes through a branch, caches too.
        def body(before: tuple, columns: Proposal = columns) -> tuple:
            _, state, outcome = before
            after = run(replace(carry, state=state, proposal=columns))
            return jnp.bool_(False), after.state, jax.tree.map(_put_first, outcome, after.outcomes[0])

        _, state, outcome = lax.while_loop(lambda of: of[0], body, (is_wanted, state, outcome))
    return Carry(state, proposal, outcomes=(outcome,))


def _put_first(into: jax.Array, some: jax.Array) -> jax.Array:
    """An array with its first entries along every axis replaced."""
    return lax.dynamic_update_slice(into, some, (0,) * some.ndim)


def run_steps(models: Models, plan: Plan, state: EngineState) -> tuple[EngineState, Outcomes]:
    """The engine steps of one program: up to S that decode, or a single one that only reads prompts.

    The first step may read prompts too; a slot whose prompt ends in it decodes in the others. Where programs
    may branch, they stop after `Plan.steps` steps, or earlier if all slots have ended.

    Args:
      state: of all B slots.
    """
    size = plan.size
    all_slots, state = state, state.gather(plan)
    of_slots, of_chunks = [_no_outcome(models, plan, 0, size.slots, num_rows(size))], Outcome.none(0, 0, 1)
    num_steps = 0
    if size.width:
        num_steps = plan.config.steps_per_dispatch
    if size.chunks:
        carry = engine_step(models, plan, state)
        *decoded, of_chunks = (jax.tree.map(lambda x: x[None], outcome) for outcome in carry.outcomes)
        state, of_slots, num_steps = carry.state, of_slots + decoded, num_steps - 1
    if num_steps > 0:
        state, outcome = _decode(models, plan.without_chunks(), state, num_steps)
        of_slots.append(outcome)
    joined = jax.tree.map(lambda *of_steps: jnp.concatenate(of_steps), *of_slots)
    return all_slots.scatter(plan, state), (joined, of_chunks)


def _decode(models: Models, plan: Plan, state: EngineState, num_steps: int) -> tuple[EngineState, Outcome]:
    """Runs the last `num_steps` steps of a plan."""

    def step(state: EngineState) -> tuple[EngineState, Outcome]:
        carry = engine_step(models, plan, state)
        return carry.state, carry.outcomes[0]

    if not can_branch():
        # A trip count that XLA does not know would be copied to the host in every iteration.
        return lax.scan(lambda state, _: step(state), state, length=num_steps)
    wanted = jnp.minimum(plan.steps.min() - (plan.config.steps_per_dispatch - num_steps), num_steps)
    # A dispatch without requests is there to be timed.
    is_timed = ~plan.is_decoding.any()

    def is_unfinished(carry: tuple) -> jax.Array:
        i, state, _ = carry
        return (i < wanted) & (state.active.any() | is_timed)

    def body(carry: tuple) -> tuple:
        i, state, outcomes = carry
        state, outcome = step(state)
        put = partial(lax.dynamic_update_index_in_dim, index=i, axis=0, allow_negative_indices=False)
        return i + 1, state, jax.tree.map(put, outcomes, outcome)

    none = _no_outcome(models, plan, num_steps, plan.size.slots, num_rows(plan.size))
    _, state, outcomes = lax.while_loop(is_unfinished, body, (jnp.int32(0), state, none))
    return state, outcomes


def _no_outcome(models: Models, plan: Plan, *shape: int) -> Outcome:
    """`Outcome.none` with the arrays of an outcome in this plan's program."""
    vocab_size = models.target.config.vocab_size
    return Outcome.none(*shape, logprobs=plan.size.logprobs, vocab_size=vocab_size)


def decoding_slots(plan: Plan, carry: Carry) -> Group:
    """The last token and the drafts of every slot."""
    state, drafts = carry.state, carry.proposal.tokens
    positions = state.length[:, None] + jnp.arange(drafts.shape[1] + 1, dtype=jnp.int32)[None, :]
    tokens = jnp.concatenate([state.context(plan).last_token[:, None], drafts], axis=1)
    valid = jnp.broadcast_to(state.active[:, None], positions.shape)
    none = jnp.zeros(0, jnp.int32)
    return Group(
        slot=none,
        tokens=tokens,
        next_tokens=tokens,
        block=RowBlock(positions, valid, plan.page_table, states=_states(plan, state)),
        proposal=carry.proposal,
        length=state.length,
        remaining=state.remaining,
        active=state.active,
        given=none,
        stop_tokens=plan.stop_tokens,
        sampling=plan.sampling,
        is_processed=plan.is_processed,
        constrained=state.context(plan).constrained,
        mode=plan.size.mode,
        logprobs=plan.size.logprobs,
    )


def _states(plan: Plan, state: EngineState) -> StatePlaces | None:
    """The states of the slots, for recurrent layers."""
    if not plan.config.has_states:
        return None
    nowhere = jnp.full_like(plan.slot, jnp.iinfo(jnp.int32).max)
    return StatePlaces(plan.slot, plan.slot, nowhere, *state.unapplied)


def _with_chunks(plan: Plan, state: EngineState) -> EngineState:
    """The state with the chunks of prompts in the histories, which constraints of the next token read."""
    chunks = plan.chunks
    if not plan.size.chunks:
        return state
    index = jnp.arange(chunks.tokens.shape[1], dtype=jnp.int32)[None, :]
    at = jnp.where(index < chunks.count[:, None], chunks.start[:, None] + index, state.history.shape[1])
    return replace(state, history=put_rows(state.history, (chunks.index[:, None], at), chunks.tokens))


def chunks_of_prompts(plan: Plan, state: EngineState) -> Group:
    """The chunks of prompts; of the last chunk of a prompt, the token after it is drawn."""
    chunks = plan.chunks
    index = jnp.arange(chunks.tokens.shape[1], dtype=jnp.int32)[None, :]
    last = jnp.maximum(chunks.count - 1, 0)
    take = partial(jax.tree.map, lambda of_slot: jnp.take(of_slot, chunks.index, axis=0, mode="clip"))
    valid = index < chunks.count[:, None]
    constrained = Constrained.none(len(last))
    if plan.size.constraints:
        # In place of what has no axis of slots, something that has.
        of_slots = replace(state.context(plan).constrained, automaton=plan.slot, grammars=plan.slot)
        constrained = replace(
            take(of_slots),
            length=chunks.start + last,
            automaton=take(plan.constraints.grammar).reshape(-1),
            grammars=plan.grammars,
        )
    return Group(
        slot=chunks.index,
        tokens=chunks.tokens,
        next_tokens=chunks.next_tokens,
        block=RowBlock(
            chunks.start[:, None] + index,
            valid,
            take(plan.page_table),
            last,
            states=chunks.states(take(plan.slot)) if plan.config.has_states else None,
        ),
        proposal=Proposal.none(len(last)),
        length=chunks.start + last,
        remaining=chunks.remaining,
        active=chunks.is_last,
        given=chunks.given_token,
        stop_tokens=take(plan.stop_tokens),
        sampling=take(plan.sampling),
        # One row per prompt costs little, so there are no programs for simpler sampling modes.
        mode=SamplingMode.TRUNCATED,
        is_processed=take(plan.is_processed),
        constrained=constrained,
        logprobs=plan.size.logprobs,
    )


def judge(models: Models, config: ResolvedEngineConfig, group: Group, logits: jax.Array) -> Outcome:
    """Accepts or rejects a group's drafts, and draws the token after them.

    Args:
      config: gives the synthetic acceptance length.
      logits: [n, Q, V]; V may be this device's part of the vocabulary.
    """
    vocab_size, proposal = models.target.config.vocab_size, group.proposal
    if group.mode is not SamplingMode.GREEDY:
        logits, proposal = _whole_rows(logits, proposal, models)
    raw, drafts = logits, proposal.tokens
    if group.constrained.asked:
        logits = constrain(models, group, logits)
    index = jnp.arange(drafts.shape[1] + 1, dtype=jnp.int32)[None, :]
    check = partial(verify_drafts, is_forced=group.constrained.forced(drafts))
    if config.synthetic_acceptance_length is not None and drafts.shape[1]:
        length = min(config.synthetic_acceptance_length, drafts.shape[1] + 1)
        check = partial(verify_synthetic, mean_acceptance_length=length)
    verdict = check(
        logits,
        drafts,
        proposal.count,
        proposal.logits,
        models.drafter.draft_vocab,
        group.sampling,
        group.length[:, None] + index,
        mode=group.mode,
        vocab_size=vocab_size,
    )
    accepted, token = verdict.accepted, verdict.token
    if group.given.size:
        token = jnp.where(group.given < 0, token, group.given)
    # e_0..e_{a-1} are the accepted drafts, e_a is the recovered or bonus token.
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    tokens = jnp.where(index < accepted[:, None], padded, token[:, None])
    is_stop = (tokens[:, :, None] == group.stop_tokens[:, None, :]).any(axis=2)
    is_stop &= index <= accepted[:, None]
    up_to_stop = jnp.where(is_stop, index + 1, accepted[:, None] + 1).min(axis=1)
    wanted = jnp.minimum(up_to_stop, group.remaining)
    # Row i gives token i, so the tokens before the first row that is not finite are still valid.
    axis = split_over(logits.shape[-1], vocab_size)
    finite = finite_rows(logits, axis)
    sound = jnp.where(finite, wanted[:, None], index).min(axis=1)
    failed = group.active & (sound < wanted)
    count = jnp.where(group.active, jnp.minimum(wanted, sound), 0)
    stopped = (is_stop & (index == count[:, None] - 1)).any(axis=1)
    logprobs = TokenLogprobs.none(tokens.shape, group.logprobs, vocab_size)
    if group.logprobs:
        rows = jnp.where(group.is_processed[:, None, None], verdict.drawn_from, raw)
        logprobs = token_logprobs(rows, tokens, group.logprobs, axis=axis)
    return Outcome(
        tokens=tokens,
        num_tokens=count,
        drafted=proposal.count,
        accepted=accepted,
        done=group.active & (stopped | (count >= group.remaining) | failed),
        failed=failed,
        logprobs=logprobs,
    )


def constrain(models: Models, group: Group, logits: jax.Array) -> jax.Array:
    """The logits [n, Q, V] of a group's judged rows as its constraints change them; V may be a part."""
    rows = group.constrained.over(Columns.of(logits, models.target.config.vocab_size))
    return rows.apply(logits.astype(jnp.float32), group.proposal.tokens)


def _settle(group: Group, outcome: Outcome, *, is_kept: bool) -> tuple[jax.Array, RowBlock]:
    """The token after each row of a group, and the group's rows. Rows of rejected drafts are no longer valid,
    and without `is_kept` none is. The rows' output is the one from which the slot goes on."""
    block, output = group.block, group.block.output
    index = jnp.arange(block.shape[1], dtype=jnp.int32)[None, :]
    if output is None:
        stands = block.valid & (index <= outcome.accepted[:, None]) & is_kept
        return outcome.tokens, replace(block, valid=stands, output=outcome.accepted)
    is_end = group.active[:, None] & (index == output[:, None])
    return jnp.where(is_end, outcome.tokens, group.next_tokens), block


def _advance(state: EngineState, group: Group, outcome: Outcome, hidden: jax.Array) -> EngineState:
    """Advances a group's slots by the tokens they emitted; `hidden` [n, M'] is what they draft from next."""
    count = outcome.num_tokens
    index = jnp.arange(outcome.tokens.shape[1], dtype=jnp.int32)[None, :]
    at = jnp.where(index < count[:, None], group.length[:, None] + index + 1, state.history.shape[1])
    slot, put = jnp.arange(len(count)), lambda into, rows: rows
    if group.slot.size:
        # An index past the end is dropped. At most one chunk of a slot ends a prompt: none is written twice.
        slot = jnp.where(group.active, group.slot, len(state.length))
        put = lambda into, rows: put_rows(into, slot, rows)  # noqa: E731
    else:
        hidden = jnp.where(group.active[:, None], hidden, state.hidden)
    if group.constrained.asked & Constraints.GRAMMAR:
        automaton = group.constrained.after(group.proposal.tokens, outcome.tokens, count)
        state = replace(state, automaton=put(state.automaton, automaton))
    for unapplied in state.unapplied:
        # The last token's row is in the state already, and a prompt's rows are.
        state = replace(state, unapplied=(put(unapplied, jnp.maximum(count - 1, 0)),))
    return replace(
        state,
        history=put_rows(state.history, (slot[:, None], at), outcome.tokens),
        length=put(state.length, group.length + count),
        hidden=put(state.hidden, hidden),
        remaining=put(state.remaining, group.remaining - count),
        active=put(state.active, group.active & ~outcome.done),
    )


def _is_optional(plan: Plan) -> bool:
    """Whether a pass needs no logits unless a prompt ends in it: prefill, where programs may branch."""
    return not plan.size.width and can_branch()


def _logits(models: Models, groups: tuple[Group, ...], judged: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(split_rows(models.target.logits(judged), [group.block.outputs.shape for group in groups]))


def _whole_rows(logits: jax.Array, proposal: Proposal, models: Models) -> tuple[jax.Array, Proposal]:
    """Gathers the target's logits [n, Q, V] and the drafts' logits from all devices.

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


def finite_rows(logits: jax.Array, axis: str | None = None) -> jax.Array:
    """bool[...] for logits [..., V]: whether none is NaN or +inf and not all are -inf.

    Args:
      axis: the mesh axis that V is split over, as for `all_gather`; None if V is whole.
    """
    best = row_max(logits)
    return jnp.isfinite(best if axis is None else row_max(all_gather(best[..., None], axis)))
