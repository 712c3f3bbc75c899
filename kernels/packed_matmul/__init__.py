"""Products of rows with a weight in codes of eight or four bits."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.packed_matmul.coded_experts import CodedExperts, stack_codes
from jaxspec_kernels.packed_matmul.coded_weight import CodedWeight, block_words, pack_codes, tile_outputs
from jaxspec_kernels.packed_matmul.dequantize_reference import dequantize_codes as dequantize_reference
from jaxspec_kernels.packed_matmul.hopper_tiles import HOPPER_ROWS, is_for_hopper
from jaxspec_kernels.packed_matmul.reference import gate
from jaxspec_kernels.packed_matmul.reference import gated_packed_matmul as gated_reference
from jaxspec_kernels.packed_matmul.reference import packed_matmul as reference

packed_matmul = Op("packed_matmul", xla=reference, triton="packed_matmul.triton_kernel")
gated_packed_matmul = Op("gated_packed_matmul", xla=gated_reference, triton="packed_matmul.triton_kernel")
dequantize_codes = Op("dequantize_codes", xla=dequantize_reference, triton="packed_matmul.triton_dequantize")

__all__ = [
    "HOPPER_ROWS",
    "CodedExperts",
    "CodedWeight",
    "block_words",
    "dequantize_codes",
    "gate",
    "gated_packed_matmul",
    "is_for_hopper",
    "pack_codes",
    "packed_matmul",
    "stack_codes",
    "tile_outputs",
]
