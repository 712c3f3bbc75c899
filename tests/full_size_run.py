"""Runs networks of full size from prompt to emitted tokens by `jax.eval_shape`, without arrays."""

import jax
from flax import nnx

from jaxspec.config import EngineConfig
from jaxspec.engine.device.plan import empty_batch, empty_chunks
from jaxspec.engine.device.state import init_state
from jaxspec.engine.device.step import Models, dispatch
from jaxspec.sampling import SamplingMode
from jaxspec.sharding import make_mesh


def assert_runs(target, drafter):
    """Checks that two steps, the first with two chunks of prompts, keep the state's shapes and dtypes."""
    config = EngineConfig(batch_size=2, max_model_len=2048, steps_per_dispatch=2).resolve(
        backend="gpu", model_limit=target.config.max_position_embeddings
    )
    state = jax.eval_shape(lambda: init_state(target, drafter, config, mesh=make_mesh()))
    batch = empty_batch(2, config.table_width)
    chunks = empty_chunks(2, config.prefill_chunk)
    graph, parameters = nnx.split(Models(target, drafter))

    def run(parameters, state, batch, chunks):
        models = nnx.merge(graph, parameters)
        return dispatch(models, state, batch, chunks, config=config, mode=SamplingMode.TRUNCATED)

    after, output = jax.eval_shape(run, parameters, state, batch, chunks)
    assert jax.tree.map(_shape_and_dtype, after) == jax.tree.map(_shape_and_dtype, state)
    assert output.first.token.shape == (2,)
    assert output.emitted.tokens.shape == (2, 2, drafter.num_speculative_tokens + 1)


def _shape_and_dtype(array):
    return array.shape, array.dtype
