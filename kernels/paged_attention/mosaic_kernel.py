"""Paged attention of long blocks of rows, for Hopper GPUs, in Mosaic."""

import math
import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxspec_kernels.op import device

_ROWS = 64
"""Rows of a warpgroup, those of one instruction on tensor cores."""
_WARPGROUPS = 2
"""Warpgroups that compute; one more loads."""
_KEYS = 128
"""Keys of a block."""
_STAGES = 2
"""Blocks of keys and values, and tiles of queries, in shared memory."""
_ROUNDS = 3
"""With fewer tiles than this for each multiprocessor, Triton's kernel is faster."""
_LEAST_CUDA = 12091
"""CUDA 12.8 and 12.9.0 compile masks of such kernels wrongly, as JAX's own attention kernel says."""
_LOWEST = -1e30
"""The peak of a row that has seen no key: finite, since the difference of two infinities is NaN."""


def is_faster(queries: jax.Array, cache: jax.Array) -> bool:
    """Whether this kernel can run here on arrays of these shapes, and is faster than Triton's."""
    if not supports(queries, cache) or not runs_here():
        return False
    tiles = math.prod(queries.shape[:3]) // (_WARPGROUPS * _ROWS)
    return tiles >= _ROUNDS * multiprocessors()


def supports(queries: jax.Array, cache: jax.Array) -> bool:
    """Whether arrays of these shapes can be computed.

    A warpgroup takes all rows of a query head, or of several; pages are loaded whole.
    """
    _, num_rows, num_heads, head_dim = queries.shape
    group, page_size = num_heads // cache.shape[1], cache.shape[3]
    return (
        num_rows > 0
        and num_rows % 8 == 0
        and _ROWS % num_rows == 0
        and num_rows * group % (_WARPGROUPS * _ROWS) == 0
        and head_dim in (64, 128)
        and 8 <= page_size <= _KEYS
        and queries.dtype == cache.dtype == jnp.bfloat16
    )


def runs_here() -> bool:
    """Whether the GPU and its compiler can run the kernel."""
    gpu = device()
    version = re.search(r"cuda (\d+)", gpu.client.platform_version)
    return (
        gpu.platform == "gpu"
        and getattr(gpu, "compute_capability", None) == "9.0"
        and version is not None
        and int(version[1]) >= _LEAST_CUDA
    )


def multiprocessors() -> int:
    """The number of the GPU's multiprocessors."""
    return device().core_count


class _Stages(NamedTuple):
    """Blocks in shared memory, and barriers that wait until one of them has been read and has been loaded."""

    blocks: Any
    done: Any
    ready: Any


