"""Sums and gathers over the GPUs of one process, in a Triton kernel that writes into its peers' memory.

Every GPU has a mailbox (`PeerMemory`). A program of the kernel sends a block of its array to the mailboxes of
the other GPUs, and then reads their blocks from its own. A 64-bit word in a mailbox is 32 bits of data and
the number of the exchange, and arrives as a whole. So a program reads until every word has the number that it
waits for, and needs neither fences nor flags. (NCCL's protocol LL does the same.)

A mailbox has two places for each program and sender, used in turn. A program overwrites a place only after it
has received the exchange in between from every GPU, and a GPU sends that only after it has read the place.

All GPUs must run the same exchanges in the same order, and one at a time. That is how XLA runs kernels.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxspec_kernels.collectives.peer_memory import (
    CAPACITY,
    GREETING,
    HEADER,
    MAX_PROGRAMS,
    num_devices,
)
from jaxspec_kernels.triton_call import triton_call

_PROGRAMS = 128
"""Programs to aim at, about one for each multiprocessor."""
_MIN_BLOCK = 256


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
    block = min(max(triton.next_power_of_2(triton.cdiv(words, _PROGRAMS)), _MIN_BLOCK), CAPACITY)
    blocks = triton.cdiv(words, block)
    programs = min(blocks, MAX_PROGRAMS)
    (result,) = triton_call(
        _exchange_kernel,
        (x, links),
        [out],
        grid=(programs,),
        num_warps=min(block // 128, 8),
        words=words,
        devices=num_devices(links),
        rounds=triton.cdiv(blocks, programs),
        block=block,
        capacity=CAPACITY,
        header=HEADER,
        kind=kind,
    )
    return result


@triton.jit
def _mailbox(links, device):
    """The address of a device's mailbox; of this one's for -1."""
    low = tl.load(links + 2 * device + 2).to(tl.uint64)
    high = tl.load(links + 2 * device + 3).to(tl.uint64)
    return tl.multiple_of((high << 32) | low, 256)


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
def _part(word, place, number, is_own):
    """The words of one device, which arrive at `place` unless they are this device's own."""
    if not is_own:
        got = tl.load(place, volatile=True)
        while tl.max(((got >> 32).to(tl.int32) != number).to(tl.int32), 0) != 0:
            got = tl.load(place, volatile=True)
        word = got.to(tl.int32)
    return word


@triton.jit
def _low(word, kind: tl.constexpr):
    half = (word & 0xFFFF).to(tl.int16)
    return half.to(tl.bfloat16 if kind == "bfloat16" else tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _pack(low, high, kind: tl.constexpr):
    half = tl.bfloat16 if kind == "bfloat16" else tl.float16
    low = low.to(half).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(half).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _exchange_kernel(
    x,
    links,
    out,
    words: tl.constexpr,
    devices: tl.constexpr,
    rounds: tl.constexpr,
    block: tl.constexpr,
    capacity: tl.constexpr,
    header: tl.constexpr,
    kind: tl.constexpr,
):
    program = tl.program_id(0)
    lane = tl.arange(0, block)
    rank = _rank(links, devices)
    own = _mailbox(links, -1)
    counter = own.to(tl.pointer_type(tl.int32)) + program
    number = tl.load(counter)
    sends = x.to(tl.pointer_type(tl.int32))
    gets = out.to(tl.pointer_type(tl.int32))
    for i in range(rounds):
        number += 1
        index = (i * tl.num_programs(0) + program) * block + lane
        inside = index < words
        word = tl.load(sends + index, mask=inside, other=0)
        numbered = (number.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
        # `%` would be negative once the number has passed 2**31.
        place = header + (program * 2 + (number & 1)) * devices * capacity
        for device in tl.static_range(devices):
            if device != rank:
                mailbox = _mailbox(links, device).to(tl.pointer_type(tl.int64))
                tl.store(mailbox + place + rank * capacity + lane, numbered)
        mailbox = own.to(tl.pointer_type(tl.int64)) + place + lane
        if kind == "gather":
            for device in tl.static_range(devices):
                got = _part(word, mailbox + device * capacity, number, device == rank)
                tl.store(gets + device * words + index, got, mask=inside)
        elif kind == "float32":
            total = tl.zeros([block], tl.float32)
            for device in tl.static_range(devices):
                got = _part(word, mailbox + device * capacity, number, device == rank)
                total += got.to(tl.float32, bitcast=True)
            tl.store(gets + index, total.to(tl.int32, bitcast=True), mask=inside)
        else:
            low = tl.zeros([block], tl.float32)
            high = tl.zeros([block], tl.float32)
            for device in tl.static_range(devices):
                got = _part(word, mailbox + device * capacity, number, device == rank)
                low += _low(got, kind)
                high += _low(got >> 16, kind)
            tl.store(gets + index, _pack(low, high, kind), mask=inside)
    tl.debug_barrier()
    tl.store(counter, number)
