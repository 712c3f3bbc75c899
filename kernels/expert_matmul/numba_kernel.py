"""Products with packed experts on a CPU, which read each chosen expert once and in place.

Rows are sorted by expert and multiplied in groups, with the code of `matmul`'s kernels for packed weights. A
row's sums do not depend on the other rows.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxspec_kernels import numba_call as call
from jaxspec_kernels.expert_matmul.packed_experts import PackedExperts
from jaxspec_kernels.expert_matmul.reference import expert_matmul as reference
from jaxspec_kernels.matmul import numba_int8, numba_packed
from jaxspec_kernels.matmul.packed_weight import TILE
from jaxspec_kernels.matmul.weight_code import Form

GROUPS = (8, 4, 2, 1)
"""Numbers of rows that are multiplied together; the largest that an expert has rows left for is taken."""


def expert_matmul(x: jax.Array, experts: jax.Array, weights: Any, *, path: str | None = None) -> jax.Array:
    """See `reference.expert_matmul`, which computes products that this kernel does not support.

    Args:
      x, experts, weights: see there. The kernel is for float32 rows and `PackedExperts`.
      path: one of `numba_int8.available_paths` for rows rounded to 8 bits; None for the fastest.
    """
    if not isinstance(weights, PackedExperts) or x.dtype != jnp.float32 or not x.shape[0]:
        return reference(x, experts, weights)
    stack, outputs = weights.stack, weights.shape[2:]
    rounding = None
    if stack.activations == "int8":
        rounding = (path or numba_int8.available_paths()[0], stack.row_block)
    target = _target(Form.of(stack), rounding)
    arrays = [array for array in (stack.values, *stack.factors) if array is not None]
    y = jax.ShapeDtypeStruct((x.shape[0], weights.size // (weights.shape[0] * weights.shape[1])), jnp.float32)
    return jax.ffi.ffi_call(target, y)(x, *arrays, experts.astype(jnp.int32)).reshape(-1, *outputs)


_PART = """
def {name}_part(frame, part, parts):
    x_, w_, y_ = call.argument(frame, 0), call.argument(frame, 1), call.result(frame, 0)
    rows, width = call.shape(x_, 2)
    outputs = call.shape(y_, 2)[1]
    tiles = (outputs + {TILE} - 1) // {TILE}
    count = call.shape(w_, 1)[0] // tiles
    y, chosen = call.floats(y_), call.integers(call.argument(frame, {experts}))
    # An expert's rows are order[begins[expert] : begins[expert + 1]].
    begins_at, places_at = call.allocate(8 * (count + 1)), call.allocate(8 * count)
    order_at = call.allocate(8 * rows)
    begins, places, order = call.words_at(begins_at), call.words_at(places_at), call.words_at(order_at)
    for expert in range(count + 1):
        begins[expert] = 0
    for row in range(rows):
        begins[min(max(chosen[row], 0), count - 1) + 1] += 1
    for expert in range(count):
        places[expert] = begins[expert]
        begins[expert + 1] += begins[expert]
    for row in range(rows):
        expert = min(max(chosen[row], 0), count - 1)
        order[places[expert]] = row
        places[expert] += 1
{prepare}
    sums_at = call.allocate(4 * {most} * {TILE})
    sums = call.floats_at(sums_at)
    for expert in range(count):
        if begins[expert] == begins[expert + 1]:
            continue
        for index in range(tiles * part // parts, tiles * (part + 1) // parts):
            tile, left = expert * tiles + index, index * {TILE}
            size = min({TILE}, outputs - left)
            # A tile of the weight stays in the cache while all groups of rows are multiplied.
            top = begins[expert]
            while top < begins[expert + 1]:
                rest = begins[expert + 1] - top
{products}
                for i in range(group):
                    for j in range(size):
                        y[outputs * order[top + i] + left + j] = sums[{TILE} * i + j]
                top += group
{finish}
    for scratch in (begins_at, places_at, order_at, sums_at):
        call.release(scratch)
    return 0


def {name}_handler(frame):
    return call.handle(frame, address())
"""

_ROUND_ROWS = """
    blocks, pieces = width // {row_block}, width // {block}
    codes = call.allocate(rows * width * {code_bytes})
    scales, starts = call.allocate(4 * rows * blocks), call.allocate(4 * rows * blocks)
    moments = call.allocate(4 * rows * pieces)
    for i in range(rows):
        quantise(
            call.address(x_) + 4 * order[i] * width,
            pieces,
            codes + i * width * {code_bytes},
            scales + 4 * i * blocks,
            starts + 4 * i * blocks,
            moments + 4 * i * pieces,
        )
"""
_RELEASE_ROUNDED = """
    for scratch in (codes, scales, starts, moments):
        call.release(scratch)
"""
_SORT_ROWS = """
    x, sorted_at = call.floats(x_), call.allocate(4 * rows * width)
    by_expert = call.floats_at(sorted_at)
    for i in range(rows):
        for j in range(width):
            by_expert[width * i + j] = x[width * order[i] + j]
"""
_RELEASE_SORTED = """
    call.release(sorted_at)
"""
_ROUNDED = (
    "codes + top * width * {code_bytes}, scales + 4 * top * blocks, starts + 4 * top * blocks, "
    "moments + 4 * top * pieces, width"
)
_SORTED = "sorted_at + 4 * top * width, width"


@call.once
def _target(form: Form, rounding: tuple[str, int] | None) -> str:
    """Compiles and registers the kernel for a form of weight; returns its name.

    Args:
      form: the form of the weights.
      rounding: for rows rounded to 8 bits, the path and the inputs that share a scale; None for float32 rows.
    """
    path, row_block = rounding or ("float32", 0)
    name = f"jaxspec_expert_matmul_{form.name}_{path}_{row_block}"
    scope: dict[str, Any] = {"__name__": __name__, "call": call}
    scope["address"] = call.address_of(name)
    values: dict[str, Any] = {"name": name, "TILE": TILE, "row_block": row_block, "block": form.block}
    if rounding is None:
        multiply = partial(numba_packed.multiply_code, form)
        prepare, finish, rows = _SORT_ROWS, _RELEASE_SORTED, _SORTED
    else:
        multiply = partial(numba_int8.multiply_code, form, path, row_block)
        prepare, finish, rows = _ROUND_ROWS, _RELEASE_ROUNDED, _ROUNDED
        scope["quantise"] = numba_int8.quantise_code(form, path, row_block)
        values["code_bytes"] = numba_int8.code_bytes(form, path)
    scope |= {f"multiply_{group}": multiply(group) for group in GROUPS}
    arguments = ", ".join([rows.format(**values), form.addresses(), "sums_at"])
    products = [
        f"                {'el' if i else ''}if rest >= {group}:\n"
        f"                    group = {group}\n"
        f"                    multiply_{group}({arguments})"
        for i, group in enumerate(GROUPS)
    ]
    source = _PART.format(
        **values,
        experts=1 + form.arrays,
        most=GROUPS[0],
        prepare=prepare.format(**values).strip("\n"),
        products="\n".join(products),
        finish=finish.strip("\n"),
    )
    call.define(source, __file__, scope)
    call.register(name, scope[f"{name}_part"], scope[f"{name}_handler"], fastmath=set())
    return name
