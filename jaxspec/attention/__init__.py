"""The paged key/value cache and, for each kind of attention, its metadata builder."""

from jaxspec.attention.builder import AttentionKind, build_metadata
from jaxspec.attention.cache import CacheShape, LayerCache, LayerCacheShape, init_cache
from jaxspec.attention.full import FullAttention
from jaxspec.attention.indexed_window import IndexedWindow, IndexedWindowMetadata
from jaxspec.attention.metadata import AttentionMetadata
from jaxspec.attention.sliding_window import SlidingWindow

__all__ = [
    "AttentionKind",
    "AttentionMetadata",
    "CacheShape",
    "FullAttention",
    "IndexedWindow",
    "IndexedWindowMetadata",
    "LayerCache",
    "LayerCacheShape",
    "SlidingWindow",
    "build_metadata",
    "init_cache",
]
