"""Weights in memory become the parameters that the same weights in a file become."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_files import golden_checkpoint
from jax.sharding import NamedSharding, PartitionSpec
from memory import live_bytes

from jaxspec.files import Checkpoint, CheckpointError
from jaxspec.models.target import load_target, plan_target_update, plan_weights
from jaxspec.weights import array_weights
from jaxspec.weights.array_weights import batches, finite_check, overwrite

FAMILIES = (
    "llama-tied",
    "qwen2-tied",
    "qwen3-tied",
    "qwen3-moe",
    "gemma3",
    "glm4",
    "glm4-moe-lite",
    "deepseek-v3",
    "gpt-oss",
    "gpt-oss-mxfp4",
)


def leaves(module):
    return jax.tree.leaves(nnx.state(module))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name):
    checkpoint = golden_checkpoint(name)
    arrays = {name: jnp.asarray(tensor.read()) for name, tensor in checkpoint.tensors.items()}
    dtype = jnp.dtype(jnp.float32)
    expected = leaves(load_target(checkpoint, dtype=dtype))
    bare = Checkpoint("config.json", checkpoint.config, {})
    target = plan_weights(bare, arrays, None, dtype=dtype).read()
    for own, other in zip(leaves(target), expected, strict=True):
        np.testing.assert_array_equal(own, other)
    zeros = {name: jnp.asarray(np.zeros_like(array)) for name, array in arrays.items()}
    overwrite(batches(plan_target_update(target, zeros, None)))
    assert all(not np.asarray(leaf).any() for leaf in leaves(target))
    overwrite(batches(plan_target_update(target, arrays, None)))
    for own, other in zip(leaves(target), expected, strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.fixture
def seven_layers():
    checkpoint = golden_checkpoint("llama-seven-layers")
    arrays = {name: jnp.asarray(tensor.read()) for name, tensor in checkpoint.tensors.items()}
    return load_target(checkpoint, dtype=jnp.float32), arrays


@pytest.mark.parametrize("limit", [512 << 20, 10_000])
def test_a_batch_is_one_program_within_its_bound(seven_layers, monkeypatch, limit):
    """It has no memory of its own for parameters, and for copies on the way no more than they take."""
    target, arrays = seven_layers
    monkeypatch.setattr(array_weights, "BATCH_BYTES", limit)
    expected = [np.asarray(leaf) for leaf in leaves(target)]
    ran = []
    program = array_weights._program

    def watched(conversion):
        def run(into, every):
            ran.append(([leaf.nbytes for leaf in into], program(conversion).lower(into, every).compile()))
            return program(conversion)(into, every)

        return run

    monkeypatch.setattr(array_weights, "_program", watched)
    overwrite(batches(plan_target_update(target, {name: -array for name, array in arrays.items()}, None)))
    for own, other in zip(leaves(target), expected, strict=True):
        np.testing.assert_array_equal(own, -other)
    for sizes, compiled in ran:
        memory = compiled.memory_analysis()
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes <= 8 * len(sizes)  # their addresses
        assert memory.temp_size_in_bytes <= sum(sizes) + 4096
        assert len(sizes) == 1 or sum(sizes) <= limit
    # Embedding; q/k/v, o, gate and up, and down of the layers; their two norms and the last.
    counts = sorted(len(sizes) for sizes, _ in ran)
    assert (counts == [1, 7, 7, 7, 7, 15]) == (limit > 1 << 20)
    assert sum(counts) == len(expected)


def test_copies_from_elsewhere_are_made_for_one_batch_at_a_time(seven_layers, monkeypatch):
    target, arrays = seven_layers
    events = []
    near, wait = array_weights._near, jax.block_until_ready
    monkeypatch.setattr(array_weights, "_near", lambda array, place: events.append("copy") or jnp.copy(array))
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: events.append("wait") or wait(arrays))
    every = batches(plan_target_update(target, arrays, None))
    overwrite(every)
    counts = [len(each) for each in "".join(event[0] for event in events).split("w")]
    assert counts == [*(sum(len(stored) for _, stored in each.parameters) for each in every), 0]
    events.clear()
    monkeypatch.setattr(array_weights, "_near", near)
    overwrite(every)
    assert not events


def moved(layers):
    """Each in the place of the next."""
    return [*layers[1:], layers[0]]


def mixed(layers):
    """Half of each in the next one's place."""
    return [
        layer | {"attention": other["attention"]} for layer, other in zip(layers, moved(layers), strict=True)
    ]


@pytest.mark.parametrize("move", [moved, mixed])
def test_own_arrays_in_other_places_are_refused_before_anything_is_written(seven_layers, move):
    """The others would be overwritten before they are read."""
    target, _ = seven_layers
    tree = nnx.to_pure_dict(nnx.state(target))
    before = jax.tree.map(lambda leaf: np.array(leaf, copy=True), tree)
    tree["layers"] = dict(enumerate(move([tree["layers"][i] for i in range(7)])))
    every = batches(plan_target_update(target, tree, None))
    with pytest.raises(
        CheckpointError, match=r"weights: the array of .* is the engine's own of .*pass a copy"
    ):
        overwrite(every)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(target)), before)
    tree = jax.tree.map(jnp.copy, tree)
    expected = jax.tree.map(lambda leaf: np.array(leaf, copy=True), tree)
    overwrite(batches(plan_target_update(target, tree, None)))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(target)), expected)


def test_own_arrays_come_back_in_their_places_as_other_arrays_of_the_same_memory(seven_layers, monkeypatch):
    """With memory for a copy of one of them, and never of all."""
    target, _ = seven_layers
    tree = nnx.to_pure_dict(nnx.state(target))
    place = NamedSharding(jax.make_mesh((1,), ("other",)), PartitionSpec())
    tree["layers"] = jax.device_put(tree["layers"], place)
    expected = jax.tree.map(lambda leaf: np.array(leaf, copy=True), tree)
    largest = max(leaf.nbytes for leaf in leaves(target))
    peaks, read = [], array_weights.Batch.read

    def watched(batch, into):
        peaks.append(live_bytes())
        return read(batch, into)

    monkeypatch.setattr(array_weights.Batch, "read", watched)
    gc.collect()
    before = live_bytes()
    overwrite(batches(plan_target_update(target, tree, None)))
    assert max(peaks) - before <= largest
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(target)), expected)


def test_two_tensors_of_one_name_are_both_checked(seven_layers):
    target, arrays = seven_layers
    good = plan_target_update(target, arrays, None)
    bad = {name: array * jnp.nan if name == "model.norm.weight" else array for name, array in arrays.items()}
    for every in (
        [*good, *plan_target_update(target, bad, None)],
        [*plan_target_update(target, bad, None), *good],
    ):
        with pytest.raises(CheckpointError, match=r"tensor 'model\.norm\.weight' holds NaN"):
            finite_check(every)()
    finite_check(good)()
