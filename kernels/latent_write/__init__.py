"""Writes new latents into the paged cache."""

from jaxspec_kernels.latent_write import reference
from jaxspec_kernels.op import Op


def _triton():
    from jaxspec_kernels.latent_write.triton_kernel import latent_write

    return latent_write


latent_write = Op("latent_write", xla=reference.latent_write, triton=_triton)

__all__ = ["latent_write"]