# All layers share one trace and one lowering, which take half a second.
@partial(jax.jit, static_argnames="scale")
def paged_attention(
    queries: jax.Array,
    cache: jax.Array,
    page_table: jax.Array,
    first: jax.Array,
    last: jax.Array,
    *,
    scale: float,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """See `reference.paged_attention`, for arrays that `supports` accepts.

    A tile is 128 rows of a key/value head. There is a thread block for every multiprocessor, which computes
    one tile after another: two warpgroups have 64 rows each, and a third loads pages for both, those of the
    next tile too. The two take turns: while one computes weights, the products of the other run.

    Source: FlashAttention-3, arXiv 2407.08608.
    """
    slots, num_rows, num_heads, head_dim = queries.shape
    pages, heads, _, page_size, _ = cache.shape
    group = num_heads // heads
    tiles = num_rows * group // (_WARPGROUPS * _ROWS)
    per_warpgroup = _ROWS // num_rows
    context = page_table.shape[1] * page_size
    # Whole blocks of pages are looked up, also at the end of a table.
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % (_KEYS // page_size))))
    sees = last >= first
    begin = jnp.where(sees, first, context).min(axis=1)
    end = jnp.minimum(jnp.where(sees, last, -1).max(axis=1) + 1, context)
    # The range of keys that some row sees, then the range that all rows see.
    bounds = jnp.stack([begin, end, first.max(axis=1), last.min(axis=1) + 1], axis=1)
    row_bounds = jnp.tile(jnp.stack([first, last], axis=1), (1, 1, per_warpgroup))
    peaks = jnp.full(num_heads, _LOWEST) if sinks is None else sinks.astype(jnp.float32) * math.log2(math.e)
    peaks = jnp.repeat(peaks, num_rows).reshape(heads * tiles, _WARPGROUPS, _ROWS)

    count = slots * heads * tiles
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def stages(*shape: int, arrivals: int) -> _Stages:
        blocks = plgpu.SMEM((_STAGES, *shape), jnp.bfloat16, transforms=tiled)
        done, ready = (
            plgpu.Barrier(num_arrivals=count, num_barriers=_STAGES) for count in (_WARPGROUPS, arrivals)
        )
        return _Stages(blocks, done, ready)

    run = plgpu.kernel(
        partial(
            _kernel,
            scale=scale * math.log2(math.e),
            has_sinks=sinks is not None,
            heads=heads,
            tiles=tiles,
            page_size=page_size,
        ),
        out_type=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        scratch_types={
            "rows": stages(_WARPGROUPS, _ROWS, head_dim, arrivals=_WARPGROUPS * per_warpgroup + 2),
            "row_limits": plgpu.SMEM((_STAGES, 2, _ROWS), jnp.int32),
            "row_peaks": plgpu.SMEM((_STAGES, _WARPGROUPS, _ROWS), jnp.float32),
            "keys": stages(_KEYS, head_dim, arrivals=_KEYS // page_size),
            "values": stages(_KEYS, head_dim, arrivals=_KEYS // page_size),
            "turn": plgpu.Barrier(num_arrivals=_WARPGROUPS),
        },
        grid=(min(count, multiprocessors()),),
        grid_names=("block",),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    flat = cache.reshape(pages * heads * 2, page_size, head_dim)
    return run(queries, flat, page_table, bounds, row_bounds, peaks)


def _kernel(
    queries,
    cache,
    page_table,
    bounds,
    row_bounds,
    peaks,
    outputs,
    *,
    rows,
    row_limits,
    row_peaks,
    keys,
    values,
    turn,
    scale,
    has_sinks,
    heads,
    tiles,
    page_size,
):
    num_slots, num_rows, num_heads, head_dim = queries.shape
    group, per_warpgroup = num_heads // heads, _ROWS // num_rows
    warpgroup, block, num_blocks = (
        lax.axis_index("warpgroup"),
        lax.axis_index("block"),
        lax.axis_size("block"),
    )
    count = num_slots * heads * tiles
    whole_rounds, left = divmod(count, num_blocks)
    # Every other round is dealt in reverse, so that no thread block has the longest tile of each.
    in_last = num_blocks - 1 - block if whole_rounds % 2 else block
    rounds = whole_rounds + (in_last < left).astype(jnp.int32)

    def tile_of(index):
        """Slot, head and tile of a round. Later chunks of a prompt see more positions, so they come first."""
        at = lax.select(lax.rem(index, 2) == 1, num_blocks - 1 - block, block) + index * num_blocks
        of_slot = lax.rem(at, heads * tiles)
        return num_slots - 1 - lax.div(at, heads * tiles), lax.div(of_slot, tiles), lax.rem(of_slot, tiles)

    def key_blocks(slot):
        """The first block of keys that a slot sees, and the number of blocks."""
        begin, end = bounds[slot, 0], bounds[slot, 1]
        first = lax.div(begin, _KEYS)
        return first, jnp.where(begin < end, lax.div(end + _KEYS - 1, _KEYS) - first, 0)

    def heads_of(head, tile, which):
        """A warpgroup's query heads, each with the place of its rows."""
        at = head * group + (tile * _WARPGROUPS + which) * per_warpgroup
        return [(at + i, pl.ds(i * num_rows, num_rows)) for i in range(per_warpgroup)]

    def take_turn():
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    @pl.when(warpgroup < _WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(232, action="increase")

        def position(shape, axis, start):
            return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) + start

        def compute_tile(index, num_before):
            slot, head, tile = tile_of(index)
            begin, end, all_from, all_to = (bounds[slot, i] for i in range(4))
            first, num_keys = key_blocks(slot)
            at_rows = lax.rem(index, _STAGES)
            mine = rows.blocks.at[at_rows, warpgroup]
            plgpu.barrier_wait(rows.ready.at[at_rows])
            of_rows = plgpu.Layout.WGMMA.reduce(1)
            row_first, row_last = (plgpu.layout_cast(row_limits[at_rows, i], of_rows) for i in range(2))

            def absorb(i, carry):
                output, peak, total = carry
                at, start = lax.rem(num_before + i, _STAGES), (first + i) * _KEYS

                def multiply(scores):
                    plgpu.wgmma(scores, mine, keys.blocks.at[at].transpose((1, 0)))
                    take_turn()
                    return scores[...]

                plgpu.barrier_wait(keys.ready.at[at])
                scores = pl.run_scoped(multiply, plgpu.ACC((_ROWS, _KEYS), jnp.float32))
                plgpu.barrier_arrive(keys.done.at[at])

                def masked(scores):
                    at_key = position(scores.shape, 1, start)
                    seen = at_key >= lax.broadcast_in_dim(row_first, scores.shape, [0])
                    seen &= at_key <= lax.broadcast_in_dim(row_last, scores.shape, [0])
                    return jnp.where(seen, scores, -jnp.inf)

                all_see = (start >= all_from) & (start + _KEYS <= all_to)
                scores = lax.cond(all_see, lambda scores: scores, masked, scores)
                # The peak is scaled, so that scaling a score and subtracting the peak is one instruction.
                new_peak = jnp.maximum(peak, scores.max(axis=1) * scale)
                shrink = jnp.exp2(peak - new_peak)
                weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
                output *= lax.broadcast_in_dim(shrink, output.shape, [0])
                total = total * shrink + weights.sum(axis=1)
                weights = weights.astype(jnp.bfloat16)
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(values.ready.at[at])

                # What no row sees may be NaN, which a weight of 0 does not hide. Both warpgroups write the
                # same.
                @pl.when((start < begin) | (start + _KEYS > end))
                def _():
                    value = plgpu.layout_cast(values.blocks[at], plgpu.Layout.WGMMA)
                    at_key = position(value.shape, 0, start)
                    is_seen = (at_key >= begin) & (at_key < end)
                    values.blocks[at] = jnp.where(is_seen, value, jnp.zeros_like(value))
                    plgpu.commit_smem()

                plgpu.barrier_wait(turn)
                output = pl.run_state(lambda sums: plgpu.wgmma(sums, weights, values.blocks.at[at]))(
                    plgpu.ACC.init(output)
                )
                plgpu.barrier_arrive(values.done.at[at])
                return output, new_peak, total

            none = jnp.zeros((_ROWS, head_dim), jnp.float32)
            seen = jnp.full((_ROWS,), 1.0 if has_sinks else 0.0, jnp.float32)
            output, _, total = lax.fori_loop(
                0,
                num_keys,
                absorb,
                (
                    plgpu.layout_cast(none, plgpu.Layout.WGMMA),
                    plgpu.layout_cast(row_peaks[at_rows, warpgroup], of_rows),
                    plgpu.layout_cast(seen, of_rows),
                ),
            )

            # The other warpgroup waits for this one's turn, and the next rows wait for both.
            @pl.when(num_keys == 0)
            def skip_turns():
                take_turn()
                take_turn()

            inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)
            mine[...] = (output * lax.broadcast_in_dim(inverse, output.shape, [0])).astype(jnp.bfloat16)
            plgpu.commit_smem()
            for query_head, place in heads_of(head, tile, warpgroup):
                plgpu.copy_smem_to_gmem(mine.at[place], outputs.at[slot, :, query_head])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(rows.done.at[at_rows])
            return num_before + num_keys

        pl.when(warpgroup == 1)(take_turn)
        lax.fori_loop(0, rounds, compute_tile, jnp.int32(0))
        pl.when(warpgroup == 0)(take_turn)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == _WARPGROUPS)
    def _load():
        plgpu.set_max_registers(40, action="decrease")

        def load_tile(index, num_before):
            slot, head, tile = tile_of(index)
            first, num_keys = key_blocks(slot)
            at_rows = lax.rem(index, _STAGES)
            pl.when(index >= _STAGES)(lambda: plgpu.barrier_wait(rows.done.at[at_rows]))
            ready = rows.ready.at[at_rows]
            for which in range(_WARPGROUPS):
                for query_head, place in heads_of(head, tile, which):
                    source = queries.at[slot, :, query_head]
                    plgpu.copy_gmem_to_smem(source, rows.blocks.at[at_rows, which, place], ready)
            plgpu.copy_gmem_to_smem(row_bounds.at[slot], row_limits.at[at_rows], ready)
            plgpu.copy_gmem_to_smem(peaks.at[head * tiles + tile], row_peaks.at[at_rows], ready)

            @pl.loop(0, num_keys)
            def _(i):
                at, entry = lax.rem(num_before + i, _STAGES), (first + i) * (_KEYS // page_size)
                found = [page_table[slot, entry + j] * heads + head for j in range(_KEYS // page_size)]
                for plane, stages in enumerate((keys, values)):
                    pl.when(num_before + i >= _STAGES)(partial(plgpu.barrier_wait, stages.done.at[at]))
                    for j, page in enumerate(found):
                        place = pl.ds(j * page_size, page_size)
                        into, ready = stages.blocks.at[at, place], stages.ready.at[at]
                        plgpu.copy_gmem_to_smem(cache.at[page * 2 + plane], into, ready)

            return num_before + num_keys

        lax.fori_loop(0, rounds, load_tile, jnp.int32(0))
