"""Sums and gathers over devices; those through peers' memory need two GPUs that can access each other."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxspec_kernels import collectives
from jaxspec_kernels.collectives import all_gather, peer_links, peer_memory, psum, psum_norm, through_peers

from jaxspec.config import MESH_AXIS
from jaxspec.engine.device.lowering import compiler_options
from jaxspec.sharding import make_mesh

DEVICES = 2
SPLIT = PartitionSpec(MESH_AXIS)


def links():
    found = peer_links(make_mesh(DEVICES)) if jax.device_count() >= DEVICES else None
    if found is None:
        pytest.skip(f"needs {DEVICES} GPUs that can access each other's memory")
    return found


def over_devices(program, *arrays, links):
    """Compiles `program` of each device's part of arrays that are stacked along a first axis."""
    mesh = make_mesh(DEVICES)

    def on_device(links, *parts):
        with through_peers(links):
            return jax.tree.map(lambda x: x[None], program(*(part[0] for part in parts)))

    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False)
    arrays = [jax.device_put(x, NamedSharding(mesh, SPLIT)) for x in arrays]
    options = compiler_options([], rows=1, num_devices=DEVICES)
    compiled = jax.jit(mapped).lower(links, *arrays).compile(options)
    return compiled, partial(compiled, links, *arrays)


