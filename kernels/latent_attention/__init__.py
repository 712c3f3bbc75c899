"""Multi-head latent attention of a few query rows per slot over a paged cache of latents."""

from jaxspec_kernels.latent_attention import reference
from jaxspec_kernels.op import Op

latent_attention = Op(
    "latent_attention", xla=reference.latent_attention, triton="latent_attention.triton_kernel"
)

__all__ = ["latent_attention"]
