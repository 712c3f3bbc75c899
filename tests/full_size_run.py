"""Runs networks of full size from prompt to emitted tokens by `jax.eval_shape`, without arrays."""

import jax
from flax import nnx

from jaxspec.attention import has_states
from jaxspec.config import EngineConfig
from jaxspec.engine.device.plan import Plan, Size, empty_plan
from jaxspec.engine.device.state import init_state
from jaxspec.engine.device.step import Models, run_steps
from jaxspec.sampling import SamplingMode
from jaxspec.sharding import make_mesh


def assert_runs(target, drafter):
    """Checks that two steps, the first with two chunks of prompts, keep the state's shapes and dtypes."""
    config = EngineConfig(batch_size=2, max_model_len=2048, steps_per_dispatch=2).resolve(
        backend="gpu",
        model_limit=target.config.max_position_embeddings,
        has_states=has_states(target.kinds),
    )
    state = jax.eval_shape(lambda: init_state(target, drafter, config, mesh=make_mesh()))
    size = Size(2, 2, SamplingMode.TRUNCATED, drafter.num_speculative_tokens + 1)
    graph, parameters = nnx.split(Models(target, drafter))

    def run(parameters, state, words):
        return run_steps(nnx.merge(graph, parameters), Plan.unpack(words, size, config), state)

    after, (of_slots, of_chunks) = jax.eval_shape(run, parameters, state, empty_plan(size, config))
    assert jax.tree.map(_shape_and_dtype, after) == jax.tree.map(_shape_and_dtype, state)
    assert of_chunks.tokens.shape == (1, 2, 1)
    assert of_slots.tokens.shape == (2, 2, drafter.num_speculative_tokens + 1)


def _shape_and_dtype(array):
    return array.shape, array.dtype