def draw(shape, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.asarray(rng.integers(-(2**31), 2**31, size=(DEVICES, *shape)), dtype)
    return jnp.asarray(rng.normal(size=(DEVICES, *shape)), dtype)


@pytest.mark.parametrize("shape", [(2,), (4, 4096), (1, 2880), (37, 578), (128, 4096), (127, 4096)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_sum_is_that_of_float32_rounded_once(dtype, shape):
    x = draw(shape, dtype)
    compiled, run = over_devices(lambda x: psum(x, MESH_AXIS), x, links=links())
    assert "all-reduce" not in compiled.as_text()
    parts = np.asarray(x.astype(jnp.float32))
    wanted = np.asarray(jnp.asarray(parts[0] + parts[1]).astype(dtype))
    for _ in range(3):
        for got in np.asarray(run()):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(("shape", "along"), [((5,), 0), ((2, 32, 63), 2), ((2, 1, 7), 1), ((4, 64_128), 1)])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_a_gather_joins_the_parts_in_the_order_of_devices(dtype, shape, along):
    x = draw(shape, dtype)
    compiled, run = over_devices(lambda x: all_gather(x, MESH_AXIS, along=along), x, links=links())
    assert "all-gather" not in compiled.as_text()
    wanted = np.concatenate(np.asarray(x), axis=along)
    for got in np.asarray(run()):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    "shape", [(1, 2), (4, 4096), (3, 2880), (37, 578), (127, 4096), (130, 64), (9, 8192)]
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_sum_with_its_norm_rounds_as_its_steps_do(dtype, shape, has_bias):
    part, stream = draw(shape, dtype), draw(shape, dtype, seed=1)
    stream = jnp.broadcast_to(stream[:1], stream.shape)
    factors, bias = (
        jnp.broadcast_to(draw(shape[1:], dtype, seed)[:1], (DEVICES, shape[1])) for seed in (2, 3)
    )
    rounded = [np.asarray(x.astype(jnp.float32)) for x in (part, stream, factors, bias)]

    def program(part, stream, factors, bias):
        both = psum_norm(part, stream, bias if has_bias else None, factors, eps=1e-5)
        assert both is not None
        return both

    compiled, run = over_devices(program, part, stream, factors, bias, links=links())
    assert "all-reduce" not in compiled.as_text()

    def as_stored(x):
        return np.asarray(jnp.asarray(x).astype(dtype).astype(jnp.float32))

    total = as_stored(rounded[0][0] + rounded[0][1])
    if has_bias:
        total = as_stored(total + rounded[3][0])
    total = as_stored(rounded[1][0] + total)
    scale = 1 / np.sqrt(np.mean(total.astype(np.float64) ** 2, axis=-1, keepdims=True) + 1e-5)
    for _ in range(3):
        totals, normed = (np.asarray(x.astype(jnp.float32)) for x in run())
        np.testing.assert_array_equal(totals, np.stack([total] * DEVICES))
        np.testing.assert_array_equal(normed[0], normed[1])
        # Two roundings, of which the first may fall to the other side.
        step = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(normed[0], total * scale * rounded[2][0], rtol=1.6 * step, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dtypes"),
    [
        ((4, 64), (jnp.float32, jnp.float32)),
        ((4, 64), (jnp.bfloat16, jnp.float32)),
        ((4, 63), (jnp.bfloat16, jnp.bfloat16)),
        ((2, 16_384), (jnp.bfloat16, jnp.bfloat16)),
        ((2048, 4096), (jnp.bfloat16, jnp.bfloat16)),
    ],
)
def test_other_norms_are_left_to_xla(shape, dtypes):
    part, stream = (jnp.zeros(shape, dtype) for dtype in dtypes)
    pretended = jnp.zeros((1, 3 + 2 * DEVICES), jnp.uint32)
    with through_peers(pretended):
        assert psum_norm(part, stream, None, jnp.ones(shape[1:], dtypes[0]), eps=1e-5) is None
    with through_peers(None):
        assert psum_norm(part, part, None, jnp.ones(shape[1:], dtypes[0]), eps=1e-5) is None


def test_exchanges_of_all_sizes_follow_each_other():
    """A place must not be overwritten before all have read it, whichever programs took part last."""
    sizes = np.random.default_rng(1).permutation([8, 304, 4096, 40_000, 300_000, 520_000] * 8).tolist()
    x = draw((max(sizes),))

    def summed_norm(x):
        part = x.astype(jnp.bfloat16).reshape(2, 384)
        factors = jnp.ones(384, jnp.bfloat16)
        both = psum_norm(part, part * 0, None, factors, eps=1e-5)
        total = psum(part, MESH_AXIS) if both is None else both[0]
        return total.astype(jnp.float32).reshape(-1) * 0.5

    def program(x):
        def chain(x, _):
            for size in sizes:
                total = psum(x[:size], MESH_AXIS)
                # Half of the sum, and a step to the side that depends on the device.
                x = jnp.concatenate([x[size:], total * 0.5 + 0.01 * x[:size]])
                x = x.at[:768].set(summed_norm(x[:768]))
            return x, all_gather(x[:8], MESH_AXIS, along=0)

        return jax.lax.scan(chain, x, length=20)

    _, run = over_devices(program, x, links=links())
    _, through_xla = over_devices(program, x, links=None)
    first = jax.tree.map(np.asarray, run())
    for again in (jax.tree.map(np.asarray, run()) for _ in range(5)):
        jax.tree.map(np.testing.assert_array_equal, again, first)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5), first, jax.tree.map(np.asarray, through_xla())
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("devices", [2, 3, 8])
def test_an_exact_sum_that_is_left_to_xla_is_the_one_of_the_kernel(monkeypatch, dtype, devices):
    """In the order of devices, in float32, rounded once: for every number of rows."""
    monkeypatch.setattr(collectives, "is_exact", lambda: True)
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(devices, 300, 96)) * np.exp(2 * rng.normal(size=(devices, 300, 96)))
    x = jnp.asarray(wide, dtype)
    over = jax.jit(jax.vmap(partial(psum, axis=MESH_AXIS), axis_name=MESH_AXIS))
    total, *others = np.asarray(x, np.float32)
    for part in others:
        total = total + part
    wanted = np.asarray(jnp.asarray(total).astype(dtype))
    for number in (1, 2, 5, 16, 129, 300):
        for got in np.asarray(over(x[:, :number])):
            np.testing.assert_array_equal(got, wanted[:number])


def test_an_exact_sum_of_integers_has_all_their_bits(monkeypatch):
    monkeypatch.setattr(collectives, "is_exact", lambda: True)
    x = jnp.asarray([[(1 << 24) + 1, -7], [1 << 28, 3]], jnp.int32)
    got = jax.vmap(partial(psum, axis=MESH_AXIS), axis_name=MESH_AXIS)(x)
    np.testing.assert_array_equal(got, np.broadcast_to(np.asarray(x).sum(axis=0), (2, 2)))


def test_large_arrays_are_left_to_xla():
    compiled, _ = over_devices(lambda x: psum(x, MESH_AXIS), draw((2048, 4096)), links=links())
    assert "all-reduce" in compiled.as_text()


def test_without_links_everything_is_left_to_xla():
    mesh = make_mesh()
    x = jnp.arange(6.0).reshape(2, 3)

    def program(x):
        with through_peers(None):
            return psum(x, MESH_AXIS), all_gather(x, MESH_AXIS, along=1)

    mapped = jax.shard_map(program, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False)
    text = jax.jit(mapped).lower(x).as_text()
    assert "all_reduce" in text
    assert "all_gather" in text


@pytest.mark.parametrize(
    ("environment", "processes", "accesses", "why"),
    [
        ({}, (0,), True, "2 to 8 devices"),
        ({}, (0, 1), True, "one process"),
        ({"NCCL_P2P_DISABLE": "1"}, (0, 0), True, "NCCL_P2P_DISABLE"),
        ({"NCCL_P2P_DISABLE": "0"}, (0, 0), True, None),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}, (0, 0), True, "allocator"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, (0, 0), True, "allocator"),
        ({}, (0, 0, 0), False, "access each other's memory"),
        ({}, (0,) * 8, True, None),
        ({}, (0,) * 9, True, "2 to 8 devices"),
    ],
)
def test_why_devices_do_not_write_into_each_others_memory(monkeypatch, environment, processes, accesses, why):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(peer_memory, "_can_access", lambda a, b: accesses or (a, b) != (2, 1))
    devices = [SimpleNamespace(process_index=p, local_hardware_id=i) for i, p in enumerate(processes)]
    found = peer_memory.why_not(SimpleNamespace(devices=np.array(devices)))
    assert found is None if why is None else why in found


