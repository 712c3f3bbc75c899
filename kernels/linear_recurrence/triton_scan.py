"""Rows of prompts in Triton, by the gated delta rule or by Mamba-2, in tiles of 64 rows.

The first of three kernels makes queries, keys and values of all rows. By the delta rule, the changes of a
tile's rows solve (I + A) u = b (v - D S k), as in the reference: the second kernel makes, for all tiles, the
inverse of I + A and the products of queries and keys. By Mamba-2, a change is a value times its step, and the
second kernel makes no more than the decays. In the third, a program goes with some columns of a state from
tile to tile, by products of matrices.

Source: S. Yang et al., arXiv 2412.06464, section 3.3; T. Dao and A. Gu, arXiv 2405.21060, section 6.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax
from jaxspec_kernels.calls.triton_call import triton_call
from jaxspec_kernels.linear_recurrence.reference import recurrence_scan as reference
from jaxspec_kernels.linear_recurrence.rules import Rule
from jaxspec_kernels.linear_recurrence.triton_step import layout, silu, softplus, some, unit_rows

_NOWHERE = jnp.iinfo(jnp.int32).max
_COLUMNS = 32
KEEPS: tl.constexpr = tl.constexpr(-2)
"""In place of where a state is: the one that the group before has left is still held."""


def recurrence_scan(
    state: jax.Array,
    inputs: jax.Array,
    rows: jax.Array,
    count: jax.Array,
    is_start: jax.Array,
    source: jax.Array,
    place: jax.Array,
    copy: jax.Array,
    rule: Rule,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `reference`. Products of 16-bit rows have factors of 16 bits, and float32 sums."""
    if _is_for_xla(state, rows):
        return reference(state, inputs, rows, count, is_start, source, place, copy, rule)
    groups, length, heads, width = rows.shape
    places, _, group, key_size, value_size = state.shape
    before, channels = inputs.shape[2:]
    # The same for all lengths above half of it; where a row's tile begins follows from the chunks.
    tile = min(max(triton.next_power_of_2(length), 16), 64)
    tiles = triton.cdiv(length, tile)
    source = jnp.where(is_start, -1, source)
    place, copy = (jnp.where(count > 0, x, _NOWHERE) for x in (place, copy))
    sizes: dict[str, Any] = {
        **layout(rule),
        "length": length,
        "heads": heads,
        "group": group,
        "key_size": key_size,
        "value_size": value_size,
        "channels": channels,
        "tile": tile,
        "tiles": tiles,
    }
    block_keys = max(triton.next_power_of_2(key_size), 16)
    precision = "ieee" if rows.dtype == jnp.float32 else "tf32x3"
    active, last = triton_call(
        _inputs_kernel,
        (
            *(inputs, rows, count, *_rows_before(source, place, copy, count, length, before)),
            *(rule.conv, some(rule.conv_bias, rule.conv)),
        ),
        [
            jax.ShapeDtypeStruct((groups, tiles * tile, heads, channels), rows.dtype),
            jax.ShapeDtypeStruct((groups, *inputs.shape[1:]), inputs.dtype),
        ],
        grid=(groups * tiles, heads, 2 + group),
        has_bias=rule.conv_bias is not None,
        before=before,
        width=width,
        block=max(triton.next_power_of_2(max(key_size, value_size)), 16),
        block_before=triton.next_power_of_2(before),
        **sizes,
    )
    by_tile = (groups, tiles, heads * group)
    gates = (rows, count, rule.log_decay, rule.step_bias)
    decays_shape = jax.ShapeDtypeStruct((*by_tile, 2, tile), jnp.float32)
    of_tiles: dict[str, Any] = {"grid": (groups * tiles, heads * group), "width": width, **sizes}
    if rule.corrects:
        squares = jax.ShapeDtypeStruct((*by_tile, tile, tile), rows.dtype)
        decays, inverses, products = triton_call(
            _solve_kernel,
            (*gates, active),
            [decays_shape, squares, squares],
            block_keys=block_keys,
            levels=tile.bit_length() - 1,
            precision=precision,
            **of_tiles,
        )
    else:
        (decays,) = triton_call(_decays_kernel, gates, [decays_shape], num_warps=1, **of_tiles)
        inverses = products = active  # never read
    columns = min(max(triton.next_power_of_2(value_size), 16), _COLUMNS)
    state, outputs = triton_call(
        _scan_kernel,
        (
            *(state, active, decays, inverses, products, some(rule.skip, rule.step_bias)),
            *(count, _begins(source, place, count), place, copy),
        ),
        [jax.ShapeDtypeStruct((groups, length, heads, group, value_size), jnp.float32)],
        in_place=1,
        # In float32 two stages of tiles would not fit.
        num_stages=1 if rows.dtype == jnp.float32 else 2,
        grid=(triton.cdiv(value_size, columns), heads * group),
        groups=groups,
        places=places,
        block_keys=block_keys,
        columns=columns,
        **sizes,
    )
    return state, _put_last(inputs, last, place, copy), outputs


