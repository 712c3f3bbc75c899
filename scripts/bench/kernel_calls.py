"""Calls of every kernel for its cases: arguments, bytes to move, and the allowed error."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.choose_entries import choose_entries
from jaxspec_kernels.choose_experts import choose_experts
from jaxspec_kernels.expert_matmul import BLOCK as SCALE_BLOCK
from jaxspec_kernels.expert_matmul import expert_matmul, gated_expert_matmul
from jaxspec_kernels.fp8_matmul import fp8_matmul, gated_fp8_matmul
from jaxspec_kernels.gumbel_sample import gumbel_sample
from jaxspec_kernels.latent_attention import latent_attention
from jaxspec_kernels.latent_write import latent_write
from jaxspec_kernels.linear_recurrence import DeltaRule, Mamba2Rule, recurrence_scan, recurrence_step
from jaxspec_kernels.matmul import BLOCK, PackedWeight, matmul, pack
from jaxspec_kernels.op import Op
from jaxspec_kernels.packed_attention import packed_attention, packed_attention_gradients
from jaxspec_kernels.packed_matmul import dequantize_codes, gated_packed_matmul, packed_matmul
from jaxspec_kernels.paged_attention import paged_attention
from jaxspec_kernels.process_logits import process_logits
from jaxspec_kernels.random import Purpose
from jaxspec_kernels.rope_kv_write import rope_kv_write
from jaxspec_kernels.sinkhorn import sinkhorn
from jaxspec_kernels.slot_mapping import place_rows
from jaxspec_kernels.sparse_attention import sparse_attention

from bench import kernel_cases as cases
from bench.random_codes import random_coded_experts, random_codes
from bench.random_mxfp4 import random_mxfp4

# Relative error, as a ratio of norms, of sums that differ only in their order.
_SUM_BOUND = {"float32": 2e-6, "bfloat16": 8e-3}
_ROUNDED_BOUND = 1e-3


@dataclass(frozen=True)
class Call:
    """One case of one operation.

    Attributes:
      op: the operation.
      name: name of the case.
      arguments: makes new arrays from a seed; the first `in_place` of them are updated in place.
      static: keyword arguments.
      in_place: number of arrays updated in place.
      bytes_moved: bytes to read each needed input once and to write each output once.
      bound: the largest relative error; 0 if every bit must agree.
      compared: makes what is compared of a result.
    """

    op: Op
    name: str
    arguments: Callable[[int], tuple]
    static: Mapping[str, Any]
    in_place: int
    bytes_moved: int
    bound: float
    compared: Callable[[Any], Any] = lambda result: result


def all_calls() -> Iterator[Call]:
    """Every case of every operation that has a kernel."""
    yield from map(_rope_kv_write, cases.rope_kv_write.CASES)
    yield from map(_gumbel_sample, cases.gumbel_sample.CASES)
    yield from map(_process_logits, cases.process_logits.CASES)
    yield from map(_paged_attention, cases.paged_attention.CASES)
    yield from map(_packed_attention, cases.packed_attention.LARGE)
    yield from map(_packed_attention_gradients, cases.packed_attention.LARGE)
    yield from map(_latent_write, cases.latent_write.CASES)
    yield from map(_latent_attention, cases.latent_attention.CASES)
    yield from map(_sparse_attention, cases.sparse_attention.CASES)
    yield from map(_choose_entries, cases.choose_entries.CASES)
    yield from map(_choose_experts, cases.choose_experts.CASES)
    yield from map(_sinkhorn, cases.sinkhorn.CASES)
    yield from map(_matmul, cases.matmul.CASES)
    yield from map(_packed_matmul, cases.packed_matmul.CASES)
    yield from map(_gated_packed_matmul, cases.packed_matmul.GATED_CODES)
    yield from map(_dequantize_codes, cases.packed_matmul.CASES)
    yield from map(_fp8_matmul, cases.packed_matmul.FP8)
    yield from map(_gated_fp8_matmul, cases.packed_matmul.GATED)
    yield from map(_expert_matmul, cases.expert_matmul.CASES)
    yield from map(_gated_expert_matmul, cases.expert_matmul.GATED)
    yield from map(_place_rows, cases.slot_mapping.CASES)
    recurrence = cases.linear_recurrence
    yield from map(_step, (*recurrence.STEPS, *recurrence.LARGE_STEPS))
    yield from map(_scan, (*recurrence.SCANS, *recurrence.LARGE_SCANS))


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.dtype(dtype))


def _own_slots(rng: np.random.Generator, slots: int, rows: int, pages: int, page_size: int) -> jax.Array:
    owned = page_size + rng.permutation((pages - 1) * page_size)
    return jnp.asarray(owned[: slots * rows].reshape(slots, rows), jnp.int32)


def _rope_kv_write(case: cases.rope_kv_write.Case) -> Call:
    size = (case.slots, case.rows, case.kv_heads, case.group + 2, case.head_dim)

    def arguments(seed: int) -> tuple:
        rng = np.random.default_rng(seed)
        cache = jnp.zeros(
            (case.pages, case.kv_heads, 2, case.page_size, case.head_dim), jnp.dtype(case.dtype)
        )
        slots = _own_slots(rng, case.slots, case.rows, case.pages, case.page_size)
        angles = rng.uniform(-9, 9, (case.slots, case.rows, case.head_dim // 2)).astype(np.float32)
        return cache, slots, _normal(rng, size, case.dtype), jnp.cos(angles), jnp.sin(angles)

    moved = 2 * int(np.prod(size)) * jnp.dtype(case.dtype).itemsize
    return Call(rope_kv_write, case.name, arguments, {}, 1, moved, _SUM_BOUND[case.dtype])


def _gumbel_sample(case: cases.gumbel_sample.Case) -> Call:
    def arguments(seed: int) -> tuple:
        rng = np.random.default_rng(seed)
        return (
            jnp.zeros((case.slots, case.drafts), jnp.int32),
            jnp.zeros((case.slots, case.drafts, case.vocabulary), jnp.float32),
            _normal(rng, (case.slots, case.vocabulary), "float32"),
            jnp.full(case.slots, 0.7, jnp.float32),
            jnp.asarray(rng.integers(2**32, size=(case.slots, 2)), jnp.uint32),
            jnp.asarray(rng.integers(2**20, size=case.slots), jnp.int32),
            jnp.int32(case.step),
        )

    moved = 2 * 4 * case.slots * case.vocabulary
    # Tokens agree exactly, but on a GPU XLA rounds some of the scaled logits differently in the last bit.
    return Call(_Reordered(gumbel_sample), case.name, arguments, {}, 2, moved, 1e-7)


def _process_logits(case: cases.process_logits.Case) -> Call:
    def arguments(seed: int) -> tuple:
        rng = np.random.default_rng(seed)
        asks = jnp.arange(case.slots) < (case.slots if case.truncated is None else case.truncated)
        return (
            3 * _normal(rng, (case.slots, case.rows, case.vocabulary), "float32"),
            jnp.where(asks & (case.top_k > 0 or case.top_p < 1), 1.0, 0.0),
            jnp.where(asks, case.top_k, 0).astype(jnp.int32),
            jnp.where(asks, case.top_p, 1.0).astype(jnp.float32),
            jnp.zeros(case.slots),
        )

    moved = 2 * 4 * case.slots * case.rows * case.vocabulary

    def finite(processed: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(processed), processed, 0)  # the difference of infinities is NaN

    # Sums over the vocabulary in another order may keep another last token.
    return Call(process_logits, case.name, arguments, {"truncated": True}, 0, moved, 1e-2, finite)


class _Reordered(Op):
    """`gumbel_sample` with its buffers as first arguments, as `Call` requires."""

    def __init__(self, op: Op):
        self.op, self.name = op, op.name

    def why_not(self, implementation: str) -> str | None:
        return self.op.why_not(implementation)

    def __call__(self, tokens: Any, processed: Any, *rest: Any, implementation: str | None = None) -> Any:
        return self.op(*rest, tokens, processed, purpose=Purpose.DRAFT, implementation=implementation)


def _visible_positions(
    case: cases.paged_attention.Case | cases.latent_attention.Case,
) -> tuple[np.ndarray, np.ndarray, int]:
    """The first and the last visible position of every row, and how many positions all slots read."""
    end = case.context * (np.arange(case.slots) + 1) // case.slots
    if case.empty:
        end[1::3] = -1
    last = np.where(end[:, None] < 0, -1, end[:, None] - np.arange(case.rows)[::-1])
    first = np.maximum(last - (case.window - 1), 0) if case.window else np.zeros_like(last)
    return first, last, int(np.where(last >= first, last - first + 1, 0).max(axis=1).sum())


def _paged_attention(case: cases.paged_attention.Case) -> Call:
    pages, heads = 1 + case.slots * case.table_width, case.kv_heads
    first, last, seen = _visible_positions(case)
    size = (case.slots, case.rows, heads * case.group, case.head_dim)
    dtype = jnp.dtype(case.dtype)

    def arguments(seed: int) -> tuple:
        rng = np.random.default_rng(seed)
        table = 1 + rng.permutation(pages - 1).reshape(case.slots, case.table_width)
        shape = (pages, heads, 2, case.page_size, case.head_dim)
        cache = jax.random.normal(jax.random.key(seed), shape, dtype)
        ints = (jnp.asarray(x, jnp.int32) for x in (table, first, last))
        return _normal(rng, size, case.dtype), cache, *ints

    moved = int(2 * seen * heads * case.head_dim + 2 * np.prod(size)) * dtype.itemsize
    static: dict[str, Any] = {"scale": case.head_dim**-0.5}
    if case.sinks:
        static["sinks"] = jnp.linspace(-2, 2, heads * case.group, dtype=dtype)
    return Call(paged_attention, case.name, arguments, static, 0, moved, _SUM_BOUND[case.dtype])


def _latent_write(case: cases.latent_write.Case) -> Call:
    size = (case.slots, case.rows, case.size)

    def arguments(seed: int) -> tuple:
        rng = np.random.default_rng(seed)
        cache = jnp.zeros((case.pages, 1, 1, case.page_size, case.size), jnp.dtype(case.dtype))
        slots = _own_slots(rng, case.slots, case.rows, case.pages, case.page_size)
        return cache, slots, _normal(rng, size, case.dtype)

    moved = 2 * int(np.prod(size)) * jnp.dtype(case.dtype).itemsize
    return Call(latent_write, case.name, arguments, {}, 1, moved, 0.0)


def _latent_attention(case: cases.latent_attention.Case) -> Call:
    pages, width = 1 + case.slots * case.table_width, case.value_dim + case.rope_dim
    first, last, seen = _visible_positions(case)
    rows = case.slots * case.rows * case.heads
    dtype = jnp.dtype(case.dtype)

    def arguments(seed: int) -> tuple:
        rng = np.random.default_rng(seed)
        table = 1 + rng.permutation(pages - 1).reshape(case.slots, case.table_width)
        cache = jax.random.normal(jax.random.key(seed), (pages, 1, 1, case.page_size, width), dtype)
        ints = (jnp.asarray(x, jnp.int32) for x in (table, first, last))
        return _normal(rng, (case.slots, case.rows, case.heads, width), case.dtype), cache, *ints

    moved = (seen * width + rows * (width + case.value_dim)) * dtype.itemsize
    static = {"value_dim": case.value_dim, "scale": width**-0.5}
    return Call(latent_attention, case.name, arguments, static, 0, moved, _SUM_BOUND[case.dtype])


def _sparse_attention(case: cases.sparse_attention.Case) -> Call:
    slots, rows, window, page_size = case.slots, case.rows, case.window, case.page_size
    width, pool = -(-(window + rows - 1) // page_size), -(-2 * case.entries // case.per_page)
    size, dtype = (slots, rows, case.heads, case.head_dim), jnp.dtype(case.dtype)

    def lists(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The window's slots, consecutive positions in pages anywhere, and half of the slot's entries."""
        position = np.arange(rows)[:, None] + np.arange(window)
        table = rng.permutation(slots * width).reshape(slots, width)
        listed = table[:, position // page_size] * page_size + position % page_size
        entries = np.tile(np.arange(pool * case.per_page), (slots, 1 if case.shared else rows, 1))
        entries = np.sort(rng.permuted(entries, axis=-1)[..., : case.entries], axis=-1)
        return listed, entries + np.arange(slots)[:, None, None] * pool * case.per_page

    def arguments(seed: int) -> tuple:
        rng = np.random.default_rng(seed)
        listed, entries = lists(rng)
        keys = jax.random.split(jax.random.key(seed))
        cache = jax.random.normal(keys[0], (slots * width, 1, 1, page_size, case.head_dim), dtype)
        made = jax.random.normal(keys[1], (slots * pool, 1, 1, case.per_page, case.head_dim), dtype)
        return (
            _normal(rng, size, case.dtype),
            cache,
            jnp.asarray(listed, jnp.int32),
            jnp.full((slots, rows), window, jnp.int32),
            made if case.entries else None,
            jnp.asarray(entries, jnp.int32),
            jnp.full((slots, rows), case.entries, jnp.int32),
            _normal(rng, (case.heads,), "float32"),
        )

    read = sum(len(np.unique(listed)) for listed in lists(np.random.default_rng(0)))
    moved = (read * case.head_dim + 2 * int(np.prod(size))) * dtype.itemsize
    static = {"scale": case.head_dim**-0.5}
    return Call(sparse_attention, case.name, arguments, static, 0, moved, _SUM_BOUND[case.dtype])


def _choose_entries(case: cases.choose_entries.Case) -> Call:
    slots, rows, pages = case.slots, case.rows, -(-case.entries // case.per_page)
    size, dtype = (slots, rows, case.heads, case.head_dim), jnp.dtype(case.dtype)

    def arguments(seed: int) -> tuple:
        rng = np.random.default_rng(seed)
        table = rng.permutation(slots * pages).reshape(slots, pages)
        listed = (table[..., None] * case.per_page + np.arange(case.per_page)).reshape(slots, -1)
        shape = (slots * pages, 1, 1, case.per_page, case.head_dim)
        return (
            _normal(rng, size, case.dtype),
            _normal(rng, size[:-1], "float32"),
            jax.random.normal(jax.random.key(seed), shape, dtype),
            jnp.asarray(listed[:, : case.entries], jnp.int32),
            jnp.full((slots, rows), case.entries, jnp.int32),
        )

    keys, queries = slots * case.entries * case.head_dim, int(np.prod(size))
    moved = (keys + queries) * dtype.itemsize + 4 * slots * rows * (case.heads + case.keep)

    def is_chosen(chosen: jax.Array) -> jax.Array:
        marks = jnp.zeros((slots * rows, slots * pages * case.per_page), jnp.float32)
        return marks.at[jnp.arange(slots * rows)[:, None], chosen.reshape(-1, case.keep)].set(1.0)

    # Sums in another order may choose another entry where two scores are all but equal.
    return Call(choose_entries, case.name, arguments, {"keep": case.keep}, 0, moved, 2e-2, is_chosen)


def _packed_attention(case: cases.packed_attention.Case) -> Call:
    def arguments(seed: int) -> tuple:
        rng = np.random.default_rng(seed)
        size = (case.sequences, case.length, case.kv_heads)
        shapes = ((*size, case.group, case.head_dim), (*size, case.head_dim), (*size, case.head_dim))
        return *(_normal(rng, shape, case.dtype) for shape in shapes), jnp.asarray(case.first())

    rows = case.sequences * case.length * case.kv_heads
    moved = 2 * rows * (case.group + 1) * case.head_dim * jnp.dtype(case.dtype).itemsize
    moved += 4 * rows * case.group
    static = {"scale": case.head_dim**-0.5}
    return Call(packed_attention, case.name, arguments, static, 0, moved, _SUM_BOUND[case.dtype])


def _packed_attention_gradients(case: cases.packed_attention.Case) -> Call:
    forward = _packed_attention(case)

    def arguments(seed: int) -> tuple:
        given = forward.arguments(seed)
        attended, log_total = packed_attention.select("xla")(*given, **forward.static)
        gradient = _normal(np.random.default_rng(seed), attended.shape, case.dtype)
        mean = (gradient.astype(jnp.float32) * attended.astype(jnp.float32)).sum(axis=-1)
        return *given, log_total, gradient, mean

    moved = 2 * forward.bytes_moved
    return Call(
        packed_attention_gradients,
        case.name,
        arguments,
        forward.static,
        0,
        moved,
        2 * _SUM_BOUND[case.dtype],
    )


def _choose_experts(case: cases.choose_experts.Case) -> Call:
    def arguments(seed: int) -> tuple:
        rng = np.random.default_rng(seed)
        if case.ties:
            return (jnp.asarray(rng.integers(-1, 2, (case.rows, case.experts)), jnp.float32),)
        return (_normal(rng, (case.rows, case.experts), "float32"),)

    static = {"keep": case.keep, "softmax": case.softmax}
    moved = case.rows * (4 * case.experts + 8 * case.keep)
    return Call(choose_experts, case.name, arguments, static, 0, moved, 1e-6)


def _sinkhorn(case: cases.sinkhorn.Case) -> Call:
    size = (case.rows, case.size, case.size)

    def arguments(seed: int) -> tuple:
        return (_normal(np.random.default_rng(seed), size, "float32"),)

    static = {"iterations": case.iterations, "eps": case.eps}
    return Call(sinkhorn, case.name, arguments, static, 0, 8 * int(np.prod(size)), 2e-6)


def _matmul(case: cases.matmul.Case) -> Call:
    # Scales and offsets are float16 here.
    itemsize = {"uint8": 0.5 + 4 / BLOCK, "int8": 1 + 2 / BLOCK, "bfloat16": 2}

    def weight(rng: np.random.Generator) -> jax.Array | PackedWeight:
        size, rows = (case.width, case.outputs), (case.outputs, case.width)
        blocks = (case.outputs, case.width // BLOCK)
        if not case.packed:
            return _normal(rng, size, case.dtype)
        if case.packed == "bfloat16":
            return jax.device_put(pack(np.asarray(_normal(rng, rows, "bfloat16")), None, None, size))
        low, high = (0, 16) if case.packed == "uint8" else (-128, 128)
        values = rng.integers(low, high, rows).astype(case.packed)
        scale = rng.standard_normal(blocks, np.float32).astype(np.float16).astype(np.float32)
        offset = scale if case.packed == "uint8" else None
        return jax.device_put(pack(values, scale, offset, size, activations=case.activations))

    def arguments(seed: int) -> tuple:
        rng = np.random.default_rng(seed)
        return _normal(rng, (case.rows, case.width), case.dtype), weight(rng)

    each = itemsize[case.packed] if case.packed else jnp.dtype(case.dtype).itemsize
    moved = int(each * case.width * case.outputs)
    moved += case.rows * (case.width + case.outputs) * jnp.dtype(case.dtype).itemsize
    # Kernel and reference may round an activation to neighbouring integers.
    bound = _SUM_BOUND[case.dtype] if case.activations == "float32" else _ROUNDED_BOUND
    return Call(matmul, case.name, arguments, {}, 0, moved, bound)


def _packed_matmul(
    case: cases.packed_matmul.Case, op: Op = packed_matmul, out_axes: tuple[int, ...] | None = None
) -> Call:
    def arguments(seed: int) -> tuple:
        x = _normal(np.random.default_rng(seed), (case.rows, case.width), case.dtype)
        return x, random_codes(
            jax.random.key(seed),
            (case.width, *(out_axes or (case.outputs,))),
            case.bits,
            group=case.group,
            scale_rows=case.scale_rows,
            has_zero=case.has_zero,
            is_int8=case.is_int8,
        )

    groups = case.width // (case.group or case.width)
    moved = case.width * case.outputs * case.bits // 8 + 4 * groups * case.outputs // case.scale_rows
    moved += case.rows * (case.width + case.outputs) * jnp.dtype(case.dtype).itemsize
    return Call(op, case.name, arguments, {}, 0, moved, _SUM_BOUND[case.dtype])


def _gated_packed_matmul(case: cases.packed_matmul.Case) -> Call:
    inner = case.outputs // 2
    call = _packed_matmul(case, gated_packed_matmul, (2, inner))
    return replace(call, bytes_moved=call.bytes_moved - case.rows * inner * jnp.dtype(case.dtype).itemsize)


def _fp8_matmul(case: cases.packed_matmul.Case) -> Call:
    return _packed_matmul(case, fp8_matmul)


def _gated_fp8_matmul(case: cases.packed_matmul.Gated) -> Call:
    def arguments(seed: int) -> tuple:
        x = _normal(np.random.default_rng(seed), (case.rows, case.width), case.dtype)
        up, down = ((case.width, 2, case.inner), (case.inner, case.width))
        return x, *(random_codes(jax.random.key(seed), shape, 8, group=0) for shape in (up, down))

    moved = 3 * case.width * case.inner + 4 * case.rows * case.width
    moved += 5 * case.rows * case.inner  # gates and ups in bfloat16, and what goes on in FP8
    return Call(gated_fp8_matmul, case.name, arguments, {}, 0, moved, _SUM_BOUND[case.dtype])


def _dequantize_codes(case: cases.packed_matmul.Case) -> Call:
    product = _packed_matmul(case)
    moved = product.bytes_moved - 2 * case.rows * (case.width + case.outputs) + 2 * case.width * case.outputs
    return replace(product, op=dequantize_codes, bytes_moved=moved, bound=0.0)


def _expert_matmul(
    case: cases.expert_matmul.Case, op: Op = expert_matmul, out_axes: tuple[int, ...] | None = None
) -> Call:
    def chosen(seed: int) -> np.ndarray:
        first = case.experts - case.spread
        return (first + np.random.default_rng(seed).integers(0, case.spread, case.rows)).astype(np.int32)

    def arguments(seed: int) -> tuple:
        x = _normal(np.random.default_rng(seed), (case.rows // case.per_input, case.width), case.dtype)
        size = case.experts, case.width, *(out_axes or (case.outputs,))
        key = jax.random.key(seed)
        if case.bits:
            return x, jnp.asarray(chosen(seed)), random_coded_experts(key, size, case.bits)
        weights = random_mxfp4(key, size) if case.packed else jax.random.normal(key, size, x.dtype)
        return x, jnp.asarray(chosen(seed)), weights

    itemsize = jnp.dtype(case.dtype).itemsize
    each = 0.5 + 1 / SCALE_BLOCK if case.packed else case.bits / 8 + 4 / 128 if case.bits else itemsize
    moved = int(np.unique(chosen(0)).size * case.width * case.outputs * each)
    moved += case.rows * (case.width * itemsize // case.per_input + case.outputs * 4)
    bound = _SUM_BOUND[case.dtype]
    return Call(op, case.name, arguments, {}, 0, moved, bound)


def _gated_expert_matmul(case: cases.expert_matmul.Case) -> Call:
    inner = case.outputs // 2
    call = _expert_matmul(case, gated_expert_matmul, (2, inner))
    saved = case.rows * inner * (8 - jnp.dtype(case.dtype).itemsize)
    return replace(call, bytes_moved=call.bytes_moved - saved)


def _place_rows(case: cases.slot_mapping.Case) -> Call:
    size = (case.slots, case.rows)

    def arguments(seed: int) -> tuple:
        rng = np.random.default_rng(seed)
        pages = 1 + rng.permutation(case.slots * case.table_width).reshape(case.slots, case.table_width)
        positions = np.tile(case.start + np.arange(case.rows), (case.slots, 1))
        return jnp.asarray(positions, jnp.int32), jnp.ones(size, bool), jnp.asarray(pages, jnp.int32)

    static = {"page_size": case.page_size, "window": case.window}
    return Call(place_rows, case.name, arguments, static, 0, 21 * int(np.prod(size)), 0.0)


_StateCase = cases.linear_recurrence.StepCase | cases.linear_recurrence.ScanCase


def _rule(rng: np.random.Generator, case: _StateCase) -> DeltaRule | Mamba2Rule:
    channels, by_head = 2 * case.key_size + case.group * case.value_size, (case.heads, case.group)
    conv = _normal(rng, (case.heads, case.conv_width, channels), case.dtype)
    # States last for several rows.
    log_decay, step_bias = _normal(rng, by_head, "float32") - 3, _normal(rng, by_head, "float32")
    if case.is_delta:
        return DeltaRule(conv, log_decay, step_bias, case.key_size)
    bias = _normal(rng, (case.heads, channels), case.dtype) if case.conv_bias else None
    return Mamba2Rule(conv, bias, log_decay, step_bias, _normal(rng, by_head, "float32"), case.key_size)


def _state_arrays(
    rng: np.random.Generator, case: _StateCase, places: int
) -> tuple[tuple[jax.Array, jax.Array], int]:
    """States and last inputs, and how many numbers a row has for each head."""
    channels = 2 * case.key_size + case.group * case.value_size
    state = (places, case.heads, case.group, case.key_size, case.value_size)
    before = (places, case.heads, case.conv_width - 1, channels)
    width = channels + (2 if case.is_delta else 1) * case.group
    return (_normal(rng, state, "float32"), _normal(rng, before, case.dtype)), width


def recurrence_step_arguments(case: cases.linear_recurrence.StepCase, seed: int) -> tuple:
    """The arguments of a step."""
    rng = np.random.default_rng(seed)
    arrays, width = _state_arrays(rng, case, 2 * case.slots + case.spare)
    pending = _normal(rng, (case.slots, case.drafts, case.heads, width), case.dtype)
    rows = _normal(rng, (case.slots, case.rows, case.heads, width), case.dtype)
    place = rng.permutation(case.slots)
    if case.empty:
        place[1::3] = np.iinfo(np.int32).max
    unapplied = np.arange(case.slots)[::-1] % (case.drafts + 1)
    ints = (jnp.asarray(x, jnp.int32) for x in (place, unapplied))
    return *arrays, pending, rows, *ints, _rule(rng, case)


def _step(case: cases.linear_recurrence.StepCase) -> Call:
    arguments = partial(recurrence_step_arguments, case)
    given = jax.eval_shape(lambda: arguments(0))
    state, inputs, pending, rows = (x.size * x.dtype.itemsize for x in given[:4])
    # Half of the places are not the slots' own.
    moved = state + inputs + 2 * pending + rows
    moved += case.slots * case.rows * case.heads * case.group * case.value_size * 4
    return Call(recurrence_step, case.name, arguments, {}, 3, moved, _SUM_BOUND[case.dtype])


def recurrence_scan_arguments(case: cases.linear_recurrence.ScanCase, seed: int) -> tuple:
    """The arguments of a pass over prompts. The texts' places come first, then as many for copies."""
    rng = np.random.default_rng(seed)
    texts, chunks = case.texts, case.chunks
    arrays, width = _state_arrays(rng, case, 2 * texts + case.spare)
    rows = rng.standard_normal((texts * chunks, case.rows, case.heads, width), np.float32)
    text, chunk = np.divmod(np.arange(texts * chunks), chunks)
    left = np.maximum(chunks * case.rows - case.short - chunk * case.rows, 0)
    count = np.minimum(left, case.rows)
    rows[np.arange(case.rows) >= count[:, None]] = np.nan
    nowhere = np.iinfo(np.int32).max
    place = np.where(count > 0, text, nowhere)
    source, copy = text.copy(), np.full_like(text, nowhere)
    source[0] = texts
    if case.copies:
        copy[(chunk == 0) & (text < texts - 1)] = texts + 1 + np.arange(texts - 1)
        first = np.flatnonzero((chunk == 0) & (text > 0))
        source[first] = texts + text[first]
    is_start = (chunk == 0) & (text == texts - 1) & (text > 0) & (not case.copies)
    ints = (jnp.asarray(x, jnp.int32) for x in (source, place, copy))
    given = jnp.asarray(rows, jnp.dtype(case.dtype)), jnp.asarray(count, jnp.int32), jnp.asarray(is_start)
    return *arrays, *given, *ints, _rule(rng, case)


def _scan(case: cases.linear_recurrence.ScanCase) -> Call:
    arguments = partial(recurrence_scan_arguments, case)
    given = jax.eval_shape(lambda: arguments(0))
    state, inputs, rows = (x.size * x.dtype.itemsize for x in given[:3])
    moved = state + inputs + rows
    moved += case.texts * case.chunks * case.rows * case.heads * case.group * case.value_size * 4

    def compared(result: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Leaves out the outputs of rows that do not count, which kernels need not agree in."""
        *updated, outputs = result
        counts = jnp.arange(case.rows) < arguments(0)[3][:, None]
        return *updated, jnp.where(counts[..., None, None, None], outputs, 0)

    bound = _SUM_BOUND[case.dtype]
    return Call(recurrence_scan, case.name, arguments, {}, 2, moved, bound, compared)
