"""Memory of every GPU that the other GPUs of the process write into."""

import ctypes
import os
import threading
from functools import cache
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MAX_PROGRAMS = 128
"""The most programs of one exchange, about one for each multiprocessor."""
CAPACITY = 2048
"""Lines of 16 bytes that a program sends at once."""
LINE_WORDS = 3
"""Words of 32 bits in a line; the fourth is the number of the exchange."""
HEADER = 128
"""Lines before the places for data: the number of each program's last exchange, and from `GREETING` on what
`_reach_each_other` writes, both in words of 32 bits."""
GREETING = MAX_PROGRAMS
MAX_DEVICES = 8


def num_devices(links: jax.Array) -> int:
    """D, from `PeerMemory.links` or one row of them."""
    return (links.shape[-1] - 3) // 2


class PeerMemory:
    """A mailbox on every device of a mesh, for the kernel of `collectives`; see there.

    Attributes:
      mailboxes: i32[D, …], one row a device; 8.4 MB for every device of the mesh.
      links: u32[D, 3 + 2 D], one row a device: the address of its mailbox, then those of all mailboxes, the
        low word first, and its index in the mesh. (Its own address is there twice, so that a kernel need not
        wait for the index first.) Addresses change from process to process, so a program takes them as an
        argument.
    """

    def __init__(self, mesh: Mesh):
        lines = HEADER + MAX_PROGRAMS * 2 * mesh.size * CAPACITY
        by_device = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
        empty = jax.jit(lambda: jnp.zeros((mesh.size, 4 * lines), jnp.int32), out_shardings=by_device)
        self.mailboxes = empty()
        parts = {part.device: part.data for part in self.mailboxes.addressable_shards}
        at = [parts[device].unsafe_buffer_pointer() for device in mesh.devices.flat]
        rows = [[*np.asarray([own, *at], np.uint64).view(np.uint32), rank] for rank, own in enumerate(at)]
        self.links = jax.device_put(np.asarray(rows, np.uint32), by_device)
        jax.block_until_ready(self.mailboxes)


_lock = threading.Lock()


def memory_of(mesh: Mesh) -> PeerMemory | None:
    """The memory of a mesh, or None if its devices cannot write into each other's.

    It is kept until the process ends: programs know only its address, so JAX would not wait for them before
    it freed it.
    """
    with _lock:
        return _memory_of(mesh)


@cache
def _memory_of(mesh: Mesh) -> PeerMemory | None:
    if why_not(mesh):
        return None
    memory = PeerMemory(mesh)
    return memory if _reach_each_other(mesh, memory) else None


def why_not(mesh: Mesh) -> str | None:
    """Why the devices cannot write into each other's memory; None if the driver says that they can."""
    devices = list(mesh.devices.flat)
    if not 1 < len(devices) <= MAX_DEVICES:
        return f"is for 2 to {MAX_DEVICES} devices"
    if any(device.process_index != jax.process_index() for device in devices):
        return "is for the devices of one process"
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return "is turned off by NCCL_P2P_DISABLE"
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default") not in ("default", "bfc"):
        return "needs XLA's default allocator, whose memory all GPUs can reach"
    ordinals = [device.local_hardware_id for device in devices]
    if not all(_can_access(a, b) for a, b in permutations(ordinals, 2)):
        return "needs GPUs that can access each other's memory"
    return None


def _can_access(ordinal: int, peer: int) -> bool:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    one, other, answer = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    # All three return 0 if they succeed.
    failed = (
        cuda.cuDeviceGet(ctypes.byref(one), ordinal)
        or cuda.cuDeviceGet(ctypes.byref(other), peer)
        or cuda.cuDeviceCanAccessPeer(ctypes.byref(answer), one, other)
    )
    return not failed and bool(answer.value)


def _reach_each_other(mesh: Mesh, memory: PeerMemory) -> bool:
    """Whether what each device writes arrives, which on some virtual machines it does not.

    A kernel that waits for it would wait forever.
    """
    from jaxspec_kernels.collectives.triton_kernel import greet

    spec = PartitionSpec(*mesh.axis_names)
    send = jax.jit(jax.shard_map(greet, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    jax.block_until_ready(send(memory.links))
    greetings = np.asarray(memory.mailboxes[:, GREETING : GREETING + mesh.size])
    return bool((greetings == np.arange(1, mesh.size + 1)).all())
