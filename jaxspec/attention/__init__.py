"""Kinds of attention and the memories they attend to: paged caches, or whole packed texts."""

from jaxspec.attention.builder import AttentionKind, build_metadata
from jaxspec.attention.cache import (
    CacheShape,
    LayerCache,
    LayerCacheShape,
    NumStates,
    StateShape,
    init_cache,
)
from jaxspec.attention.compressed import CompressedAttention, CompressedMetadata
from jaxspec.attention.full import FullAttention
from jaxspec.attention.memory import AnyMemory, Choice, Entries, Memory, Recurrence, States
from jaxspec.attention.metadata import AttentionMetadata, build, build_range, visible_range
from jaxspec.attention.packed import PackedMemory
from jaxspec.attention.paged import PagedMemory
from jaxspec.attention.position_wise import PositionWise
from jaxspec.attention.recurrent import Recurrent, has_states
from jaxspec.attention.rope import (
    RopeTables,
    apply_rope,
    halves_to_pairs,
    pairs_to_halves,
    within_to_halves,
)
from jaxspec.attention.rows import (
    PageTable,
    RowBlock,
    RowBlocks,
    StatePlaces,
    join_rows,
    output_rows,
    row_positions,
    split_rows,
    take_rows,
)
from jaxspec.attention.sliding_window import SlidingWindow

__all__ = [
    "AnyMemory",
    "AttentionKind",
    "AttentionMetadata",
    "CacheShape",
    "Choice",
    "CompressedAttention",
    "CompressedMetadata",
    "Entries",
    "FullAttention",
    "LayerCache",
    "LayerCacheShape",
    "Memory",
    "NumStates",
    "PackedMemory",
    "PageTable",
    "PagedMemory",
    "PositionWise",
    "Recurrence",
    "Recurrent",
    "RopeTables",
    "RowBlock",
    "RowBlocks",
    "SlidingWindow",
    "StatePlaces",
    "StateShape",
    "States",
    "apply_rope",
    "build",
    "build_metadata",
    "build_range",
    "halves_to_pairs",
    "has_states",
    "init_cache",
    "join_rows",
    "output_rows",
    "pairs_to_halves",
    "row_positions",
    "split_rows",
    "take_rows",
    "visible_range",
    "within_to_halves",
]
