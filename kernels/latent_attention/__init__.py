"""Multi-head latent attention of a few query rows per slot over a paged cache of latents."""

from jaxspec_kernels.dispatch import Op
from jaxspec_kernels.latent_attention import reference

# Without a GPU kernel, a GPU runs the reference too; asked for by name, "triton" is an error that says so.
latent_attention = Op("latent_attention", xla=reference.latent_attention)

__all__ = ["latent_attention"]
