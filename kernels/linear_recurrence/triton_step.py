"""A step's rows in Triton, by the gated delta rule or by Mamba-2; each state is read and written once.

A first kernel makes queries, keys, values and gates of the rows, and moves the inputs on. In the second a
program holds some columns of a state while all rows go over it, as no column depends on another.
"""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.calls.triton_call import triton_call
from jaxspec_kernels.linear_recurrence.rules import Rule

_COLUMNS = 16
"""Columns of a program. Always the same, for the order of sums follows from it."""


def recurrence_step(
    state: jax.Array,
    inputs: jax.Array,
    pending: jax.Array,
    rows: jax.Array,
    place: jax.Array,
    unapplied: jax.Array,
    rule: Rule,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """See `reference`."""
    groups, count, heads, width = rows.shape
    places, _, group, key_size, value_size = state.shape
    before, channels = inputs.shape[2:]
    most = pending.shape[1]
    created = jax.ShapeDtypeStruct((groups, count, heads, group, value_size), jnp.float32)
    if not rows.size:
        return state, inputs, pending, jnp.zeros(created.shape, created.dtype)
    sizes: dict[str, Any] = {
        **layout(rule),
        "places": places,
        "heads": heads,
        "group": group,
        "key_size": key_size,
        "value_size": value_size,
        "count": count,
        "total": most + count,
        "fuses": False,
    }
    updated = [inputs, pending] if most else [inputs]
    weights = (rule.conv, some(rule.conv_bias, rule.conv), rule.log_decay, rule.step_bias)
    given = (*updated, *(() if most else (rows,)), rows, place, unapplied, *weights)
    *updated, active, gates = triton_call(
        _inputs_kernel,
        given,
        [
            jax.ShapeDtypeStruct((groups, most + count, heads, channels), jnp.float32),
            jax.ShapeDtypeStruct((groups, most + count, heads, 2, group), jnp.float32),
        ],
        in_place=len(updated),
        grid=(groups, heads, 2 + group),
        most=most,
        has_bias=rule.conv_bias is not None,
        before=before,
        channels=channels,
        width=width,
        block=max(triton.next_power_of_2(max(key_size, value_size)), 16),
        block_rows=triton.next_power_of_2(most + count),
        block_before=triton.next_power_of_2(before),
        block_group=triton.next_power_of_2(group),
        **sizes,
    )
    columns = min(triton.next_power_of_2(value_size), _COLUMNS)
    state, outputs = triton_call(
        _step_kernel,
        (state, active, gates, place, unapplied, some(rule.skip, rule.step_bias)),
        [created],
        in_place=1,
        grid=(triton.cdiv(value_size, columns), heads * group, groups),
        num_warps=1,
        channels=channels,
        block_keys=triton.next_power_of_2(key_size),
        columns=columns,
        **sizes,
    )
    inputs, pending = updated if most else (*updated, pending)
    return state, inputs, pending, outputs


def layout(rule: Rule) -> dict[str, Any]:
    """Where a head's query, key and values begin among its channels, and by which rule states change."""
    query, key, value = rule.places
    return {"query_of": query, "key_of": key, "value_of": value, "corrects": rule.corrects}


def some(array: jax.Array | None, other: jax.Array) -> jax.Array:
    """The array; in the place of one that there is not, another, which the kernel never reads."""
    return other if array is None else array


@triton.jit
def silu(sums, dtype: tl.constexpr):
    """SiLU of sums in float32, rounded to `dtype` before and after."""
    x = sums.to(dtype).to(tl.float32)
    return (x / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32)


@triton.jit
def unit_rows(x):
    """Rows of x, scaled to length 1."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _load_rows(inputs, pending, rows, index, accepted, inside):
    """The rows at the positions `index`, [rows, 1]: before 0 inputs, then pending ones, then the step's.

    Each pointer is that of position 0 for the columns [1, block], with the distance between two positions.
    """
    held = tl.load(inputs[0] + index * inputs[1], mask=inside & (index < 0), other=0.0).to(tl.float32)
    is_pending = (index >= 0) & (index < accepted)
    held += tl.load(pending[0] + index * pending[1], mask=inside & is_pending, other=0.0).to(tl.float32)
    from_rows = inside & (index >= accepted) & (index >= 0)
    return held + tl.load(rows[0] + (index - accepted) * rows[1], mask=from_rows, other=0.0).to(tl.float32)


@triton.jit
def _inputs_kernel(
    inputs,
    pending,
    rows,
    place,
    unapplied,
    conv,
    conv_bias,
    log_decay,
    step_bias,
    active,
    gates,
    query_of: tl.constexpr,
    key_of: tl.constexpr,
    value_of: tl.constexpr,
    corrects: tl.constexpr,
    places: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    count: tl.constexpr,
    total: tl.constexpr,
    most: tl.constexpr,
    has_bias: tl.constexpr,
    before: tl.constexpr,
    channels: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    block_rows: tl.constexpr,
    block_before: tl.constexpr,
    block_group: tl.constexpr,
):
    """A program has the queries, the keys, or the values of one value head, of a slot's rows."""
    of = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    slot = tl.load(place + of).to(tl.int64)
    if slot >= places:
        return
    accepted = tl.load(unapplied + of)
    dtype: tl.constexpr = inputs.dtype.element_ty
    begin = tl.where(part == 0, query_of, tl.where(part == 1, key_of, value_of + (part - 2) * value_size))
    size = tl.where(part < 2, key_size, value_size)
    column = tl.arange(0, block)[None, :]
    in_part = column < size
    own_inputs = inputs + (slot * heads + head) * before * channels + begin + column
    own_pending = pending + (slot * most * heads + head) * width
    own_rows = rows + (of * count * heads + head) * width
    texts = (own_inputs + before * channels, own_pending + begin + column, own_rows + begin + column)
    step: tl.constexpr = heads * width

    row = tl.arange(0, block_rows)[:, None]
    is_row = row < accepted + count
    sums = tl.zeros((block_rows, block), tl.float32)
    for tap in tl.static_range(before + 1):
        index = row + (tap - before)
        held = _load_rows(
            (texts[0], channels), (texts[1], step), (texts[2], step), index, accepted, is_row & in_part
        )
        weight = conv + (head * (before + 1) + tap) * channels + begin + column
        sums += held.to(dtype).to(tl.float32) * tl.load(weight, mask=in_part, other=0.0).to(tl.float32)
    if has_bias:
        sums += tl.load(conv_bias + head * channels + begin + column, mask=in_part, other=0.0).to(tl.float32)
    values = silu(sums, dtype)
    if part < (2 if corrects else 0):
        values = unit_rows(values) * tl.where(part == 0, key_size**-0.5, 1.0)
    to = active + ((of * total + row) * heads + head) * channels + begin + column
    tl.store(to, values, mask=is_row & in_part)

    # All that is read, before any of it is replaced.
    last = tl.arange(0, block_before)[:, None]
    in_last = (last < before) & in_part
    index = last + (accepted + 1 - before)
    moved = _load_rows((texts[0], channels), (texts[1], step), (texts[2], step), index, accepted, in_last)
    scalar = tl.arange(0, block_group)[None, :]
    if part == 0:
        in_group = is_row & (scalar < group)
        of_step = channels + scalar
        if corrects:
            of_step += group
        since = _scalars(own_pending + of_step, own_rows + of_step, step, row, accepted, in_group)
        of_head = head * group + scalar
        bias = tl.load(step_bias + of_head, mask=scalar < group, other=0.0)
        rate = tl.exp(tl.load(log_decay + of_head, mask=scalar < group, other=0.0))
        to_gates = gates + ((of * total + row) * heads + head) * 2 * group + scalar
        strength = softplus(since + bias)
        tl.store(to_gates, tl.exp(-rate * strength), mask=in_group)
        if corrects:
            of_strength = channels + scalar
            strength = _scalars(
                own_pending + of_strength, own_rows + of_strength, step, row, accepted, in_group
            )
            strength = 1.0 / (1.0 + tl.exp(-strength))
        tl.store(to_gates + group, strength, mask=in_group)
    tl.debug_barrier()
    tl.store(own_inputs + last * channels, moved.to(dtype), mask=in_last)
    if most > 0:
        is_draft = row < count - 1
        draft = tl.load(texts[2] + (row + 1) * step, mask=is_draft & in_part, other=0.0)
        tl.store(texts[1] + row * step, draft.to(dtype), mask=is_draft & in_part)
        if part == 0:
            # Strengths, if there are any, then steps.
            for each in tl.static_range((width - channels) // group):
                at = channels + each * group + scalar
                is_scalar = is_draft & (scalar < group)
                number = tl.load(own_rows + (row + 1) * step + at, mask=is_scalar, other=0.0)
                tl.store(own_pending + row * step + at, number.to(dtype), mask=is_scalar)


@triton.jit
def _scalars(pending, rows, step: tl.constexpr, row, accepted, inside):
    """Numbers of pending inputs and of the step's rows, f32[rows, columns]."""
    held = tl.load(pending + row * step, mask=inside & (row < accepted), other=0.0).to(tl.float32)
    at = rows + (row - accepted) * step
    return held + tl.load(at, mask=inside & (row >= accepted), other=0.0).to(tl.float32)


@triton.jit
def _step_kernel(
    state,
    active,
    gates,
    place,
    unapplied,
    skip,
    outputs,
    query_of: tl.constexpr,
    key_of: tl.constexpr,
    value_of: tl.constexpr,
    corrects: tl.constexpr,
    places: tl.constexpr,
    heads: tl.constexpr,
    group: tl.constexpr,
    key_size: tl.constexpr,
    value_size: tl.constexpr,
    count: tl.constexpr,
    total: tl.constexpr,
    channels: tl.constexpr,
    block_keys: tl.constexpr,
    columns: tl.constexpr,
):
    value_head = tl.program_id(1)
    of = tl.program_id(2)
    head = value_head // group
    member = value_head % group
    slot = tl.load(place + of).to(tl.int64)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    in_value = column < value_size
    to = outputs + (of * count * heads * group + value_head) * value_size + column
    between: tl.constexpr = heads * group * value_size
    if slot >= places:
        for i in range(count):
            tl.store(to + i * between, tl.zeros((columns,), tl.float32), mask=in_value)
        return
    accepted = tl.load(unapplied + of)
    key_at = tl.arange(0, block_keys)
    in_key = key_at < key_size
    cells = state + ((slot * heads * group + value_head) * key_size + key_at[:, None]) * value_size
    cells += column[None, :]
    in_cells = in_key[:, None] & in_value[None, :]
    held = tl.load(cells, mask=in_cells, other=0.0)
    of_rows = active + (of * total * heads + head) * channels
    of_gates = gates + (of * total * heads + head) * 2 * group + member
    end = accepted + count
    value_at = value_of + member * value_size + column
    query = tl.load(of_rows + query_of + key_at, mask=in_key, other=0.0)
    key = tl.load(of_rows + key_of + key_at, mask=in_key, other=0.0)
    value = tl.load(of_rows + value_at, mask=in_value, other=0.0)
    decay, strength = tl.load(of_gates), tl.load(of_gates + group)
    for i in range(end):
        # The next row, asked for before this one is awaited.
        following = tl.minimum(i + 1, end - 1)
        next_row = of_rows + following * (heads * channels)
        next_gates = of_gates + following * (heads * 2 * group)
        next_query = tl.load(next_row + query_of + key_at, mask=in_key, other=0.0)
        next_key = tl.load(next_row + key_of + key_at, mask=in_key, other=0.0)
        next_value = tl.load(next_row + value_at, mask=in_value, other=0.0)
        next_decay, next_strength = tl.load(next_gates), tl.load(next_gates + group)
        if corrects:
            known = tl.sum(held * key[:, None], 0)
            read = tl.sum(held * query[:, None], 0)
            change = strength * (value - decay * known)
            held = decay * held + key[:, None] * change[None, :]
            if i >= accepted:
                read = decay * read + tl.sum(query * key, 0) * change
                tl.store(to + (i - accepted) * between, read, mask=in_value)
        else:
            change = strength * value
            held = decay * held + key[:, None] * change[None, :]
            if i >= accepted:
                read = tl.sum(held * query[:, None], 0) + tl.load(skip + value_head) * value
                tl.store(to + (i - accepted) * between, read, mask=in_value)
        if i == accepted:
            tl.store(cells, held, mask=in_cells)
        query, key, value = next_query, next_key, next_value
        decay, strength = next_decay, next_strength
