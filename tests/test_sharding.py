"""Which axis of an array is split, on meshes without devices, and what enters programs on shards."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxspec_kernels.expert_matmul import Mxfp4Weight

from jaxspec.config import MESH_AXIS
from jaxspec.sharding import on_shards, sharding
from jaxspec.weights.packed_weights import packed_sharding

T = MESH_AXIS
GATE_UP = ("experts", "embed", None, "expert_inner")
DOWN = ("experts", "expert_inner", "embed")


def mesh(devices):
    return AbstractMesh((devices,), (T,))


@pytest.mark.parametrize(
    ("devices", "axes", "shape", "spec"),
    [
        (2, ("embed", "kv_heads", "group", "head_dim"), (4096, 8, 6, 128), P(None, T, None, None)),
        (
            8,
            ("pages", "kv_heads", None, "page", "head_dim"),
            (9, 4, 2, 16, 64),
            P(None, None, None, None, None),
        ),
        (2, ("embed", "vocab"), (4096, 128256), P(None, T)),
        # Each word of random bits serves two tokens.
        (2, ("embed", "vocab"), (4096, 128254), P(None, None)),
        # 2880 is 90 blocks of 32: 45 for each of two devices. Four devices get eight experts each instead.
        (2, GATE_UP, (32, 2880, 2, 2880), P(None, None, None, T)),
        (4, GATE_UP, (32, 2880, 2, 2880), P(T, None, None, None)),
        (2, DOWN, (32, 2880, 2880), P(None, T, None)),
        (4, DOWN, (32, 2880, 2880), P(T, None, None)),
        (4, ("experts", None, "expert_inner"), (32, 2, 2880), P(T, None, None)),
        (4, None, (32, 2880), P(None, None)),
    ],
)
def test_the_first_axis_of_the_table_that_divides_is_split(devices, axes, shape, spec):
    assert sharding(mesh(devices), axes, shape).spec == spec


@pytest.mark.parametrize(("devices", "cut"), [(2, (1, 45)), (4, (0, 8))])
def test_packed_experts_are_cut_where_the_weights_are(devices, cut):
    """Values have inputs as their last axis, four per word; scales have one per 32 inputs."""
    values = jax.ShapeDtypeStruct((32, 2880, 720), jnp.uint16)
    weight = Mxfp4Weight(values, jax.ShapeDtypeStruct((32, 90, 2880), jnp.uint8))
    placed = packed_sharding(weight, mesh(devices), DOWN)
    axis, size = cut
    scales = placed.scale.shard_shape(weight.scale.shape)
    words = placed.values.shard_shape(weight.values.shape)
    assert scales[axis] == size
    assert (words[0], words[1], words[2] * 4) == (scales[0], scales[2], scales[1] * 32)


def test_no_array_without_elements_enters_or_leaves_a_program_on_shards(monkeypatch):
    """XLA of jax 0.11.2 would die of it; the state of an engine without a head has one."""
    passed = []

    def on_one(program, **_):
        def run(*parts):
            results = program(*parts)
            passed.extend(jax.tree.leaves((parts, results)))
            return results

        return run

    def program(kept, rest):
        assert [kept["hidden"].shape, kept["words"].shape, rest] == [(2, 0), (3,), None]
        return {"hidden": kept["hidden"] + 1, "words": kept["words"] + 1}, jnp.zeros((0, 5), jnp.int32)

    monkeypatch.setattr(jax, "shard_map", on_one)
    kept = {"hidden": jnp.zeros((2, 0), jnp.bfloat16), "words": jnp.arange(3)}
    whole = NamedSharding(Mesh(np.asarray(jax.devices()[:1]), (T,)), P())
    split = on_shards(program, SimpleNamespace(size=4), (whole, whole), (whole, whole))
    results, nothing = jax.jit(split)(kept, None)
    assert [x.shape for x in passed] == [(2, 4), (3,), (2, 4), (3,), (4, 5)]
    assert (results["hidden"].shape, results["hidden"].dtype) == ((2, 0), jnp.bfloat16)
    np.testing.assert_array_equal(results["words"], [1, 2, 3])
    assert (nothing.shape, nothing.dtype) == ((0, 5), jnp.int32)
