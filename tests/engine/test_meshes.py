"""Arrays that leave an engine and enter it, in a program that has a mesh of its own."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from several_devices import run
from tiny_engines import SIZES
from tiny_models import write_eagle3, write_target

import jaxspec
from jaxspec.files import open_checkpoint
from jaxspec.lab.training import adapt
from jaxspec.sharding import entering

PROMPT = [1, 2, 3]
MESHES = {"none": None, "auto": AxisType.Auto, "explicit": AxisType.Explicit}
"""The user's mesh, by the type of its axis."""


def mesh_of(axis_type):
    return jax.make_mesh((1,), ("dp",), axis_types=(axis_type,))


@pytest.fixture(params=MESHES)
def mesh(request):
    """The mesh of the program around, set meanwhile; None without one."""
    axis_type = MESHES[request.param]
    mesh = None if axis_type is None else mesh_of(axis_type)
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        yield mesh


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_eagle3(folder / "eagle3", write_target(folder / "target"))
    write_target(folder / "other", seed=1)
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    drafter = {"kind": "eagle3", "source": str(folder / "eagle3"), "num_speculative_tokens": 2}
    with jaxspec.load(folder / "target", drafter=drafter, progress=False, **SIZES) as engine:
        yield engine


def arrays(tree):
    return jax.tree.leaves(tree)


def test_samples_compute_under_any_mesh(engine, mesh):
    samples = engine.sample([PROMPT, PROMPT], n=2, max_new_tokens=4, temperature=1.0, seed=1)
    assert isinstance(samples.tokens.sharding, SingleDeviceSharding)
    assert not any(
        array.committed for array in (samples.tokens, samples.mask, samples.logprobs, samples.lengths)
    )
    mean = jnp.where(samples.mask, samples.logprobs, 0).sum() / samples.mask.sum()
    loss = jax.jit(jax.grad(lambda weight: (weight * samples.logprobs).mean()))
    assert float(mean) < 0
    assert loss(jnp.float32(1)) < 0
    assert samples.tokens.reshape(2, 2, -1)[0].shape == (2, samples.tokens.shape[1])
    if mesh is not None:
        spread = jax.device_put(
            np.ones(samples.logprobs.shape, np.float32), NamedSharding(mesh, PartitionSpec("dp"))
        )
        np.testing.assert_array_equal(spread * samples.logprobs, np.asarray(samples.logprobs))


def test_networks_and_weights_compute_under_any_mesh(engine, mesh):
    for tree in (engine.weights, nnx.state(engine.target), nnx.state(engine.drafter)):
        assert all(isinstance(array.sharding, SingleDeviceSharding) for array in arrays(tree))
        assert sum(float(jnp.abs(array.astype(jnp.float32)).sum()) for array in arrays(tree)) > 0


def test_what_is_asked_in_arrays_is_answered_under_any_mesh(engine, mesh):
    samples = engine.sample(jnp.asarray(PROMPT), max_new_tokens=4)
    scores = engine.score(samples.tokens, lengths=samples.lengths, hidden=("last",))
    np.testing.assert_allclose(
        scores.logprobs[np.asarray(samples.mask)], samples.logprobs[samples.mask], atol=1e-4
    )
    steps = jaxspec.inspect_steps(engine, jnp.asarray(PROMPT), max_new_tokens=4).steps
    assert all(step.tokens for step in steps)
    assert adapt(engine, samples).updates == 1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_weights_of_any_mesh_enter_under_any_mesh(folder, engine, mesh, axis_type):
    """As tensors of a checkpoint, whose axes are put in order on the way. What leaves then is as before."""
    place = NamedSharding(mesh_of(axis_type), PartitionSpec("dp"))
    with jaxspec.load(folder / "other", drafter="none", progress=False, **SIZES) as other:
        answer = other.generate(PROMPT, max_new_tokens=8).token_ids
        tensors = open_checkpoint(folder / "other").tensors
        new = {name: jax.device_put(tensor.read(), place) for name, tensor in tensors.items()}
    before = engine.weights_version
    assert engine.update_weights(new) == before + 1
    assert engine.generate(PROMPT, max_new_tokens=8).token_ids == answer
    assert all(isinstance(array.sharding, SingleDeviceSharding) for array in arrays(engine.weights))


def test_weights_that_an_engine_is_loaded_with_may_have_any_mesh(folder, engine, mesh):
    place = NamedSharding(mesh_of(AxisType.Explicit), PartitionSpec())
    weights = jax.tree.map(lambda array: jax.device_put(np.array(array), place), engine.weights)
    with jaxspec.load(folder / "target", weights=weights, drafter="none", progress=False, **SIZES) as loaded:
        assert loaded.generate(PROMPT, max_new_tokens=4).token_ids
        assert isinstance(arrays(loaded.weights)[0].sharding, SingleDeviceSharding)


def test_an_array_enters_without_a_copy_and_without_its_mesh():
    """Some versions of JAX reshape none of an explicit mesh outside of it."""
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("dp",), axis_types=(AxisType.Explicit,))
    array = jax.device_put(np.ones((64, 64), np.float32), NamedSharding(mesh, PartitionSpec("dp")))
    assert entering(array).unsafe_buffer_pointer() == array.unsafe_buffer_pointer()
    assert isinstance(entering(array).sharding, SingleDeviceSharding)
    array.delete()
    assert entering(array) is array


@pytest.mark.parametrize("devices", ["1", "2"])
def test_a_program_with_a_mesh_of_two_devices_takes_what_leaves(devices):
    """From an engine on one of them, and from one on both, which do what `several_devices.meshes` says."""
    assert run("meshes", devices) == {devices: []}
