"""Sums and gathers over the GPUs of one process, in Triton kernels that write into their peers' memory.

Every GPU has a mailbox (`PeerMemory`). A program of a kernel sends a part of its array to the mailboxes of
the other GPUs, and then reads their parts from its own. A line of 128 bits in a mailbox is three words of
data and the number of the exchange, and arrives as a whole (PTX ISA, "Memory consistency model": a scalar
access of type .b128 is one operation). So a program reads until every line has the number that it waits for,
and needs neither fences nor flags. (NCCL's protocols LL and LL128 do the same with lines of 8 and 128 bytes.)

A mailbox has two places for each program and sender, which exchanges use in turn: an exchange overwrites what
the last but one left. That is safe: before a GPU takes part in an exchange, it has read all lines of the one
before, and no program begins an exchange until it has received the last one from every GPU.

All GPUs must run the same exchanges in the same order, and one at a time. That is how XLA runs kernels.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.calls.triton_call import triton_call
from jaxspec_kernels.collectives.peer_memory import (
    CAPACITY,
    GREETING,
    HEADER,
    LINE_WORDS,
    MAX_PROGRAMS,
    num_devices,
)

_MIN_LINES = 64
_CAPACITY, _HEADER = tl.constexpr(CAPACITY), tl.constexpr(HEADER)


def peer_sum(x: jax.Array, links: jax.Array) -> jax.Array:
    """The sum of x over all devices, added in float32 in the order of devices, so that all get the same bits.

    Args:
      x: float32, bfloat16 or float16; its size in bytes is a multiple of 4.
      links: u32[1, 3 + 2 D], this device's row of `PeerMemory.links`.
    """
    return _exchange(x, links, jax.ShapeDtypeStruct(x.shape, x.dtype), kind=x.dtype.name)


def peer_gather(x: jax.Array, links: jax.Array) -> jax.Array:
    """x, of a type of 32 bits, of all devices, stacked along a new first axis."""
    stacked = jax.ShapeDtypeStruct((num_devices(links), *x.shape), x.dtype)
    return _exchange(x, links, stacked, kind="gather")


def peer_sum_norm(
    x: jax.Array,
    stream: jax.Array,
    bias: jax.Array | None,
    factors: jax.Array,
    links: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """`stream` plus `peer_sum(x)` and `bias`, and the norm of each row of it; see `collectives.psum_norm`.

    A program sums and norms one row at a time.
    """
    words = x.nbytes // 4 // len(x)
    lines = triton.cdiv(words, LINE_WORDS)
    block = triton.next_power_of_2(lines)
    row = jax.ShapeDtypeStruct(x.shape, x.dtype)
    total, normed = triton_call(
        _sum_norm_kernel,
        # Without a bias, this pointer is never read.
        (x, stream, factors if bias is None else bias, factors, links),
        [row, row],
        grid=(min(len(x), MAX_PROGRAMS),),
        num_warps=min(max(block // 64, 1), 16),
        rows=len(x),
        words=words,
        lines=lines,
        eps=eps,
        has_bias=bias is not None,
        devices=num_devices(links),
        block=block,
        kind=x.dtype.name,
    )
    return total, normed


def greet(links: jax.Array) -> jax.Array:
    """Writes this device's index in the mesh, from 1 on, into all mailboxes. Returns i32[1]."""
    (done,) = triton_call(
        _greet_kernel,
        (links,),
        [jax.ShapeDtypeStruct((1,), jnp.int32)],
        grid=(1,),
        num_warps=1,
        devices=num_devices(links),
        greeting=GREETING,
    )
    return done