def _is_for_xla(state: jax.Array, rows: jax.Array) -> bool:
    """Without tensor cores, as in float32, XLA's larger products are faster."""
    return not rows.size or (rows.dtype == jnp.float32 and state.shape[-2] >= 64)


def _rows_before(
    source: jax.Array, place: jax.Array, copy: jax.Array, count: jax.Array, length: int, before: int
) -> tuple[jax.Array, jax.Array]:
    """Where the `before` rows before each group are.

    Returns:
      The index of each among the rows of the pass, i32[G, before], or -1; and that among the inputs that were
      kept, or -1. Where both are -1 it is zero.
    """
    index = jnp.arange(len(source), dtype=jnp.int32)
    leaves = (place == source[:, None]) | (copy == source[:, None])
    previous = jnp.where(leaves & (index < index[:, None]), index, -1).max(axis=1)
    back = jnp.broadcast_to(jnp.arange(before, 0, -1, dtype=jnp.int32), (len(source), before))
    at = jnp.broadcast_to(previous[:, None], back.shape)
    behind = jnp.broadcast_to(index[:, None], back.shape)
    for _ in range(before):  # a group has at least one row
        passes = (at >= 0) & (back > count[at])
        back = jnp.where(passes, back - count[at], back)
        behind, at = jnp.where(passes, at, behind), jnp.where(passes, previous[at], at)
    in_rows = jnp.where(at >= 0, at * length + count[at] - back, -1)
    kept = source[behind]
    return in_rows, jnp.where((at < 0) & (kept >= 0), kept * before + before - back, -1)


def _begins(source: jax.Array, place: jax.Array, count: jax.Array) -> jax.Array:
    """Where each group's state is, i32[G]: its source, -1 for zeros, or `KEEPS`."""
    index = jnp.where(count > 0, jnp.arange(len(count), dtype=jnp.int32), -1)
    latest = jnp.pad(lax.cummax(index), (1, 0), constant_values=-1)[:-1]
    is_held = (latest >= 0) & (source >= 0) & (place[latest] == source)
    return jnp.where(is_held | (count == 0), KEEPS.value, source)


def _put_last(inputs: jax.Array, last: jax.Array, place: jax.Array, copy: jax.Array) -> jax.Array:
    """The inputs with the last ones of each group, of which a later group may replace those of an earlier."""
    places = jnp.stack([place, copy], axis=1).reshape(-1)
    index = jnp.arange(len(places))
    is_replaced = ((places == places[:, None]) & (index > index[:, None])).any(axis=1)
    places = jnp.where(is_replaced, _NOWHERE, places)
    return inputs.at[places].set(jnp.repeat(last, 2, axis=0), mode="drop", wrap_negative_indices=False)


