"""How often each token of a vocabulary is in a text."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.token_marks import reference
from jaxspec_kernels.token_marks.reference import IN_PROMPT


def _numba():
    from jaxspec_kernels.token_marks.numba_kernel import token_marks

    return token_marks


token_marks = Op("token_marks", xla=reference.token_marks, numba=_numba)

__all__ = ["IN_PROMPT", "token_marks"]