def _exchange(x: jax.Array, links: jax.Array, out: jax.ShapeDtypeStruct, *, kind: str) -> jax.Array:
    words = x.nbytes // 4
    lines = min(max(triton.cdiv(words, LINE_WORDS * MAX_PROGRAMS), _MIN_LINES), CAPACITY)
    block = triton.next_power_of_2(lines)
    parts = triton.cdiv(words, LINE_WORDS * lines)
    programs = min(parts, MAX_PROGRAMS)
    (result,) = triton_call(
        _exchange_kernel,
        (x, links),
        [out],
        grid=(programs,),
        num_warps=min(block // 32, 8),
        words=words,
        devices=num_devices(links),
        parts=parts,
        lines=lines,
        block=block,
        kind=kind,
    )
    return result


@triton.jit
def _mailbox(links, device):
    """The address of a device's mailbox; of this one's for -1."""
    low = tl.load(links + 2 * device + 2).to(tl.uint64)
    high = tl.load(links + 2 * device + 3).to(tl.uint64)
    return (high << 32) | low


@triton.jit
def _lanes(block: tl.constexpr):
    """0, 1, …, one for each thread in turn, so that a warp stores 512 adjacent bytes at once.

    Without the hint, a thread would take as many adjacent lanes as fill 16 bytes of the array.
    """
    return tl.max_contiguous(tl.arange(0, block), 1)


@triton.jit
def _rank(links, devices: tl.constexpr):
    return tl.load(links + 2 * devices + 2).to(tl.int32)


@triton.jit
def _greet_kernel(links, done, devices: tl.constexpr, greeting: tl.constexpr):
    rank = _rank(links, devices)
    for device in tl.static_range(devices):
        tl.store(_mailbox(links, device).to(tl.pointer_type(tl.int32)) + greeting + rank, rank + 1)
    tl.store(done, rank)


@triton.jit
def _store_line(address, first, second, third, number, is_sent):
    """Stores one line per lane at `address` u64[lanes], where `is_sent`."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred sent;
            .reg .b64 low, high;
            .reg .b128 line;
            setp.ne.b32 sent, $6, 0;
            mov.b64 low, {$2, $3};
            mov.b64 high, {$4, $5};
            mov.b128 line, {low, high};
            @sent st.relaxed.sys.global.b128 [$1], line;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r,r,r,r,r",
        [address, first, second, third, number, is_sent.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_line(address):
    """The three words and the number of the lines at `address` u64[lanes]."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b64 low, high;
            .reg .b128 line;
            ld.relaxed.sys.global.b128 line, [$4];
            mov.b128 {low, high}, line;
            mov.b64 {$0, $1}, low;
            mov.b64 {$2, $3}, high;
        }
        """,
        "=r,=r,=r,=r,l",
        [address],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def _receive(words, address, number, is_own):
    """The three words of one device, which arrive at `address` unless they are this device's own, `words`."""
    first, second, third = words
    if not is_own:
        first, second, third, arrived = _load_line(address)
        while tl.max((arrived != number).to(tl.int32), 0) != 0:
            first, second, third, arrived = _load_line(address)
    return first, second, third


@triton.jit
def _values(words, kind: tl.constexpr):
    """The numbers in words, in float32: one in each, or two along a last axis for a type of 16 bits."""
    if kind == "float32":
        values = words.to(tl.float32, bitcast=True)
    else:
        half = tl.bfloat16 if kind == "bfloat16" else tl.float16
        low = (words & 0xFFFF).to(tl.int16).to(half, bitcast=True)
        high = (words >> 16).to(tl.int16).to(half, bitcast=True)
        values = tl.join(low, high).to(tl.float32)
    return values


