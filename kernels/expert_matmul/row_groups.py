"""Groups rows by the expert that they chose."""

import jax
import jax.numpy as jnp
from jaxspec_kernels.op import Op

FEW_ROWS = 64
"""Up to this many rows, finding the rows of an expert inside the kernel is faster than sorting before it."""


def _by_sorting(experts: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Sorts rows by their experts.

    Args:
      experts: i32[A], each in 0..count-1.
      count: the number of experts.

    Returns:
      `order` i32[A] and `starts` i32[count + 1]: the rows of expert e are order[starts[e] : starts[e + 1]].
    """
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    # Counting is one kernel; `searchsorted` would be a loop of small ones.
    starts = (experts < jnp.arange(count + 1)[:, None]).sum(axis=1, dtype=jnp.int32)
    return order, starts


group_rows = Op("group_rows", xla=_by_sorting, triton="expert_matmul.triton_groups")


def max_tiles(rows: int, count: int, block: int) -> int:
    """The most tiles that `rows` rows need, in tiles of up to `block` rows of one expert each."""
    chosen = min(rows, count)
    return chosen + (rows - chosen) // block
