"""The kernel of `packed_matmul` for many rows on the Hopper generation: some warps load, others multiply.

As in `triton_codes`, the product is transposed. But a program has 128 outputs instead of 64, so it reads the
rows half as often: with 128 rows, loading these from the cache takes longer than the weights from memory.
"""

from dataclasses import dataclass

import triton.experimental.gluon.language as gl
from jaxspec_kernels.packed_matmul.codes_ptx import (
    FP8,
    INT4,
    INT4_OFFSETS,
    INT8,
)
from triton.experimental import gluon
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

TILE = 64
"""Outputs of a tile of codes and of a group of warps, words of a block, and inputs between a word's codes."""
GROUPS = 2
"""Groups of warps that multiply."""
WARPS = 4
"""Of a group."""
BLOCK_ROWS = 128
WORD_STAGES = 3
INPUT_BLOCKS = 8
"""Of 64 inputs each. With three blocks of words that is 176 KB of a multiprocessor's 227."""
_FP8, _INT8, _INT4 = gl.constexpr(FP8), gl.constexpr(INT8), gl.constexpr(INT4)
_INT4_OFFSETS = gl.constexpr(INT4_OFFSETS)
_TILE, _GROUPS, _WARPS = gl.constexpr(TILE), gl.constexpr(GROUPS), gl.constexpr(WARPS)
_BLOCK_ROWS, _WORD_STAGES = gl.constexpr(BLOCK_ROWS), gl.constexpr(WORD_STAGES)
_INPUT_BLOCKS = gl.constexpr(INPUT_BLOCKS)


@dataclass(frozen=True)
class Sizes:
    """A product's sizes.

    Attributes:
      row_tiles: tiles of rows of the result, which may have more rows than x.
      width, out_width: of the product.
      per_word, columns, scale_rows, has_zero, is_int8: see `CodedWeight`.
      is_row: whether the codes of an output are a row, instead of those of 64 outputs a tile.
      sections: of the inputs, each summed by its own programs.
    """

    row_tiles: int
    width: int
    out_width: int
    per_word: int
    columns: int
    scale_rows: int
    has_zero: bool
    is_int8: bool
    is_row: bool
    sections: int

    @property
    def rows(self) -> int:
        return self.row_tiles * BLOCK_ROWS

    @property
    def by_group(self) -> bool:
        return self.columns < self.width

    @property
    def chain(self) -> int:
        """Codes of a word that share a scale: they are multiplied one after another."""
        return min(self.per_word, self.columns // TILE)

    @property
    def input_stages(self) -> int:
        """Of the inputs of a chain."""
        return INPUT_BLOCKS // self.chain

    @property
    def chains(self) -> int:
        return self.per_word // self.chain

    @property
    def scales(self) -> int:
        """Of a group of inputs."""
        return self.out_width // self.scale_rows

    @property
    def steps(self) -> int:
        """Blocks of words of an output."""
        return self.width // (TILE * self.per_word)

    @property
    def length(self) -> int:
        """Steps of a section."""
        return -(-self.steps // self.sections)


@builtin
def _expand_dims(value, axis, layout, _semantic=None):
    """`expand_dims`, whose result has a given layout.

    Gluon's own asks for the layout, as `permute` does, and keeps Python objects from then on, which nanobind
    reports as leaks when the process ends.
    """
    axis, layout = _unwrap_if_constexpr(axis), _unwrap_if_constexpr(layout)
    shape = list(value.shape)
    shape.insert(axis, 1)
    handle = _semantic.builder.create_expand_dims(value.handle, axis)
    return _semantic.tensor(handle, gl.distributed_type(value.dtype, shape, layout))


@gluon.jit
def coded_matmul(x, codes, scale, y, sizes: gl.constexpr):
    """Computes 128 outputs of a tile of rows, or their sums over a section of the inputs.

    Args:
      x: bfloat16 [rows or fewer, width].
      codes: u8 [tiles * blocks * 64, 128], or [out_width, width] if they are rows.
      scale: u32 [groups, scales].
      y: [rows, out_width]; f32 [sections, rows, out_width] if there are several.
    """
    word_shape: gl.constexpr = [_WORD_STAGES * _GROUPS, _TILE, 2 * _TILE]
    words = gl.allocate_shared_memory(gl.uint8, word_shape, codes.layout)
    input_shape: gl.constexpr = [_INPUT_BLOCKS, _BLOCK_ROWS, _TILE]
    inputs = gl.allocate_shared_memory(gl.bfloat16, input_shape, x.layout)
    words_full, words_empty = _barriers(_WORD_STAGES)
    inputs_full, inputs_empty = _barriers(sizes.input_stages)
    turns = mbarrier.allocate_mbarrier(batch=_GROUPS)
    for i in gl.static_range(_GROUPS):
        mbarrier.init(turns.index(i), count=1)
    word_ring = (words, words_full, words_empty)
    input_ring = (inputs, inputs_full, inputs_empty)
    gl.warp_specialize(
        [
            (_multiply, (word_ring, input_ring, turns, scale, y, gl.constexpr(0), sizes)),
            (_multiply, (word_ring, input_ring, turns, scale, y, gl.constexpr(1), sizes)),
            (_load_words, (word_ring, codes, sizes)),
            (_load_inputs, (input_ring, x, sizes)),
        ],
        [_WARPS, 1, 1],
        [240, 24, 24],
    )


@gluon.jit
def _barriers(stages: gl.constexpr):
    """For the stages of a ring: passed when a stage is full, and when all groups have read it."""
    full = mbarrier.allocate_mbarrier(batch=stages)
    empty = mbarrier.allocate_mbarrier(batch=stages)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=_GROUPS)
    return full, empty


@gluon.jit
def _next(stage, phase, stages: gl.constexpr):
    """The stage after this one in a ring, and its phase."""
    is_last = stage == stages - 1
    return gl.where(is_last, 0, stage + 1), phase ^ is_last.to(gl.int32)


@gluon.jit
def _place(sizes: gl.constexpr):
    """The first row and tile of outputs of a program, its first step, and the step after its last one."""
    first = gl.program_id(1) * sizes.length
    last = gl.minimum(sizes.steps, first + sizes.length)
    program = gl.program_id(0)
    return program % sizes.row_tiles * _BLOCK_ROWS, program // sizes.row_tiles * _GROUPS, first, last


@gluon.jit
def _load_words(ring, codes, sizes: gl.constexpr):
    words, full, empty = ring
    _, tile, first, last = _place(sizes)
    stage = 0
    phase = 1
    for step in range(first, last):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), _GROUPS * codes.nbytes_per_cta)
        for i in gl.static_range(_GROUPS):
            if sizes.is_row:
                at = [(tile + i) * _TILE, step * (2 * _TILE)]
            else:
                at = [((tile + i) * sizes.steps + step) * _TILE, 0]
            tma.async_load(codes, at, full.index(stage), words.index(stage * _GROUPS + i))
        stage, phase = _next(stage, phase, _WORD_STAGES)


