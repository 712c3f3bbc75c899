"""Penalties on a CPU: rows are copied, and only the tokens of a text are computed."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels import numba_call as call
from jaxspec_kernels.penalise.reference import penalise as reference
from jaxspec_kernels.token_marks import IN_PROMPT

_NAME = "jaxspec_penalise"


def penalise(
    logits: jax.Array,
    marks: jax.Array,
    drafts: jax.Array,
    seen: jax.Array,
    repetition: jax.Array,
    frequency: jax.Array,
    presence: jax.Array,
) -> jax.Array:
    """See `reference.penalise`, which computes other cases."""
    if logits.dtype != jnp.float32 or not logits.size:
        return reference(logits, marks, drafts, seen, repetition, frequency, presence)
    changed = jax.ShapeDtypeStruct(logits.shape, jnp.float32)
    kernel = jax.ffi.ffi_call(_target(), changed)
    return kernel(logits, marks, drafts, seen, repetition, frequency, presence)


@call.once
def _target() -> str:
    """Compiles and registers the kernel; returns its name."""
    return call.register(_NAME, _part, fastmath=set())


@call.inlined
def _changed(logit, mark, repetition, frequency, presence):
    if mark == 0:
        return logit
    logit = logit / repetition if logit > 0 else logit * repetition
    count = mark & (IN_PROMPT - 1)
    if count:
        logit = logit - frequency * np.float32(count) - presence
    return logit


def _part(frame, part, parts):
    logits_, drafts_ = call.argument(frame, 0), call.argument(frame, 2)
    slots, rows, width = call.shape(logits_, 3)
    num_drafts = call.shape(drafts_, 2)[1]
    logits, changed = call.floats(logits_), call.floats(call.result(frame, 0))
    marks, drafts = call.integers(call.argument(frame, 1)), call.integers(drafts_)
    seen = call.integers(call.argument(frame, 3))
    repetition, frequency, presence = (
        call.floats(call.argument(frame, 4)),
        call.floats(call.argument(frame, 5)),
        call.floats(call.argument(frame, 6)),
    )
    for row in range(slots * rows * part // parts, slots * rows * (part + 1) // parts):
        slot = row // rows
        first, mark = row * width, slot * width
        r, f, p = repetition[slot], frequency[slot], presence[slot]
        for column in range(width):
            changed[first + column] = logits[first + column]
        for column in range(width):
            if marks[mark + column]:
                changed[first + column] = _changed(logits[first + column], marks[mark + column], r, f, p)
        num_seen = min(seen[row % rows], num_drafts)
        for i in range(num_seen):
            column = drafts[slot * num_drafts + i]
            if 0 <= column < width:
                # Also for a draft that is there twice this is the same both times.
                more = marks[mark + column]
                for j in range(num_seen):
                    more += drafts[slot * num_drafts + j] == column
                changed[first + column] = _changed(logits[first + column], more, r, f, p)
    return 0
