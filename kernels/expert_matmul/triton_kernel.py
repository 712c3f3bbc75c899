"""Products with chosen experts in Triton kernels that read an expert in place, once per tile of rows."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
from jaxspec_kernels.calls.triton_call import triton_call
from jaxspec_kernels.expert_matmul import supports
from jaxspec_kernels.expert_matmul.mxfp4_weight import Mxfp4Weight
from jaxspec_kernels.expert_matmul.reference import expert_matmul as reference
from jaxspec_kernels.expert_matmul.reference import gated_expert_matmul as gated_reference
from jaxspec_kernels.expert_matmul.row_groups import FEW_ROWS, group_rows, max_tiles
from jaxspec_kernels.expert_matmul.triton_codes import coded_expert_matmul
from jaxspec_kernels.expert_matmul.triton_dense import dense_expert_matmul
from jaxspec_kernels.expert_matmul.triton_mxfp4 import mxfp4_expert_matmul
from jaxspec_kernels.op import is_exact
from jaxspec_kernels.packed_matmul import CodedExperts


def expert_matmul(
    x: jax.Array, experts: jax.Array, weights: jax.Array | Mxfp4Weight | CodedExperts
) -> jax.Array:
    """See `reference.expert_matmul`, which is called for cases that the kernels do not support."""
    if not (supports(x.dtype, weights) and x.size):
        return reference(x, experts, weights)
    return _multiply(x, experts, weights, weights.shape[2:], jnp.dtype(jnp.float32))


def gated_expert_matmul(
    x: jax.Array, experts: jax.Array, gate_up: jax.Array | Mxfp4Weight | CodedExperts
) -> jax.Array:
    """See `reference.gated_expert_matmul`, which is called for cases that the kernel does not support."""
    if not (isinstance(gate_up, CodedExperts) and supports(x.dtype, gate_up) and x.size):
        return gated_reference(x, experts, gate_up)
    return _multiply(x, experts, gate_up, gate_up.shape[3:], x.dtype, is_gated=True)


def _multiply(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array | Mxfp4Weight | CodedExperts,
    outputs: tuple[int, ...],
    dtype: jnp.dtype,
    *,
    is_gated: bool = False,
) -> jax.Array:
    """The products, [A, outputs]; those of experts in codes may be gated: SiLU of gates times ups."""
    rows, width, count = len(experts), x.shape[1], weights.shape[0]
    columns = math.prod(outputs)
    grouped = rows > FEW_ROWS
    # Twice the average number of rows per expert: then the rows of most experts fit into one tile.
    fewest = 8 if isinstance(weights, CodedExperts) else 16
    block_rows = min(64, max(fewest, triton.next_power_of_2(2 * rows // count)))
    is_low = block_rows <= 16
    options: dict[str, Any] = {
        "rows": rows,
        "per_input": rows // len(x),
        "count": count,
        "width": width,
        "columns": columns,
        "grouped": grouped,
        "padded": triton.next_power_of_2(count if grouped else rows),
        "block_rows": block_rows,
    }
    if isinstance(weights, Mxfp4Weight):
        kernel, arrays = mxfp4_expert_matmul, [weights.values, weights.scale]
        x = x.reshape(len(x), width // 4, 4).swapaxes(1, 2)
        # These sizes let a thread copy four scales at once, a word: smaller copies are not prefetched, and
        # tiles would wait for them. More rows without more outputs would read as much of x as of weights.
        # With eight warps a multiprocessor runs fewer tiles at once: those of 64 rows took 1.5 times as long.
        options |= {"block_outputs": 64 if is_low else 128, "num_warps": 4}
        # The order of sums depends on the width of a block.
        is_wide = is_low and not is_exact()
        options |= {"block_width": 256 if is_wide else 128, "num_stages": 3 if block_rows < 64 else 4}
    elif isinstance(weights, CodedExperts):
        # Without offsets, that pointer is never read.
        offset = weights.scale if weights.offset is None else weights.offset
        kernel, arrays = coded_expert_matmul, [weights.codes, weights.scale, offset]
        options |= {"has_offset": weights.offset is not None, "is_int8": weights.is_int8}
        options |= {"per_word": 16 // weights.bits, "block_words": weights.codes.shape[-1] // 2}
        options |= {"tile": weights.codes.shape[-2]}
        options |= {"group": width // weights.scale.shape[1], "has_zero": weights.has_zero}
        options |= {"scale_rows": weights.shape[-1] // weights.scale.shape[-1]}
        # Few rows: the best of 26 tiles for 32 and 256 rows of Qwen3-30B's experts.
        is_fp8 = weights.bits == 8 and not weights.is_int8
        options |= {"block_outputs": 64 if is_low or not is_fp8 else 128}
        options |= {"num_warps": 2 if is_low else 4, "num_stages": 3}
        options |= {"is_gated": is_gated}
    else:
        kernel, arrays = dense_expert_matmul, [weights]
        options |= {"block_outputs": 64 if is_low else 128, "num_warps": 4}
        options |= {"block_width": 64, "num_stages": 4}
    groups = group_rows(experts, count) if grouped else (experts, experts)
    (y,) = triton_call(
        kernel,
        (x, *groups, *arrays),
        [jax.ShapeDtypeStruct((rows, columns), dtype)],
        grid=(
            triton.cdiv(math.prod(weights.shape[2:]), options["block_outputs"]),
            max_tiles(rows, count, block_rows) if grouped else rows,
        ),
        **options,
    )
    return y.reshape(rows, *outputs)
