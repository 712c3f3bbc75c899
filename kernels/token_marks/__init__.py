"""How often each token of a vocabulary is in a text."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.token_marks.reference import IN_PROMPT
from jaxspec_kernels.token_marks.reference import token_marks as reference

token_marks = Op("token_marks", xla=reference, numba="token_marks.numba_kernel")

__all__ = ["IN_PROMPT", "token_marks"]
