"""Sums and gathers over the devices of a mesh axis: XLA's, or kernels for small arrays on a few GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxspec_kernels.collectives.peer_memory import CAPACITY, LINE_WORDS, memory_of, num_devices
from jaxspec_kernels.op import is_exact, why_not

_MAX_BYTES = 1 << 21

_peers: ContextVar[jax.Array | None] = ContextVar("peers", default=None)


@contextmanager
def through_peers(links: jax.Array | None) -> Iterator[None]:
    """While a program is traced, its small sums and gathers use the kernels.

    On two H200s, a sum of 128 rows of 4,096 in bfloat16 takes 7 us (NCCL: 19 on two H100s), and XLA cuts its
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
        return _sum_of_gathered(x, axis) if is_float and is_exact() else lax.psum(x, axis)
    from jaxspec_kernels.collectives.triton_kernel import peer_sum

    return peer_sum(x, links)


def _sum_of_gathered(x: jax.Array, axis: str) -> jax.Array:
    """The sum as the kernel computes it: in the order of the devices, in float32, rounded once.

    The order of XLA's sum, or NCCL's, depends on the size of x.
    """
    parts = lax.all_gather(x, axis).astype(jnp.float32)
    return sum(parts[1:], parts[0]).astype(x.dtype)


def psum_norm(
    x: jax.Array, stream: jax.Array, bias: jax.Array | None, factors: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array] | None:
    """A sum over the devices, and the norm of rows to which it is added, in one kernel.

    Args:
      x: [N, M], what this device adds.
      stream: [N, M], to which the sum is added.
      bias: [M], which is added to the sum first.
      factors: [M], of the normed rows.
      eps: added to the mean of squares.

    Returns:
      `stream + (psum(x) + bias)`, and `models.layers.RMSNorm` of it, [N, M] both, with every intermediate
      result rounded to the dtype of x. None where there is no kernel for these arrays.
    """
    links = _peers.get()
    if links is None or x.dtype not in (jnp.bfloat16, jnp.float16) or x.ndim != 2 or x.shape[1] % 2:
        return None
    if is_exact():
        return None  # large sums are normed by another kernel, which sums squares in another order
    if any(other is not None and other.dtype != x.dtype for other in (stream, bias, factors)):
        return None
    if x.shape[1] > 2 * LINE_WORDS * CAPACITY or not _is_small(x, links):
        return None
    from jaxspec_kernels.collectives.triton_kernel import peer_sum_norm

    return peer_sum_norm(x, stream, bias, factors, links, eps=eps)


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
    # A device sends all of x to every other one, and a fourth word with every three, so NCCL is faster for
    # larger arrays.
    return 0 < x.nbytes * (num_devices(links) - 1) <= _MAX_BYTES


__all__ = ["all_gather", "peer_links", "psum", "psum_norm", "through_peers"]