@gluon.jit
def _load_inputs(ring, x, sizes: gl.constexpr):
    inputs, full, empty = ring
    chain: gl.constexpr = sizes.chain
    row, _, first, last = _place(sizes)
    stage = 0
    phase = 1
    for index in range(first * sizes.chains, last * sizes.chains):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), sizes.chain * x.nbytes_per_cta)
        for i in gl.static_range(chain):
            at = [row, (index * sizes.chain + i) * _TILE]
            tma.async_load(x, at, full.index(stage), inputs.index(stage * sizes.chain + i))
        stage, phase = _next(stage, phase, sizes.input_stages)


@gluon.jit
def _multiply(word_ring, input_ring, turns, scale, y, group: gl.constexpr, sizes: gl.constexpr):
    """Computes 64 outputs.

    Warps wait while tensor cores read their registers. So the groups take turns: while one multiplies, the
    other scales its sums and expands codes.
    """
    words, words_full, words_empty = word_ring
    inputs, inputs_full, inputs_empty = input_ring
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, _BLOCK_ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    chain: gl.constexpr = sizes.chain
    chains: gl.constexpr = sizes.chains
    as_words: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    transposed: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2, transposed=True)
    row, tile, first, last = _place(sizes)
    first_column = (tile + group) * _TILE
    column = first_column + gl.arange(0, _TILE, gl.SliceLayout(1, layout))
    # Where all outputs share their scales, a scale is a number.
    if sizes.scale_rows % _TILE == 0:
        own_scale = scale + gl.minimum(first_column, sizes.out_width - 1) // sizes.scale_rows
    else:
        own_scale = scale + gl.minimum(column, sizes.out_width - 1) // sizes.scale_rows
    zero_column = first_column + gl.arange(0, _TILE, gl.SliceLayout(1, operand))
    own_zero = scale + gl.minimum(zero_column, sizes.out_width - 1) // sizes.scale_rows
    group_scales: gl.constexpr = sizes.scales if sizes.by_group else 0
    sums = gl.zeros([_TILE, _BLOCK_ROWS], gl.float32, layout)
    product = sums
    # Loaded a chain ahead.
    last_scale = sizes.steps * chains - 1
    next_factor = gl.load(own_scale + gl.minimum(first * chains, last_scale) * group_scales)
    stage = 0
    phase = 0
    input_stage = 0
    input_phase = 0
    turn = 1 - group
    for step in range(first, last):
        mbarrier.wait(words_full.index(stage), phase)
        for i in gl.static_range(chains):
            index = step * chains + i
            # Words are read again for each chain, as registers are few.
            own_words = words.index(stage * _GROUPS + group).reinterpret(gl.uint16, [_TILE, _TILE], as_words)
            packed = own_words.load(operand)
            # What another chain multiplies is expanded for nothing, so the compiler drops it.
            expanded = _expand(packed, own_zero + index * group_scales, sizes)
            if i == chains - 1:
                mbarrier.arrive(words_empty.index(stage))
            factor = next_factor
            next_factor = gl.load(own_scale + gl.minimum(index + 1, last_scale) * group_scales)
            mbarrier.wait(inputs_full.index(input_stage), input_phase)
            mbarrier.wait(turns.index(group), turn)
            turn ^= 1
            if not sizes.by_group:
                product = sums
            for j in gl.static_range(chain):
                own_inputs = inputs.index(input_stage * chain + j).reinterpret(
                    gl.bfloat16, [_TILE, _BLOCK_ROWS], transposed
                )
                adds = j > 0 or not sizes.by_group
                product = warpgroup_mma(
                    expanded[i * chain + j], own_inputs, product, use_acc=adds, is_async=True
                )
            mbarrier.arrive(turns.index(_GROUPS - 1 - group))
            product = warpgroup_mma_wait(0, [product])
            mbarrier.arrive(inputs_empty.index(input_stage))
            input_stage, input_phase = _next(input_stage, input_phase, sizes.input_stages)
            sums = _add_now(sums, product * _factor(factor, layout, sizes)) if sizes.by_group else product
        stage, phase = _next(stage, phase, _WORD_STAGES)
    if not sizes.by_group:
        sums *= _factor(next_factor, layout, sizes)
    y += gl.program_id(1).to(gl.int64) * (sizes.rows * sizes.out_width)
    own_row = row + gl.arange(0, _BLOCK_ROWS, gl.SliceLayout(0, layout))
    out = _expand_dims(own_row.to(gl.int64) * sizes.out_width, 0, layout) + _expand_dims(column, 1, layout)
    stored = _expand_dims(column < sizes.out_width, 1, layout)
    gl.store(y + out, sums.to(y.dtype.element_ty), mask=stored)


