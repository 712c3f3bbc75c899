"""A pass over chunks of texts that gives the log-probabilities of their tokens."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.attention import PagedMemory, RowBlock
from jaxspec.drafters.base import Target
from jaxspec.drafters.checks import check_rows
from jaxspec.engine.device.plan import Plan
from jaxspec.engine.device.state import EngineState
from jaxspec.engine.device.step import Models
from jaxspec.sampling import Logprobs, TokenLogprobs, token_logprobs
from jaxspec.sharding import split_over

ROWS = 512
"""The most rows whose logits exist at a time, unless a chunk has more. With fewer, a GPU would take longer to
read the output projection than to multiply by it."""

Scored = tuple[TokenLogprobs, tuple[jax.Array, ...]]
"""Log-probabilities of shape [G, C], of the token after each row of the chunks; and the hidden states
[G, C, M] of `Size.layers`."""


def score_chunks(models: Models, plan: Plan, state: EngineState) -> tuple[EngineState, Scored]:
    """Reads chunks of texts. Of the state it changes the target's cache alone: neither the slots nor what the
    drafter keeps."""
    target, chunks, layers = models.target, plan.chunks, plan.size.layers
    groups, width = chunks.tokens.shape
    index = jnp.arange(width, dtype=jnp.int32)[None, :]
    take = lambda of_slot: jnp.take(of_slot, chunks.index, axis=0, mode="clip")  # noqa: E731
    table = jax.tree.map(take, plan.page_table)
    valid = index < chunks.count[:, None]
    block = RowBlock(
        chunks.start[:, None] + index,
        valid,
        table,
        states=chunks.states(take(plan.slot)) if plan.config.has_states else None,
    )
    hidden, captured, memory = target(
        chunks.tokens.ravel(),
        block.positions.ravel(),
        PagedMemory.build(target.kinds, state.target_cache, (block,)),
        capture=tuple(layer for layer in layers if layer <= len(target.kinds)),
    )
    check_rows(hidden, (block,), type(target).__name__)
    temperature = jnp.repeat(take(plan.sampling.temperature), width)
    reported = _report(target, hidden, chunks.next_tokens.ravel(), temperature, (groups, width), plan)
    by_layer = iter(captured)
    states = (next(by_layer) if layer <= len(target.kinds) else hidden for layer in layers)
    scored = reported, tuple(x.reshape(groups, width, -1) for x in states)
    return replace(state, target_cache=memory.caches), scored


def _report(
    target: Target,
    hidden: jax.Array,
    tokens: jax.Array,
    temperature: jax.Array,
    shape: tuple[int, int],
    plan: Plan,
) -> TokenLogprobs:
    """The log-probabilities of tokens i32[G * C] after the hidden states [G * C, M], in the shape [G, C]."""
    report: Logprobs = plan.size.scores
    groups, width = shape

    def of_rows(rows: tuple[jax.Array, ...]) -> TokenLogprobs:
        hidden, tokens, temperature = rows
        logits = target.logits(hidden)
        axis = split_over(logits.shape[-1], target.config.vocab_size)
        return token_logprobs(logits / temperature[:, None], tokens, report, axis=axis)

    together = max(n for n in range(1, groups + 1) if groups % n == 0 and (n == 1 or n * width <= ROWS))
    split = groups // together, together * width
    rows = jax.tree.map(lambda x: x.reshape(*split, *x.shape[1:]), (hidden, tokens, temperature))
    return jax.tree.map(lambda x: x.reshape(groups, width, *x.shape[2:]), lax.map(of_rows, rows))
