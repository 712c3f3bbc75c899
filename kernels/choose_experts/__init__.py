"""The experts with the best scores for each row, and their weights."""

from jaxspec_kernels.choose_experts import reference
from jaxspec_kernels.op import Op

choose_experts = Op("choose_experts", xla=reference.choose_experts, triton="choose_experts.triton_kernel")

__all__ = ["choose_experts"]