def test_threads_that_compile_programs_share_the_memory_of_their_mesh(monkeypatch):
    """A second memory would be freed while programs write into it."""
    mesh, start = make_mesh(), threading.Barrier(8)
    monkeypatch.setattr(peer_memory, "why_not", lambda mesh: None)
    monkeypatch.setattr(peer_memory, "_reach_each_other", lambda mesh, memory: True)
    peer_memory._memory_of.cache_clear()

    def found(_):
        start.wait()
        return peer_memory.memory_of(mesh)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(found, range(8)))) == 1
    own, first, rank = np.split(np.asarray(peer_memory.memory_of(mesh).links)[0], [2, 4])
    (mailbox,) = peer_memory.memory_of(mesh).mailboxes.addressable_shards
    assert own.view(np.uint64) == first.view(np.uint64) == mailbox.data.unsafe_buffer_pointer()
    assert rank == 0
    peer_memory._memory_of.cache_clear()


def test_without_a_driver_no_device_can_access_another(monkeypatch):
    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(peer_memory.ctypes, "CDLL", absent)
    assert not peer_memory._can_access(0, 1)


@pytest.mark.parametrize(
    ("failing", "answer", "expected"),
    [(None, 1, True), (None, 0, False), (2, 1, False), (5, 1, False), ("access", 1, False)],
)
def test_the_driver_says_whether_a_device_can_access_another(monkeypatch, failing, answer, expected):
    def device_get(device, ordinal):
        device._obj.value = 10 + ordinal
        return ordinal == failing

    def can_access(found, one, other):
        assert (one.value, other.value) == (12, 15)
        found._obj.value = answer
        return failing == "access"

    cuda = SimpleNamespace(cuDeviceGet=device_get, cuDeviceCanAccessPeer=can_access)
    monkeypatch.setattr(peer_memory.ctypes, "CDLL", lambda name: cuda)
    assert peer_memory._can_access(2, 5) == expected
