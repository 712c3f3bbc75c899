"""Networks of full size from prompt to emitted tokens, without an array: `jax.eval_shape` all the way."""

import jax
from flax import nnx

from jaxspec.config import EngineConfig
from jaxspec.engine.packing import pack_prefill
from jaxspec.engine.state import init_state
from jaxspec.engine.step import Models, StepSettings, decode, prefill
from jaxspec.sampling import SamplingMode
from jaxspec.sharding import make_mesh, replicated


def assert_runs(target, drafter):
    """A prefill and a dispatch of two steps for two slots give the state back in its shapes and dtypes."""
    sizes = EngineConfig(batch_size=2, max_model_len=2048, prefill_chunk=128, steps_per_dispatch=2).resolve(
        backend="gpu", model_limit=target.config.max_position_embeddings
    )
    settings = StepSettings(steps_per_dispatch=sizes.steps_per_dispatch)
    mesh = make_mesh()
    state = jax.eval_shape(lambda: init_state(target, drafter, sizes, mesh=mesh))
    batch = jax.eval_shape(
        lambda: pack_prefill(
            [], state, rows=sizes.prefill_rows, width=sizes.prefill_chunk, whole=replicated(mesh)
        )
    )
    graph, parameters = nnx.split(Models(target, drafter))

    def run(parameters, state, batch):
        models = nnx.merge(graph, parameters)
        state, first = prefill(models, state, batch, settings=settings)
        return decode(models, state, state.active, settings=settings, mode=SamplingMode.TRUNCATED), first

    (after, output), first = jax.eval_shape(run, parameters, state, batch)
    assert jax.tree.map(_shape_and_dtype, after) == jax.tree.map(_shape_and_dtype, state)
    assert first.token.shape == (2,)
    assert output.tokens.shape == (2, 2, drafter.num_speculative_tokens + 1)


def _shape_and_dtype(array):
    return array.shape, array.dtype