@gluon.jit
def _add_now(sums, part):
    """sums + part, which the compiler must not put off: registers are too few for two parts."""
    return gl.inline_asm_elementwise("// $0", "=f,0", [sums + part], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _expand(packed, scale, sizes: gl.constexpr):
    """All codes of words as bfloat16, in the layout of `packed`; `scale` has the zero points of a chain."""
    if sizes.per_word == 2:
        return gl.inline_asm_elementwise(
            _INT8 if sizes.is_int8 else _FP8,
            "=&r,=&r,r",
            [packed],
            dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=2,
        )
    offset = _offset(scale, packed) if sizes.has_zero else packed
    return gl.inline_asm_elementwise(
        _INT4_OFFSETS if sizes.has_zero else _INT4,
        "=&r,=&r,=&r,=&r,r,r,r",
        [packed, offset, offset],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _offset(scale, like):
    """-128 less the zero points of the outputs, in the words' shape and layout."""
    zero = (gl.load(scale) & 31).to(gl.float32)
    offset = _expand_dims((-128.0 - zero).to(gl.bfloat16), 1, like.type.layout)
    return offset + gl.zeros(like.shape, gl.bfloat16, like.type.layout)


@gluon.jit
def _factor(scale, layout: gl.constexpr, sizes: gl.constexpr):
    """Scales f32[outputs, 1], or the one of all outputs, without the zero points in their lowest bits."""
    if sizes.has_zero:
        scale = scale & 0xFFFFFFE0
    factor = scale.to(gl.float32, bitcast=True)
    return _expand_dims(factor, 1, layout) if len(factor.shape) else factor
