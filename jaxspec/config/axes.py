"""The axis glossary, and which axes are split over devices.

Axes, as they appear in shape comments and in `AXIS_TO_MESH`:

    B  slots (rows of the batch)            N  key/value heads
    Q  query rows per slot                  G  query heads per key/value head
    K  drafts per step                      H  query heads, N * G
    P  positions per page                   D  head size
    T  width of the page table              M  model width (hidden size)
    S  engine steps per dispatch            F  feed-forward width (intermediate size)
    R  rows of one prefill program          V  vocabulary of the target
    C  tokens per row of a prefill program  W  vocabulary of the drafter
    E  experts of a layer
"""

from collections.abc import Mapping

MESH_AXIS = "tensor"
"""Name of the device-mesh axis over which weights and caches are split."""

AXIS_TO_MESH: Mapping[str, str | None] = {
    "kv_heads": MESH_AXIS,
    "feed_forward": MESH_AXIS,
    "expert_inner": MESH_AXIS,
    "experts": MESH_AXIS,
    "vocab": MESH_AXIS,
    "embed": None,
    "group": None,
    "head_dim": None,
    "pages": None,
    "page": None,
    "slots": None,
}
"""The mesh axis over which each logical axis of an array is split; None keeps it whole on every device.

A mesh axis splits only one axis of an array: the first in this order that divides evenly. So experts are
split by their inner width, which gives every device an equal share of each expert; if that does not divide,
each device holds some of the experts.
"""

AXIS_UNIT: Mapping[str, int] = {"expert_inner": 32, "vocab": 2}
"""A device's part of an axis is a multiple of this number (1 if not listed): MXFP4 experts have blocks of 32
inputs, and each word of random bits serves two tokens."""
