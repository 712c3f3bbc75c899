"""The decode program of an engine, on slots that are in the middle of their answers."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.attention import PageTable
from jaxspec.config import EngineConfig
from jaxspec.engine.programs import compiler_options
from jaxspec.engine.state import EngineState, StepOutput, init_state
from jaxspec.engine.step import Models, StepSettings, decode
from jaxspec.sampling import SamplingParams, required_mode
from jaxspec.sharding import make_mesh


@dataclass
class Running:
    """A compiled decode program and its state, every slot at `context` committed tokens."""

    compiled: Any
    leaves: list[jax.Array]
    state: EngineState
    context: int
    new_tokens: int

    def rewind(self) -> None:
        """Puts every slot back to the start of its answer."""
        self.state = replace(
            self.state,
            length=jnp.full_like(self.state.length, self.context),
            remaining=jnp.full_like(self.state.remaining, 1 << 30),
            active=jnp.ones_like(self.state.active),
        )

    def dispatch(self) -> StepOutput:
        """Enqueues one dispatch."""
        live = self.state.active  # not donated twice: `decode` takes its own copy
        self.state, output = self.compiled(self.leaves, self.state, jnp.copy(live))
        return output


def start(
    models: Models,
    *,
    batch_size: int,
    context: int,
    new_tokens: int,
    max_model_len: int,
    page_size: int,
    steps_per_dispatch: int,
    acceptance: float | None,
    dtype: jnp.dtype,
    params: SamplingParams,
) -> Running:
    """Compiles the decode program and fills the slots' caches with noise.

    Args:
      context: committed tokens of every slot.
      new_tokens: room for so many more.
      acceptance: synthetic tokens per step; None verifies the drafts.
      params: temperature, top-k and top-p of every slot; the program is that of the least mode that
        serves them.
    """
    pages_per_slot = -(-(context + new_tokens) // page_size)
    config = EngineConfig(
        batch_size=batch_size,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=batch_size * pages_per_slot,
        dtype=str(dtype),
    )
    limit = models.target.config.max_position_embeddings
    resolved = config.resolve(backend=jax.default_backend(), model_limit=limit)
    state = init_state(models.target, models.drafter, resolved, mesh=make_mesh())
    table = np.zeros(state.page_table.pages.shape, np.int32)
    pages = 1 + np.random.default_rng(0).permutation(batch_size * pages_per_slot)
    table[:, :pages_per_slot] = pages.reshape(batch_size, pages_per_slot)
    keys = iter(jax.random.split(jax.random.key(0), 1000))
    noise = jax.jit(
        lambda key, x: jax.random.normal(key, x.shape, jnp.bfloat16).astype(x.dtype), donate_argnums=1
    )
    state = replace(
        state,
        target_cache=tuple(noise(next(keys), layer) for layer in state.target_cache),
        draft_cache=tuple(noise(next(keys), layer) for layer in state.draft_cache),
        page_table=PageTable(jnp.asarray(table), page_size),
        history=jax.random.randint(next(keys), state.history.shape, 0, models.target.config.vocab_size),
        hidden=noise(next(keys), state.hidden) if state.hidden.size else state.hidden,
        sampling=replace(
            state.sampling,
            temperature=jnp.full_like(state.sampling.temperature, params.temperature),
            top_k=jnp.full_like(state.sampling.top_k, params.top_k),
            top_p=jnp.full_like(state.sampling.top_p, params.top_p),
            seed=jnp.arange(2 * batch_size, dtype=jnp.uint32).reshape(batch_size, 2),
        ),
    )
    settings = StepSettings(steps_per_dispatch, acceptance)
    graph, parameters = nnx.split(models)
    leaves, treedef = jax.tree.flatten(parameters)

    def program(leaves: list[jax.Array], state: EngineState, live: jax.Array) -> tuple:
        merged = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
        return decode(merged, state, live, settings=settings, mode=required_mode(params))

    running = Running(None, leaves, state, context, new_tokens)
    running.rewind()
    lowered = jax.jit(program, donate_argnums=1).lower(leaves, running.state, running.state.active)
    rows = batch_size * (models.drafter.num_speculative_tokens + 1)
    running.compiled = lowered.compile(compiler_options(leaves, rows=rows))
    return running
