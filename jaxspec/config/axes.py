"""The axis glossary, and which axes are split over devices.

Axes in the shape comments of jaxspec; kernels have their own glossary (`kernels/__init__.py`):

    N  flat rows of a forward pass          M  model width (hidden size)
    B  slots, or packed rows in training    F  feed-forward width (intermediate size)
    G  groups of rows in a block [G, Q]     H  key/value heads
    Q  rows per group                       G  query heads per key/value head, after H
    C  tokens per chunk of a prompt         D  head size
    K  drafts per step                      V  vocabulary of the target
    S  steps per dispatch; in training,     W  vocabulary of the drafter
       tokens per packed row                E  experts of a layer
    P  positions per page                   T  width of the page table
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
