"""Writes new latents into the paged cache."""

from jaxspec_kernels.latent_write import reference
from jaxspec_kernels.op import Op

latent_write = Op("latent_write", xla=reference.latent_write, triton="latent_write.triton_kernel")

__all__ = ["latent_write"]