@triton.jit
def _words(values, kind: tl.constexpr):
    """The inverse of `_values`, which rounds to the type."""
    if kind == "float32":
        words = values.to(tl.int32, bitcast=True)
    else:
        half = tl.bfloat16 if kind == "bfloat16" else tl.float16
        low, high = tl.split(values.to(half).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
        words = low | (high << 16)
    return words


@triton.jit
def _load(words, lane, lines, end):
    """Three words per line, of `end` words at most; zeros behind them and behind the last line.

    The words of a line are `lines` apart, so that lanes beside each other read words beside each other.
    """
    is_line = lane < lines
    first = tl.load(words + lane, mask=is_line & (lane < end), other=0)
    second = tl.load(words + lane + lines, mask=is_line & (lane + lines < end), other=0)
    third = tl.load(words + lane + 2 * lines, mask=is_line & (lane + 2 * lines < end), other=0)
    return first, second, third


@triton.jit
def _store(words, lane, lines, end, values):
    """The inverse of `_load`."""
    is_line = lane < lines
    tl.store(words + lane, values[0], mask=is_line & (lane < end))
    tl.store(words + lane + lines, values[1], mask=is_line & (lane + lines < end))
    tl.store(words + lane + 2 * lines, values[2], mask=is_line & (lane + 2 * lines < end))


class _Sender(NamedTuple):
    """A program, its device's index in the mesh, `PeerMemory.links` and the address of the own mailbox."""

    program: Any
    rank: Any
    links: Any
    own: Any


@triton.jit
def _start(links, devices: tl.constexpr):
    """This program, and the address and value of the number of its last exchange."""
    program = tl.program_id(0)
    own = _mailbox(links, -1)
    counter = own.to(tl.pointer_type(tl.int32)) + program
    return _Sender(program, _rank(links, devices), links, own), counter, tl.load(counter)


@triton.jit
def _send(words, sender, number, lane, lines, devices: tl.constexpr):
    """Stores three words per lane and the number in the mailboxes of the other devices.

    Returns the addresses at which the first device's lines arrive in this one's; those of others follow.
    """
    # `%` would be negative once the number has passed 2**31.
    place = _HEADER + (sender.program * 2 + (number & 1)) * devices * _CAPACITY
    for device in tl.static_range(devices):
        if device != sender.rank:
            line = (place + sender.rank * _CAPACITY + lane).to(tl.uint64)
            address = _mailbox(sender.links, device) + line * 16
            _store_line(address, words[0], words[1], words[2], number, lane < lines)
    # A lane behind the last line waits for that one.
    return sender.own + (place + tl.minimum(lane, lines - 1)).to(tl.uint64) * 16


@triton.jit
def _sums(words, address, number, rank, devices: tl.constexpr, kind: tl.constexpr):
    """The `_values` of three words, each summed over all devices in their order."""
    sum_1, sum_2, sum_3 = 0.0, 0.0, 0.0
    for device in tl.static_range(devices):
        first, second, third = _receive(words, address + device * _CAPACITY * 16, number, device == rank)
        sum_1 += _values(first, kind)
        sum_2 += _values(second, kind)
        sum_3 += _values(third, kind)
    return sum_1, sum_2, sum_3


@triton.jit
def _exchange_kernel(
    x,
    links,
    out,
    words: tl.constexpr,
    parts: tl.constexpr,
    lines: tl.constexpr,
    devices: tl.constexpr,
    block: tl.constexpr,
    kind: tl.constexpr,
):
    sender, counter, number = _start(links, devices)
    lane = _lanes(block)
    sends = x.to(tl.pointer_type(tl.int32))
    gets = out.to(tl.pointer_type(tl.int32))
    for part in range(sender.program, parts, tl.num_programs(0)):
        number += 1
        at = part * 3 * lines
        own = _load(sends + at, lane, lines, words - at)
        address = _send(own, sender, number, lane, lines, devices)
        if kind == "gather":
            for device in tl.static_range(devices):
                others = _receive(own, address + device * _CAPACITY * 16, number, device == sender.rank)
                _store(gets + device * words + at, lane, lines, words - at, others)
        else:
            a, b, c = _sums(own, address, number, sender.rank, devices, kind)
            total = (_words(a, kind), _words(b, kind), _words(c, kind))
            _store(gets + at, lane, lines, words - at, total)
    tl.debug_barrier()
    tl.store(counter, number)


@triton.jit
def _sum_norm_kernel(
    x,
    stream,
    bias,
    factors,
    links,
    totals,
    normed,
    rows: tl.constexpr,
    words: tl.constexpr,
    lines: tl.constexpr,
    eps: tl.constexpr,
    has_bias: tl.constexpr,
    devices: tl.constexpr,
    block: tl.constexpr,
    kind: tl.constexpr,
):
    sender, counter, number = _start(links, devices)
    lane = _lanes(block)
    x = x.to(tl.pointer_type(tl.int32))
    stream = stream.to(tl.pointer_type(tl.int32))
    totals = totals.to(tl.pointer_type(tl.int32))
    normed = normed.to(tl.pointer_type(tl.int32))
    f1, f2, f3 = _load(factors.to(tl.pointer_type(tl.int32)), lane, lines, words)
    if has_bias:
        b1, b2, b3 = _load(bias.to(tl.pointer_type(tl.int32)), lane, lines, words)
    for row in range(sender.program, rows, tl.num_programs(0)):
        number += 1
        at = row * words
        own = _load(x + at, lane, lines, words)
        address = _send(own, sender, number, lane, lines, devices)
        # Read before waiting for the other devices.
        s1, s2, s3 = _load(stream + at, lane, lines, words)
        y1, y2, y3 = _sums(own, address, number, sender.rank, devices, kind)
        if has_bias:
            y1 = _plus(y1, b1, kind)
            y2 = _plus(y2, b2, kind)
            y3 = _plus(y3, b3, kind)
        y1 = _rounded(_plus(y1, s1, kind), kind)
        y2 = _rounded(_plus(y2, s2, kind), kind)
        y3 = _rounded(_plus(y3, s3, kind), kind)
        _store(totals + at, lane, lines, words, (_words(y1, kind), _words(y2, kind), _words(y3, kind)))
        squares = tl.sum(y1 * y1 + y2 * y2 + y3 * y3, 1)
        scale = tl.rsqrt(tl.sum(tl.where(lane < lines, squares, 0.0), 0) / (2 * words) + eps)
        y1 = _rounded(y1 * scale, kind) * _values(f1, kind)
        y2 = _rounded(y2 * scale, kind) * _values(f2, kind)
        y3 = _rounded(y3 * scale, kind) * _values(f3, kind)
        _store(normed + at, lane, lines, words, (_words(y1, kind), _words(y2, kind), _words(y3, kind)))
    tl.debug_barrier()
    tl.store(counter, number)


@triton.jit
def _rounded(values, kind: tl.constexpr):
    return values.to(tl.bfloat16 if kind == "bfloat16" else tl.float16).to(tl.float32)


@triton.jit
def _plus(values, words, kind: tl.constexpr):
    """The sum of rounded `values` and the numbers in words, as if each term had its type's precision."""
    return _rounded(values, kind) + _values(words, kind)
