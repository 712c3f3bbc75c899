"""The product of rows with a weight in codes of eight or four bits."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.packed_matmul.coded_experts import CodedExperts, stack_codes
from jaxspec_kernels.packed_matmul.coded_weight import TILE, CodedWeight, block_words, pack_codes
from jaxspec_kernels.packed_matmul.reference import packed_matmul as reference

packed_matmul = Op("packed_matmul", xla=reference, triton="packed_matmul.triton_kernel")

__all__ = ["TILE", "CodedExperts", "CodedWeight", "block_words", "pack_codes", "packed_matmul", "stack_codes"]
