"""Products with packed experts on a CPU, which read each chosen expert once and in place.

Rows are sorted by expert and multiplied in groups, with the code of `matmul`'s kernels for packed weights. A
row's sums do not depend on the other rows.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxspec_kernels.calls import numba_call as call
from jaxspec_kernels.expert_matmul.packed_experts import PackedExperts
from jaxspec_kernels.expert_matmul.reference import expert_matmul as reference
from jaxspec_kernels.expert_matmul.reference import repeat_rows
from jaxspec_kernels.matmul import numba_int8, numba_packed
from jaxspec_kernels.matmul.numba_int8 import allocate_rounded, code_bytes, rounded_from
from jaxspec_kernels.matmul.packed_weight import TILE
from jaxspec_kernels.matmul.weight_code import Form, arrays_of


def expert_matmul(x: jax.Array, experts: jax.Array, weights: Any, *, path: str | None = None) -> jax.Array:
    """See `reference.expert_matmul`, which computes products that this kernel does not support.

    Args:
      x, experts, weights: see there. The kernel is for float32 rows and `PackedExperts`.
      path: one of `numba_int8.available_paths` for rows rounded to 8 bits; None for the fastest.
    """
    if not isinstance(weights, PackedExperts) or x.dtype != jnp.float32 or not x.shape[0]:
        return reference(x, experts, weights)
    stack, outputs = weights.stack, weights.shape[2:]
    x = repeat_rows(x, len(experts))
    rounding = None
    if stack.activations == "int8":
        rounding = (path or numba_int8.available_paths()[0], stack.row_block)
    target = _target(Form.of(stack), rounding)
    arrays = [array for array in (stack.values, *stack.factors) if array is not None]
    y = jax.ShapeDtypeStruct((x.shape[0], weights.size // (weights.shape[0] * weights.shape[1])), jnp.float32)
    return jax.ffi.ffi_call(target, y)(x, *arrays, experts.astype(jnp.int32)).reshape(-1, *outputs)


@call.once
def _target(form: Form, rounding: tuple[str, int] | None) -> str:
    """Compiles and registers the kernel for a form of weight; returns its name.

    Args:
      form: the form of the weights.
      rounding: for rows rounded to 8 bits, the path and the inputs that share a scale; None for float32 rows.
    """
    is_rounded = rounding is not None
    path, row_block = rounding or ("float32", 0)
    block, places, experts = form.block, form.places, 1 + form.arrays
    quantize: Any = None
    size_of_code = 0
    if is_rounded:
        multiply = partial(numba_int8.multiply_code, form, path, row_block)
        quantize, size_of_code = numba_int8.quantize_code(form, path, row_block), code_bytes(form, path)
    else:
        multiply = partial(numba_packed.multiply_code, form)
    # Each multiplies so many rows together.
    multiply_8, multiply_4, multiply_2, multiply_1 = map(multiply, (8, 4, 2, 1))

    # Numba removes the branches that `is_rounded` rules out.
    def kernel(frame, part, parts):
        x_, w_, y_ = call.argument(frame, 0), call.argument(frame, 1), call.result(frame, 0)
        rows, width = call.shape(x_, 2)
        outputs = call.shape(y_, 2)[1]
        tiles = (outputs + TILE - 1) // TILE
        count = call.shape(w_, 1)[0] // tiles
        y, chosen = call.floats(y_), call.integers(call.argument(frame, experts))
        # An expert's rows are order[begins[expert] : begins[expert + 1]].
        begins_at, ends_at = call.allocate(8 * (count + 1)), call.allocate(8 * count)
        order_at = call.allocate(8 * rows)
        begins, ends, order = call.words_at(begins_at), call.words_at(ends_at), call.words_at(order_at)
        for expert in range(count + 1):
            begins[expert] = 0
        for row in range(rows):
            begins[min(max(chosen[row], 0), count - 1) + 1] += 1
        for expert in range(count):
            ends[expert] = begins[expert]
            begins[expert + 1] += begins[expert]
        for row in range(rows):
            expert = min(max(chosen[row], 0), count - 1)
            order[ends[expert]] = row
            ends[expert] += 1
        if is_rounded:
            rounded = allocate_rounded(rows, width, size_of_code, row_block, block)
            for i in range(rows):
                of_row = rounded_from(rounded, i, width, size_of_code, row_block, block)
                quantize(call.address(x_) + 4 * order[i] * width, width // block, of_row)
        else:
            x, sorted_at = call.floats(x_), call.allocate(4 * rows * width)
            by_expert = call.floats_at(sorted_at)
            for i in range(rows):
                for j in range(width):
                    by_expert[width * i + j] = x[width * order[i] + j]
        sums_at = call.allocate(4 * 8 * TILE)
        sums = call.floats_at(sums_at)
        for expert in range(count):
            if begins[expert] == begins[expert + 1]:
                continue
            for index in range(tiles * part // parts, tiles * (part + 1) // parts):
                left = index * TILE
                size = min(TILE, outputs - left)
                arrays = arrays_of(frame, places, expert * tiles + index, width)
                # A tile of the weight stays in the cache while all groups of rows are multiplied.
                top = begins[expert]
                while top < begins[expert + 1]:
                    rest = begins[expert + 1] - top
                    if is_rounded:
                        of_group = rounded_from(rounded, top, width, size_of_code, row_block, block)
                    else:
                        of_group = sorted_at + 4 * top * width
                    if rest >= 8:
                        group = 8
                        multiply_8(of_group, width, arrays, sums_at)
                    elif rest >= 4:
                        group = 4
                        multiply_4(of_group, width, arrays, sums_at)
                    elif rest >= 2:
                        group = 2
                        multiply_2(of_group, width, arrays, sums_at)
                    else:
                        group = 1
                        multiply_1(of_group, width, arrays, sums_at)
                    for i in range(group):
                        for j in range(size):
                            y[outputs * order[top + i] + left + j] = sums[TILE * i + j]
                    top += group
        if is_rounded:
            for scratch in rounded:
                call.release(scratch)
        else:
            call.release(sorted_at)
        for scratch in (begins_at, ends_at, order_at, sums_at):
            call.release(scratch)
        return 0

    name = f"jaxspec_expert_matmul_{form.name}_{path}_{row_block}"
    return call.register(name, kernel, fastmath=set())
