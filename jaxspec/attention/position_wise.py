"""Layers whose rows see no other position."""

from dataclasses import dataclass

from jaxspec.attention.metadata import build
from jaxspec.attention.rows import RowBlock


@dataclass(frozen=True)
class PositionWise:
    """A layer without attention, such as a feed-forward network alone; it never calls its memory's methods to
    attend, and its cache has no arrays: `layer_cache` is ()."""


@build.register
def _(kind: PositionWise, block: RowBlock) -> tuple[()]:
    return ()
