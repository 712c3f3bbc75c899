"""Multi-head latent attention of a few query rows per slot over a paged cache of latents."""

from jaxspec_kernels.latent_attention import reference
from jaxspec_kernels.op import Op


def _triton():
    from jaxspec_kernels.latent_attention.triton_kernel import latent_attention

    return latent_attention


latent_attention = Op("latent_attention", xla=reference.latent_attention, triton=_triton)

__all__ = ["latent_attention"]
