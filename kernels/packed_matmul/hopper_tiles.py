"""Which products `hopper_codes` computes, and how its programs share tiles. Needs no Triton."""

from jaxspec_kernels.op import device, why_not
from jaxspec_kernels.packed_matmul.coded_weight import BLOCK_WORDS, TILE, CodedWeight

HOPPER_ROWS = 2048
"""Up to so many rows take no longer with the codes than with the dequantized weight, on an H200."""
BLOCK_ROWS = 128
MANY_ROWS = 256
"""Rows of a tile where these are many. Registers then have room for one tile of sums instead of two."""
PROGRAMS = 132
"""Multiprocessors of an H100 or H200, each of which has room for one program."""
_TILE_BLOCKS = 12
"""Blocks of 64 inputs that 128 rows are multiplied with in the time that a tile's beginning and end take."""
_SECTION_BLOCKS = 3
"""The same, with any number of rows, for writing and adding the sums of one of a tile's sections."""
_MOST_SECTIONS = 8


def is_for_hopper(kernel: CodedWeight) -> bool:
    """Whether this GPU is of the Hopper generation, and its kernel for many rows reads the weight."""
    is_hopper = getattr(device(), "compute_capability", None) == "9.0" and why_not("triton") is None
    is_tiled = kernel.block_words == BLOCK_WORDS and kernel.codes.shape[-2] in (1, TILE)
    return is_hopper and is_tiled and kernel.offset is None


def split_tiles(tiles: int, steps: int, per_word: int, block_rows: int) -> tuple[int, int]:
    """The tiles that are not split, and the sections of the others, that take the least time.

    Programs share work evenly. Without sections they may have too few tiles, or too few in the last round.

    Args:
      steps: of a tile, each over as many blocks of 64 inputs as a word has codes; sections are whole steps.
      per_word: codes of a word.
      block_rows: of a tile.
    """
    one_tile = _TILE_BLOCKS * BLOCK_ROWS / block_rows

    def time(plan: tuple[int, int]) -> float:
        whole, sections = plan
        rounds = -(-(tiles - whole) * sections // PROGRAMS)
        split = rounds * (-(-steps // sections) * per_word + one_tile + _SECTION_BLOCKS * sections)
        return -(-whole // PROGRAMS) * (steps * per_word + one_tile) + split

    full = tiles // PROGRAMS * PROGRAMS
    plans = ((whole, sections) for sections in range(2, _MOST_SECTIONS + 1) for whole in {0, full} - {tiles})
    return min([(tiles, 1), *plans], key=time)