@triton.jit
def _load_rows(inputs, rows, in_rows, kept, index, stop, before: tl.constexpr, steps, inside):
    """The rows of a group at the positions `index`, [rows, 1], which are behind the group's first one or
    among the `before` rows before it. The pointers are those of the first row of all, for columns [1, block].
    """
    own = tl.load(rows[0] + index * steps[1], mask=inside & (index >= 0) & (index < stop), other=0.0)
    is_before = index < 0
    other = tl.load(in_rows + before + index, mask=is_before, other=-1)
    moved = tl.load(rows[1] + other.to(tl.int64) * steps[1], mask=inside & (other >= 0), other=0.0)
    other = tl.load(kept + before + index, mask=is_before, other=-1).to(tl.int64)
    at = inputs + (other // before * steps[2] + other % before) * steps[0]
    held = tl.load(at, mask=inside & (other >= 0), other=0.0)
    return own.to(tl.float32) + moved.to(tl.float32) + held.to(tl.float32)


@triton.jit
def _inputs_kernel(
    inputs,
    rows,
    count,
    in_rows,
    kept,
    conv,
    conv_bias,
    active,
    last,
    query_of: tl.constexpr,
    key_of: tl.constexpr,
    value_of: tl.constexpr,
    corrects: tl.constexpr,
    length: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    channels: tl.constexpr,
    tile: tl.constexpr,
    tiles: tl.constexpr,
    has_bias: tl.constexpr,
    before: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    block_before: tl.constexpr,
):
    """A program has the queries, the keys, or the values of one value head, of a tile."""
    of = tl.program_id(0) // tiles
    start = tl.program_id(0) % tiles * tile
    head = tl.program_id(1)
    part = tl.program_id(2)
    stop = tl.load(count + of)
    if start >= stop:
        return
    dtype: tl.constexpr = inputs.dtype.element_ty
    begin = tl.where(part == 0, query_of, tl.where(part == 1, key_of, value_of + (part - 2) * value_size))
    size = tl.where(part < 2, key_size, value_size)
    column = tl.arange(0, block)[None, :]
    in_part = column < size
    step: tl.constexpr = heads * width
    # 64 bits, because a pass may have more than 2^31 numbers.
    first = rows + head * width + begin + column
    own_rows = (first + of.to(tl.int64) * length * step, first)
    own_inputs = inputs + head * before * channels + begin + column
    steps = (channels, step, heads * before)
    in_rows += of * before
    kept += of * before

    row = start + tl.arange(0, tile)[:, None]
    sums = tl.zeros((tile, block), tl.float32)
    for tap in tl.static_range(before + 1):
        index = row + (tap - before)
        held = _load_rows(own_inputs, own_rows, in_rows, kept, index, stop, before, steps, in_part)
        weight = conv + (head * (before + 1) + tap) * channels + begin + column
        sums += held.to(dtype).to(tl.float32) * tl.load(weight, mask=in_part, other=0.0).to(tl.float32)
    if has_bias:
        sums += tl.load(conv_bias + head * channels + begin + column, mask=in_part, other=0.0).to(tl.float32)
    values = silu(sums, dtype)
    if part < (2 if corrects else 0):
        values = unit_rows(values) * tl.where(part == 0, key_size**-0.5, 1.0)
    values = tl.where(row < stop, values, 0.0)
    to = active + ((of.to(tl.int64) * tiles * tile + row) * heads + head) * channels + begin + column
    tl.store(to, values.to(active.dtype.element_ty), mask=in_part)
    if start == 0:
        at = tl.arange(0, block_before)[:, None]
        in_last = (at < before) & in_part
        behind = tl.where(at < before, at + (stop - before), 0)
        moved = _load_rows(own_inputs, own_rows, in_rows, kept, behind, stop, before, steps, in_last)
        to_last = last + ((of * heads + head) * before + at) * channels + begin + column
        tl.store(to_last, moved.to(dtype), mask=in_last)


@triton.jit
def _write_decays(
    rows,
    count,
    log_decay,
    step_bias,
    decays,
    corrects: tl.constexpr,
    length: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    tile: tl.constexpr,
    tiles: tl.constexpr,
    width: tl.constexpr,
):
    """The logarithms of a tile's decays since its start, and the strengths of its rows, f32[tile] each."""
    of = tl.program_id(0) // tiles
    value_head = tl.program_id(1)
    row = tl.arange(0, tile)
    in_group = tl.program_id(0) % tiles * tile + row
    is_row = in_group < tl.load(count + of)
    at = (of.to(tl.int64) * length + in_group) * heads + value_head // group
    # The steps are a row's last numbers.
    of_step = rows + at * width + (width - group) + value_head % group
    since = tl.load(of_step, mask=is_row, other=0.0).to(tl.float32)
    step = tl.where(is_row, softplus(since + tl.load(step_bias + value_head)), 0.0)
    total = tl.cumsum(-tl.exp(tl.load(log_decay + value_head)) * step, 0)
    strength = step
    if corrects:
        given = tl.load(of_step - group, mask=is_row, other=0.0).to(tl.float32)
        strength = tl.where(is_row, 1.0 / (1.0 + tl.exp(-given)), 0.0)
    to = decays + (tl.program_id(0).to(tl.int64) * heads * group + value_head) * 2 * tile + row
    tl.store(to, total)
    tl.store(to + tile, strength)
    return total, strength


@triton.jit
def _decays_kernel(
    rows,
    count,
    log_decay,
    step_bias,
    decays,
    query_of: tl.constexpr,
    key_of: tl.constexpr,
    value_of: tl.constexpr,
    corrects: tl.constexpr,
    length: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    channels: tl.constexpr,
    tile: tl.constexpr,
    tiles: tl.constexpr,
    width: tl.constexpr,
):
    if tl.program_id(0) % tiles * tile < tl.load(count + tl.program_id(0) // tiles):
        _write_decays(
            rows, count, log_decay, step_bias, decays, corrects, length, heads, group, tile, tiles, width
        )


@triton.jit
def _solve_kernel(
    rows,
    count,
    log_decay,
    step_bias,
    active,
    decays,
    inverses,
    products,
    query_of: tl.constexpr,
    key_of: tl.constexpr,
    value_of: tl.constexpr,
    corrects: tl.constexpr,
    length: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    channels: tl.constexpr,
    tile: tl.constexpr,
    tiles: tl.constexpr,
    width: tl.constexpr,
    block_keys: tl.constexpr,
    levels: tl.constexpr,
    precision: tl.constexpr,
):
    of = tl.program_id(0) // tiles
    start = tl.program_id(0) % tiles * tile
    value_head = tl.program_id(1)
    head = value_head // group
    stop = tl.load(count + of)
    if start >= stop:
        return
    dtype: tl.constexpr = active.dtype.element_ty
    total, strength = _write_decays(
        rows, count, log_decay, step_bias, decays, corrects, length, heads, group, tile, tiles, width
    )
    row = tl.arange(0, tile)
    to = tl.program_id(0).to(tl.int64) * heads * group + value_head
    key_at = tl.arange(0, block_keys)[None, :]
    of_tile = active + ((tl.program_id(0).to(tl.int64) * tile + row[:, None]) * heads + head) * channels
    query = tl.load(of_tile + query_of + key_at, mask=key_at < key_size, other=0.0)
    key = tl.load(of_tile + key_of + key_at, mask=key_at < key_size, other=0.0)
    # `down` counts rows, `over` columns.
    down, over = row[:, None], row[None, :]
    decay = _decays_between(total, tile)
    product = tl.dot(query, tl.trans(key), input_precision="ieee") * decay
    cells = to * tile * tile + down * tile + over
    tl.store(products + cells, product.to(dtype))
    below = tl.dot(key, tl.trans(key), input_precision="ieee") * decay * strength[:, None]
    below = tl.where(down > over, below, 0.0)
    # The inverses of all blocks on the diagonal, of two rows, of four, and so on.
    inverse = tl.where(down == over, 1.0, 0.0) - tl.where(down // 2 == over // 2, below, 0.0)
    for level in tl.static_range(1, levels):
        size = 1 << level
        corner = tl.where(
            (down // (2 * size) == over // (2 * size)) & (down // size != over // size), below, 0.0
        )
        right = tl.dot(corner, inverse, input_precision=precision)
        inverse -= tl.dot(inverse, right, input_precision=precision)
    tl.store(inverses + cells, inverse.to(dtype))


@triton.jit
def _decays_between(total, tile: tl.constexpr):
    """How much of each row's change is left at each later one, [later, earlier]."""
    row = tl.arange(0, tile)
    since = tl.minimum(total[:, None] - total[None, :], 0.0)
    return tl.where(row[:, None] >= row[None, :], tl.exp(since), 0.0)


@triton.jit
def _scan_kernel(
    state,
    active,
    decays,
    inverses,
    products,
    skip,
    count,
    begins,
    place,
    copy,
    outputs,
    query_of: tl.constexpr,
    key_of: tl.constexpr,
    value_of: tl.constexpr,
    corrects: tl.constexpr,
    length: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    channels: tl.constexpr,
    tile: tl.constexpr,
    tiles: tl.constexpr,
    groups: tl.constexpr,
    places: tl.constexpr,
    block_keys: tl.constexpr,
    columns: tl.constexpr,
):
    """A program has some columns of a value head, and goes through all groups in their order."""
    value_head = tl.program_id(1)
    head = value_head // group
    dtype: tl.constexpr = active.dtype.element_ty
    key_at = tl.arange(0, block_keys)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    in_key, in_value = key_at < key_size, column < value_size
    row = tl.arange(0, tile)
    in_column = in_value[None, :]
    cells = state + (value_head * key_size + key_at[:, None]) * value_size + column[None, :]
    between: tl.constexpr = heads * group * key_size * value_size
    value_at = value_of + value_head % group * value_size + column[None, :]
    square = row[:, None] * tile + row[None, :]
    held = tl.zeros((block_keys, columns), tl.float32)
    # 64 bits, because a pass may have more than 2^31 numbers.
    wide = tl.full((), 0, tl.int64)
    for of in range(groups):
        stop = tl.load(count + of)
        begin = tl.load(begins + of)
        found = tl.load(
            cells + begin.to(tl.int64) * between,
            mask=in_column & (key_at[:, None] < tl.where(begin >= 0, key_size, 0)),
            other=0.0,
        )
        held = tl.where(begin == KEEPS, held, found)
        filled = (stop + tile - 1) // tile
        for index in range(filled):
            at = (wide + of) * tiles + index
            of_tile = active + ((at * tile + row[:, None]) * heads + head) * channels
            query = tl.load(of_tile + query_of + key_at[None, :], mask=in_key[None, :], other=0.0)
            key = tl.load(of_tile + key_of + key_at[None, :], mask=in_key[None, :], other=0.0)
            value = tl.load(of_tile + value_at, mask=in_value[None, :], other=0.0).to(tl.float32)
            of_head = at * heads * group + value_head
            total = tl.load(decays + of_head * 2 * tile + row)
            strength = tl.load(decays + of_head * 2 * tile + tile + row)
            end = tl.load(decays + of_head * 2 * tile + tile - 1)
            if corrects:
                inverse = tl.load(inverses + of_head * tile * tile + square)
                product = tl.load(products + of_head * tile * tile + square)
            since = tl.exp(total)[:, None]
            rounded = held.to(dtype)
            if corrects:
                known = tl.dot(key, rounded, input_precision="ieee") * since
                wanted = strength[:, None] * (value - known)
                change = tl.dot(inverse, wanted.to(dtype), input_precision="ieee")
            read = tl.dot(query, rounded, input_precision="ieee") * since
            if not corrects:
                # The same for all heads of a group, but decayed by each head's own steps.
                product = tl.dot(query, tl.trans(key), input_precision="ieee") * _decays_between(total, tile)
                product = product.to(dtype)
                change = strength[:, None] * value
                read += tl.load(skip + value_head) * value
            read = tl.dot(product, change.to(dtype), read, input_precision="ieee")
            left = (change * tl.exp(end - total)[:, None]).to(dtype)
            held = tl.dot(tl.trans(key), left, held * tl.exp(end), input_precision="ieee")
            of_row = index * tile + row[:, None]
            to = outputs + (((wide + of) * length + of_row) * heads * group + value_head) * value_size
            tl.store(to + column[None, :], read, mask=(of_row < length) & in_value[None, :])
        for index in range(filled, tiles):
            of_row = index * tile + row[:, None]
            to = outputs + (((wide + of) * length + of_row) * heads * group + value_head) * value_size
            nothing = tl.zeros((tile, columns), tl.float32)
            tl.store(to + column[None, :], nothing, mask=(of_row < length) & in_value[None, :])
        leaves = tl.load(place + of)
        tl.store(
            cells + leaves.to(tl.int64) * between,
            held,
            mask=in_column & (key_at[:, None] < tl.where(leaves < places, key_size, 0)),
        )
        copied = tl.load(copy + of)
        tl.store(
            cells + copied.to(tl.int64) * between,
            held,
            mask=in_column & (key_at[:, None] < tl.where(copied < places, key_size, 0)),
        )
        # A later group may load what this one stored.
        tl.debug_barrier()
