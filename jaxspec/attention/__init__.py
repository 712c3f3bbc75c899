"""The paged key/value cache and, for each kind of attention, its metadata builder."""

from jaxspec.attention.cache import CacheShape, LayerCache, LayerCacheShape, init_cache
from jaxspec.attention.metadata import (
    AttentionKind,
    AttentionMetadata,
    FullAttention,
    SlidingWindow,
    build_metadata,
)

__all__ = [
    "AttentionKind",
    "AttentionMetadata",
    "CacheShape",
    "FullAttention",
    "LayerCache",
    "LayerCacheShape",
    "SlidingWindow",
    "build_metadata",
    "init_cache",
]
