"""The kernel of `packed_matmul` for many rows on Hopper (`engine.packed`): some warps load, others multiply.

As in `triton_codes`, the product is transposed. But a tile has 128 outputs instead of 64, so the rows are
read half as often: with 128 rows, loading these from the cache takes longer than the weights from memory.
"""

from dataclasses import dataclass
from functools import partial

import triton.experimental.gluon.language as gl
from jaxspec_kernels.packed_matmul.codes_ptx import one_code
from jaxspec_kernels.packed_matmul.hopper_tiles import BLOCK_ROWS, MANY_ROWS
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
WORD_STAGES = 3
_INPUT_BLOCKS = {BLOCK_ROWS: 8, MANY_ROWS: 5}
"""Of 64 inputs each. With three blocks of words that is up to 208 KB of a multiprocessor's 227."""
ADDED_ROWS = 128
"""Rows whose sums of sections are added at once."""
GATED = 8
"""Adjacent outputs of gate, then as many of up, in a tile of a gated product: a thread has sums of both."""
_TILE, _GROUPS, _WARPS = gl.constexpr(TILE), gl.constexpr(GROUPS), gl.constexpr(WARPS)
_GATED = gl.constexpr(GATED)
_WORD_STAGES, _ADDED_ROWS = gl.constexpr(WORD_STAGES), gl.constexpr(ADDED_ROWS)


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for; sizes are read when it runs.

    Attributes:
      block_rows: rows of a tile, `BLOCK_ROWS` or `MANY_ROWS`.
      columns: inputs that share a scale; None if all of an output do.
      per_word, scale_rows, has_zero, is_int8: see `CodedWeight`.
      is_row: whether the codes of an output are a row, instead of those of 64 outputs a tile.
      is_gated: whether the result is SiLU of the first half of the outputs times the second half.
    """

    block_rows: int
    columns: int | None
    per_word: int
    scale_rows: int
    has_zero: bool
    is_int8: bool
    is_row: bool
    is_gated: bool

    @property
    def box(self) -> int:
        """Adjacent outputs whose words are loaded at once."""
        return GATED if self.is_gated else TILE

    @property
    def results(self) -> int:
        """Adjacent outputs of a tile's result."""
        return TILE // 2 if self.is_gated else TILE

    @property
    def by_group(self) -> bool:
        return self.columns is not None

    @property
    def scales_sums(self) -> bool:
        """Whether the sums over a group of inputs are scaled; otherwise each weight is, and rounded."""
        return self.by_group and self.block_rows == BLOCK_ROWS

    @property
    def scales_weights(self) -> bool:
        return self.by_group and not self.scales_sums

    @property
    def shared(self) -> int:
        """Codes of a word that share a scale."""
        return self.per_word if self.columns is None else min(self.per_word, self.columns // TILE)

    @property
    def step_groups(self) -> int:
        """Groups of inputs in a step, if `by_group`."""
        return self.per_word // self.shared

    @property
    def chain(self) -> int:
        """Codes of a word that are multiplied one after another, before the other group's turn."""
        return self.shared if self.block_rows == BLOCK_ROWS else 1

    @property
    def chains(self) -> int:
        return self.per_word // self.chain

    @property
    def input_blocks(self) -> int:
        return _INPUT_BLOCKS[self.block_rows]

    @property
    def input_stages(self) -> int:
        """Of the inputs of a chain."""
        return self.input_blocks // self.chain

    @property
    def ptx(self) -> tuple[str, ...]:
        """What dequantizes each code of a word."""
        dequantize = partial(one_code, self.per_word, is_int8=self.is_int8, is_scaled=self.scales_weights)
        return tuple(dequantize(code) for code in range(self.per_word))


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


@builtin
def _gates_and_ups(sums, _semantic=None):
    """The sums of gate and those of up in a tile, [32, rows] each, as every thread has them."""
    rows = _unwrap_if_constexpr(sums.shape[1])
    builder = _semantic.builder
    parts = builder.create_reshape(sums.handle, [TILE // (2 * GATED), 2, GATED, rows], False)
    halves = builder.create_split(builder.create_trans(parts, [0, 2, 3, 1]))
    columns = [[0, 1 << i] for i in range(rows.bit_length() - 1)]
    layout = gl.DistributedLinearLayout(
        reg_bases=[columns[0], *columns[3:]],
        lane_bases=[*columns[1:3], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[TILE // 2, rows],
    )
    kind = gl.distributed_type(sums.dtype, [TILE // 2, rows], layout)
    flat = (builder.create_reshape(half, kind.shape, False) for half in halves)
    return gl.tuple([_semantic.tensor(each, kind) for each in flat])


@gluon.jit
def coded_matmul(x, codes, scale, outputs, whole, sections, y, parts, counts, kind: gl.constexpr):
    """Computes tiles of 128 outputs, or of 64 of gate and of up if the product is gated.

    Tiles after the first ones are split, for more programs to have work.

    Args:
      x: bfloat16 [rows, width].
      codes: u8 [tiles * blocks * 64, 128], or [outputs, width] if they are rows.
      scale: u32 [groups, scales].
      outputs: i32.
      whole: i32, the tiles that are not split.
      sections: i32, of the inputs of a tile that is split. Its sums are added in order by the program that
        is the last to finish.
      y: [rows, outputs], or half as many outputs if the product is gated.
      parts: f32 [split tiles, 2, sections, rows of a tile, 64], the sums of sections.
      counts: i32 [split tiles, 2], zeros: the sections that are finished.
    """
    sizes = (x.shape[0], x.shape[1] // (_TILE * kind.per_word), outputs, whole, sections)
    results = (y, parts, counts)
    boxes: gl.constexpr = _TILE // kind.box
    word_shape: gl.constexpr = [_WORD_STAGES * _GROUPS * boxes, kind.box, 2 * _TILE]
    words = gl.allocate_shared_memory(gl.uint8, word_shape, codes.layout)
    input_shape: gl.constexpr = [kind.input_blocks, kind.block_rows, _TILE]
    inputs = gl.allocate_shared_memory(gl.bfloat16, input_shape, x.layout)
    words_full, words_empty = _barriers(_WORD_STAGES)
    inputs_full, inputs_empty = _barriers(kind.input_stages)
    turns = mbarrier.allocate_mbarrier(batch=_GROUPS)
    for i in gl.static_range(_GROUPS):
        mbarrier.init(turns.index(i), count=1)
    word_ring = (words, words_full, words_empty)
    input_ring = (inputs, inputs_full, inputs_empty)
    gl.warp_specialize(
        [
            (_multiply, (word_ring, input_ring, turns, scale, results, gl.constexpr(0), sizes, kind)),
            (_multiply, (word_ring, input_ring, turns, scale, results, gl.constexpr(1), sizes, kind)),
            (_load_words, (word_ring, codes, sizes, kind)),
            (_load_inputs, (input_ring, x, sizes, kind)),
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
def _count_tiles(sizes, kind: gl.constexpr):
    """Tiles of rows, and all of the result."""
    rows, _, outputs, _, _ = sizes
    row_tiles = gl.cdiv(rows, kind.block_rows)
    return row_tiles, row_tiles * gl.cdiv(outputs, _GROUPS * _TILE)


@gluon.jit
def _count_work(sizes, kind: gl.constexpr):
    """Tiles and sections of tiles, which programs share."""
    _, _, _, whole, sections = sizes
    _, tiles = _count_tiles(sizes, kind)
    return whole + (tiles - whole) * sections


@gluon.jit
def _place(index, sizes, kind: gl.constexpr):
    """A tile's place among those that are split, negative if it is not, and its section; its first row and
    first tile of codes; and the first and the last step, exclusive."""
    _, steps, _, whole, sections = sizes
    row_tiles, _ = _count_tiles(sizes, kind)
    beyond = gl.maximum(index - whole, 0)
    tile = gl.minimum(index, whole) + beyond // sections
    section = beyond % sections
    length = gl.where(index < whole, steps, gl.cdiv(steps, sections))
    first = section * length
    last = gl.minimum(steps, first + length)
    row = tile % row_tiles * kind.block_rows
    return tile - whole, section, row, tile // row_tiles * _GROUPS, first, last


@gluon.jit
def _output(tile, index, sizes, kind: gl.constexpr):
    """The output whose codes are at an index of a tile."""
    if kind.is_gated:
        _, _, outputs, _, _ = sizes
        half = index // _GATED % 2 * (outputs // 2)
        return half + tile * kind.results + index // (2 * _GATED) * _GATED + index % _GATED
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return tile * _TILE + index


@gluon.jit
def _load_words(ring, codes, sizes, kind: gl.constexpr):
    words, full, empty = ring
    boxes: gl.constexpr = _GROUPS * _TILE // kind.box
    _, steps, outputs, _, _ = sizes
    # Rows of `codes` for an output, on average.
    each = 1 if kind.is_row else steps
    stage = 0
    phase = 1
    for index in range(gl.program_id(0), _count_work(sizes, kind), gl.num_programs(0)):
        _, _, _, tile, first, last = _place(index, sizes, kind)
        for step in range(first, last):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), boxes * codes.nbytes_per_cta)
            row = tile * kind.results * each + (0 if kind.is_row else step * _TILE)
            column = step * (2 * _TILE) if kind.is_row else 0
            for i in gl.static_range(boxes):
                if kind.is_gated:
                    beyond = i // 2 * kind.box + i % 2 * (outputs // 2 * each)
                else:
                    beyond = i * _TILE * each
                at = [row + beyond, column]
                tma.async_load(codes, at, full.index(stage), words.index(stage * boxes + i))
            stage, phase = _next(stage, phase, _WORD_STAGES)


@gluon.jit
def _load_inputs(ring, x, sizes, kind: gl.constexpr):
    inputs, full, empty = ring
    chain: gl.constexpr = kind.chain
    stage = 0
    phase = 1
    for index in range(gl.program_id(0), _count_work(sizes, kind), gl.num_programs(0)):
        _, _, row, _, first, last = _place(index, sizes, kind)
        for block in range(first * kind.chains, last * kind.chains):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), kind.chain * x.nbytes_per_cta)
            for i in gl.static_range(chain):
                at = [row, (block * kind.chain + i) * _TILE]
                tma.async_load(x, at, full.index(stage), inputs.index(stage * kind.chain + i))
            stage, phase = _next(stage, phase, kind.input_stages)


@gluon.jit
def _multiply(word_ring, input_ring, turns, scale, results, group: gl.constexpr, sizes, kind: gl.constexpr):
    """Computes 64 outputs of tiles.

    Warps wait while tensor cores read their registers. So the groups take turns: while one multiplies, the
    other dequantizes codes, and scales what it multiplies next or the sums.
    """
    boxes, words_full, words_empty = word_ring
    inputs, inputs_full, inputs_empty = input_ring
    block_rows: gl.constexpr = kind.block_rows
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, block_rows, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    shared: gl.constexpr = kind.shared
    chain: gl.constexpr = kind.chain
    chains: gl.constexpr = kind.chains
    as_words: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    transposed: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2, transposed=True)
    words = boxes.reinterpret(gl.uint16, [_WORD_STAGES * _GROUPS, _TILE, _TILE], as_words)
    y, parts, counts = results
    _, steps, outputs, _, sections = sizes
    group_scales = outputs // kind.scale_rows if kind.by_group else 0
    last_group = steps * kind.step_groups - 1
    stage = 0
    phase = 0
    input_stage = 0
    input_phase = 0
    turn = 1 - group
    for index in range(gl.program_id(0), _count_work(sizes, kind), gl.num_programs(0)):
        split, section, row, tile, first, last = _place(index, sizes, kind)
        own_tile = tile + group
        of_sums = _own_scales(scale, own_tile, gl.SliceLayout(1, layout), sizes, kind)
        of_codes = _own_scales(scale, own_tile, gl.SliceLayout(1, operand), sizes, kind)
        # Scales are loaded a group of inputs ahead.
        at = gl.minimum(first * kind.step_groups, last_group) * group_scales
        next_of_sums = gl.load(of_sums + at)
        next_of_codes = gl.load(of_codes + at)
        sums = gl.zeros([_TILE, block_rows], gl.float32, layout)
        product = sums
        for step in range(first, last):
            mbarrier.wait(words_full.index(stage), phase)
            for i in gl.static_range(chains):
                # Words are read again for each chain, as registers are few.
                packed = words.index(stage * _GROUPS + group).load(operand)
                if i == chains - 1:
                    mbarrier.arrive(words_empty.index(stage))
                if i * chain % shared == 0:
                    sum_factor = next_of_sums
                    high, low, offset = _code_factors(next_of_codes, operand, kind)
                    next_group = step * kind.step_groups + i * chain // shared + 1
                    at = gl.minimum(next_group, last_group) * group_scales
                    next_of_sums = gl.load(of_sums + at)
                    next_of_codes = gl.load(of_codes + at)
                weights = ()
                for j in gl.static_range(chain):
                    weights += (_dequantize(packed, offset, high, low, i * chain + j, kind),)  # type: ignore[assignment]
                mbarrier.wait(inputs_full.index(input_stage), input_phase)
                mbarrier.wait(turns.index(group), turn)
                turn ^= 1
                if not kind.scales_sums:
                    product = sums
                for j in gl.static_range(chain):
                    own_inputs = inputs.index(input_stage * chain + j).reinterpret(
                        gl.bfloat16, [_TILE, block_rows], transposed
                    )
                    adds = j > 0 or not kind.scales_sums
                    product = warpgroup_mma(weights[j], own_inputs, product, use_acc=adds, is_async=True)
                mbarrier.arrive(turns.index(_GROUPS - 1 - group))
                product = warpgroup_mma_wait(0, [product])
                mbarrier.arrive(inputs_empty.index(input_stage))
                input_stage, input_phase = _next(input_stage, input_phase, kind.input_stages)
                if kind.scales_sums:
                    sums = _add_now(sums, product * _factor(sum_factor, layout, kind))
                else:
                    sums = product
            stage, phase = _next(stage, phase, _WORD_STAGES)
        if not kind.by_group:
            sums *= _factor(next_of_sums, layout, kind)
        if split < 0:
            if kind.is_gated:
                gates, ups = _gates_and_ups(sums)
                _store(y, _gate(gates, ups), row, own_tile, sizes, kind)
            else:
                _store(y, sums, row, own_tile, sizes, kind)
        else:
            own = split * _GROUPS + group
            own_parts = parts + own.to(gl.int64) * sections * (_TILE * block_rows)
            _store_part(own_parts + section * (_TILE * block_rows), sums, kind)
            # All threads have written before one of them says so.
            gl.barrier()
            if gl.atomic_add(counts + own, 1, sem="acq_rel") == sections - 1:
                gl.barrier()
                _add_parts(own_parts, y, row, own_tile, sizes, kind)


@gluon.jit
def _own_scales(scale, tile, layout: gl.constexpr, sizes, kind: gl.constexpr):
    """Where the scales of 64 outputs are, or the one that all of them share."""
    _, _, outputs, _, _ = sizes
    if kind.scale_rows % _TILE == 0 and not kind.is_gated:
        return scale + gl.minimum(tile * _TILE, outputs - 1) // kind.scale_rows
    else:  # noqa: RET505 (Triton compiles what follows a return)
        output = _output(tile, gl.arange(0, _TILE, layout), sizes, kind)
        return scale + gl.minimum(output, outputs - 1) // kind.scale_rows


@gluon.jit
def _add_now(sums, part):
    """sums + part, which the compiler must not put off: registers are too few for two parts."""
    return gl.inline_asm_elementwise("// $0", "=f,0", [sums + part], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _code_factors(scale, layout: gl.constexpr, kind: gl.constexpr):
    """The scales of codes as sums of two bfloat16, and offsets of codes: one for each word of 64 outputs."""
    zeros = gl.zeros([_TILE, _TILE], gl.bfloat16, layout)
    high = zeros
    low = zeros
    offset = zeros - 136.0
    if kind.has_zero:
        offset = zeros + _over_words((-128.0 - (scale & 31).to(gl.float32)).to(gl.bfloat16), layout)
        scale = scale & 0xFFFFFFE0
    if kind.scales_weights:
        factor = scale.to(gl.float32, bitcast=True)
        rounded = factor.to(gl.bfloat16)
        high = zeros + _over_words(rounded, layout)
        low = zeros + _over_words((factor - rounded.to(gl.float32)).to(gl.bfloat16), layout)
    return high, low, offset.to(gl.bfloat16)


@gluon.jit
def _over_words(values, layout: gl.constexpr):
    """Values of outputs, or of all of them, with an axis for their words."""
    return _expand_dims(values, 1, layout) if len(values.shape) else values


@gluon.constexpr_function
def _ptx(code, kind):
    return kind.ptx[code]


@gluon.jit
def _dequantize(packed, offset, high, low, code: gl.constexpr, kind: gl.constexpr):
    """A code of each word as bfloat16, in the layout of `packed`."""
    return gl.inline_asm_elementwise(
        _ptx(code, kind),
        "=&r,r,r,r,r",
        [packed, offset, high, low],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _factor(scale, layout: gl.constexpr, kind: gl.constexpr):
    """Scales f32[outputs, 1], or the one of all outputs, without the zero points in their lowest bits."""
    if kind.has_zero:
        scale = scale & 0xFFFFFFE0
    factor = scale.to(gl.float32, bitcast=True)
    return _expand_dims(factor, 1, layout) if len(factor.shape) else factor


@gluon.jit
def _gate(gates, ups):
    """SiLU of gates times ups."""
    return gates / (1.0 + gl.exp(-gates)) * ups


@gluon.constexpr_function
def _by_outputs(dtype, outputs=TILE):
    """The layout of outputs times rows in which a thread has 16 bytes of adjacent outputs."""
    each = 128 // dtype.primitive_bitwidth
    threads = outputs // each
    return gl.BlockedLayout([each, 1], [threads, 32 // threads], [1, WARPS], [0, 1])


@gluon.jit
def _store(y, tile, row, own_tile, sizes, kind: gl.constexpr):
    """Writes the results of a tile for rows from one on."""
    rows, _, outputs, _, _ = sizes
    width = outputs // (_TILE // kind.results)
    layout: gl.constexpr = _by_outputs(y.dtype.element_ty, kind.results)
    tile = gl.convert_layout(tile.to(y.dtype.element_ty), layout)
    column = own_tile * kind.results + gl.arange(0, kind.results, gl.SliceLayout(1, layout))
    own_row = row + gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    out = _expand_dims(own_row.to(gl.int64) * width, 0, layout) + _expand_dims(column, 1, layout)
    mask = _expand_dims(own_row < rows, 0, layout) & _expand_dims(column < width, 1, layout)
    gl.store(y + out, tile, mask=mask)


@gluon.jit
def _in_part(rows: gl.constexpr, outputs: gl.constexpr):
    """Where the sums of outputs of rows are in a part: of 64, or of the 32 of gate in it."""
    layout: gl.constexpr = _by_outputs(gl.float32, outputs)
    own_row = gl.arange(0, rows, gl.SliceLayout(0, layout)) * _TILE
    index = gl.arange(0, outputs, gl.SliceLayout(1, layout))
    if outputs < _TILE:
        index += index // _GATED * _GATED
    return _expand_dims(own_row, 0, layout) + _expand_dims(index, 1, layout)


@gluon.jit
def _store_part(part, tile, kind: gl.constexpr):
    """Writes the sums of 64 outputs."""
    layout: gl.constexpr = _by_outputs(gl.float32)
    gl.store(part + _in_part(kind.block_rows, _TILE), gl.convert_layout(tile, layout))


@gluon.jit
def _add_parts(parts, y, row, own_tile, sizes, kind: gl.constexpr):
    """Adds the sums of a tile's sections, and writes its results."""
    for i in range(kind.block_rows // _ADDED_ROWS):
        own = parts + i * (_TILE * _ADDED_ROWS) + _in_part(_ADDED_ROWS, kind.results)
        sums = _add_sections(own, sizes, kind)
        if kind.is_gated:
            sums = _gate(sums, _add_sections(own + _GATED, sizes, kind))
        _store(y, sums, row + i * _ADDED_ROWS, own_tile, sizes, kind)


@gluon.jit
def _add_sections(own, sizes, kind: gl.constexpr):
    _, _, _, _, sections = sizes
    sums = gl.load(own)
    for section in range(1, sections):
        sums += gl.load(own + section * (_TILE * kind.block_rows))
    return sums
