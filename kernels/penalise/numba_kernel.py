"""Penalties on a CPU, in place: only the tokens of a text are computed."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxspec_kernels.calls import numba_call as call
from jaxspec_kernels.penalise.reference import penalise as reference
from jaxspec_kernels.token_marks import IN_PROMPT

_NAME = "jaxspec_penalise"
_BLOCK = 64
"""Marks that are looked at together, as most are zero."""


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
    # As the product gave them: XLA copies what is reshaped before it is written in place.
    rows = logits.reshape(-1, logits.shape[-1])
    changed = jax.ShapeDtypeStruct(rows.shape, jnp.float32)
    kernel = jax.ffi.ffi_call(_target(), changed, input_output_aliases={0: 0})
    return kernel(rows, marks, drafts, seen, repetition, frequency, presence).reshape(logits.shape)


@call.once
def _target() -> str:
    """Compiles and registers the kernel; returns its name."""
    return call.register(_NAME, _part, fastmath=set())


@call.inlined
def _changed(logit, mark, repetition, frequency, presence):
    logit = logit / repetition if logit > 0 else logit * repetition
    count = mark & (IN_PROMPT - 1)
    if count:
        logit = logit - frequency * np.float32(count) - presence
    return logit


@call.inlined
def _times(column, drafts, first, count):
    """How often a column is among so many drafts from the one at `first`."""
    times = 0
    for i in range(count):
        times += drafts[first + i] == column
    return times


def _part(frame, part, parts):
    logits_, drafts_ = call.result(frame, 0), call.argument(frame, 2)
    num_rows, width = call.shape(logits_, 2)
    slots, num_drafts = call.shape(drafts_, 2)
    rows = num_rows // slots
    logits = call.floats(logits_)
    marks, drafts = call.integers(call.argument(frame, 1)), call.integers(drafts_)
    seen = call.integers(call.argument(frame, 3))
    repetition, frequency, presence = (
        call.floats(call.argument(frame, 4)),
        call.floats(call.argument(frame, 5)),
        call.floats(call.argument(frame, 6)),
    )
    for row in range(num_rows * part // parts, num_rows * (part + 1) // parts):
        slot = row // rows
        first, mark, draft = row * width, slot * width, slot * num_drafts
        r, f, p = repetition[slot], frequency[slot], presence[slot]
        num_seen = min(seen[row % rows], num_drafts)
        # Every column is changed once, by its mark and the drafts together.
        for start in range(0, width, _BLOCK):
            end, some = min(start + _BLOCK, width), 0
            for column in range(start, end):
                some |= marks[mark + column]
            if some:
                for column in range(start, end):
                    if marks[mark + column]:
                        more = marks[mark + column] + _times(column, drafts, draft, num_seen)
                        logits[first + column] = _changed(logits[first + column], more, r, f, p)
        for i in range(num_seen):
            column = drafts[draft + i]
            if 0 <= column < width and not marks[mark + column] and not _times(column, drafts, draft, i):
                more = _times(column, drafts, draft, num_seen)
                logits[first + column] = _changed(logits[first + column], more, r, f, p)
    return 0
