"""Writing new latents into the paged cache."""

from jaxspec_kernels.dispatch import Op
from jaxspec_kernels.latent_write import reference

latent_write = Op("latent_write", xla=reference.latent_write)

__all__ = ["latent_write"]
