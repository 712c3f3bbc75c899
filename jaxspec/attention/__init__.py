"""The paged key/value cache and, for each kind of attention, its metadata builder."""

from jaxspec.attention.cache import CacheShape, LayerCache, init_cache
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
    "SlidingWindow",
    "build_metadata",
    "init_cache",
]
