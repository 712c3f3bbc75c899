"""The Sinkhorn-Knopp algorithm for many small matrices."""

from jaxspec_kernels.op import Op
from jaxspec_kernels.sinkhorn import reference

sinkhorn = Op("sinkhorn", xla=reference.sinkhorn, triton="sinkhorn.triton_kernel")

__all__ = ["sinkhorn"]
