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

AXIS_TO_MESH: Mapping[str, str | None] = {
    "kv_heads": "model",
    "feed_forward": "model",
    "vocab": "model",
    "experts": None,
    "embed": None,
    "group": None,
    "head_dim": None,
    "pages": None,
    "page": None,
    "slots": None,
}
"""Which mesh axis each logical axis of an array is split over; None keeps it whole on every device."""
