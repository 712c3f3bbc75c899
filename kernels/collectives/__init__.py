"""Sums and gathers over the devices of a mesh axis: XLA's, or a kernel for small arrays on a few GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxspec_kernels.collectives.peer_memory import memory_of, num_devices
from jaxspec_kernels.dispatch import why_not

_MAX_BYTES = 1 << 21

_peers: ContextVar[jax.Array | None] = ContextVar("peers", default=None)


@contextmanager
def through_peers(links: jax.Array | None) -> Iterator[None]:
    """While a program is traced, its small sums and gathers use the kernel.

    On two H100s, a sum of 128 rows of 4,096 in bfloat16 takes 13 us instead of NCCL's 19, and XLA cuts its
    CUDA graphs at NCCL's calls but not at kernels (docs/measurements.md, "Several GPUs").

    Args:
      links: u32[1, 3 + 2 D], this device's row of `PeerMemory.links`; None to leave everything to XLA.
    """
    token = _peers.set(links)
    try:
        yield
    finally:
        _peers.reset(token)


def peer_links(mesh: Mesh) -> jax.Array | None:
    """`PeerMemory.links` of a mesh, or None if its devices cannot write into each other's memory."""
    if mesh.size == 1 or why_not("triton"):
        return None
    memory = memory_of(mesh)
    return None if memory is None else memory.links


def psum(x: jax.Array, axis: str) -> jax.Array:
    """The sum of x over the devices of a mesh axis, the same bits on all of them."""
    links = _peers.get()
    is_float = x.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
    if links is None or not is_float or x.nbytes % 4 or not _is_small(x, links):
        return lax.psum(x, axis)
    from jaxspec_kernels.collectives.triton_kernel import peer_sum

    return peer_sum(x, links)


def all_gather(x: jax.Array, axis: str, *, along: int) -> jax.Array:
    """x of all devices of a mesh axis, concatenated along one of its own axes."""
    links = _peers.get()
    if links is None or x.dtype.itemsize != 4 or not _is_small(x, links):
        return lax.all_gather(x, axis, axis=along, tiled=True)
    from jaxspec_kernels.collectives.triton_kernel import peer_gather

    shape = list(x.shape)
    shape[along] *= num_devices(links)
    return jnp.moveaxis(peer_gather(x, links), 0, along).reshape(shape)


def _is_small(x: jax.Array, links: jax.Array) -> bool:
    # A device sends all of x to every other one, twice as many bytes with the numbers, so NCCL is faster for
    # larger arrays.
    return 0 < x.nbytes * (num_devices(links) - 1) <= _MAX_BYTES


__all__ = ["all_gather", "peer_links", "psum", "through_peers"]
