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
"""The axis of a mesh of devices that weights and caches are split over."""

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
"""Which mesh axis each logical axis of an array is split over; None keeps it whole on every device.

A mesh axis splits one axis of an array, the first of these: experts by their inner width, so that each device
reads as much of every one, or, where that does not divide, a part of the experts each.
"""

AXIS_UNIT: Mapping[str, int] = {"expert_inner": 32, "vocab": 2}
"""What a device has of an axis is a multiple of this, 1 where nothing is said: experts in MXFP4 have blocks
of 32 inputs, and a word of random bits belongs to two tokens."""
