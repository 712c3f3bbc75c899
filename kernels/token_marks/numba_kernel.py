"""Counts of tokens as one loop on a CPU, where XLA writes each token by an operation of its own."""

import jax
import jax.numpy as jnp
from jaxspec_kernels.calls import numba_call as call
from jaxspec_kernels.token_marks.reference import IN_PROMPT

_NAME = "jaxspec_token_marks"


def token_marks(columns: jax.Array, prompt_length: jax.Array, length: jax.Array, *, size: int) -> jax.Array:
    """See `reference.token_marks`."""
    marks = jax.ShapeDtypeStruct((len(length), size), jnp.int32)
    return jax.ffi.ffi_call(_target(), marks)(columns, prompt_length, length)


@call.once
def _target() -> str:
    """Compiles and registers the kernel; returns its name."""
    return call.register(_NAME, _part, fastmath=set(), alone=False)


def _part(frame, part, parts):
    columns_, marks_ = call.argument(frame, 0), call.result(frame, 0)
    rows, width = call.shape(columns_, 2)
    size = call.shape(marks_, 2)[1]
    columns, marks = call.integers(columns_), call.integers(marks_)
    prompt_length, length = call.integers(call.argument(frame, 1)), call.integers(call.argument(frame, 2))
    for row in range(rows * part // parts, rows * (part + 1) // parts):
        first, text = row * size, row * width
        for column in range(size):
            marks[first + column] = 0
        for place in range(min(length[row], width)):
            column = columns[text + place]
            if 0 <= column < size:
                if place < prompt_length[row]:
                    marks[first + column] = IN_PROMPT
                else:
                    marks[first + column] += 1
    return 0
