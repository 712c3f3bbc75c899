"""Temperature, min-p, top-k and top-p of every slot."""

import jax
import jax.numpy as jnp
from jaxspec_kernels import process_logits as kernels
from jaxspec_kernels.argmax import row_max
from jaxspec_kernels.row_sum import row_log, row_sum

from jaxspec.sampling.mode import SamplingMode
from jaxspec.sampling.state import SamplingState


def process_logits(logits: jax.Array, sampling: SamplingState, *, mode: SamplingMode) -> jax.Array:
    """The logits that tokens are drawn from; see `jaxspec_kernels.process_logits.reference`.

    Args:
      logits: [B, Q, V], of any float dtype.
      sampling: the parameters of the B slots.
      mode: only `TRUNCATED` applies top-k and top-p.

    Returns:
      f32[B, Q, V], -inf where masked. Rows of slots with temperature 0 are the raw logits.
    """
    return kernels.process_logits(
        logits.astype(jnp.float32),
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        truncated=mode == SamplingMode.TRUNCATED,
    )


def log_sum_exp(logits: jax.Array) -> jax.Array:
    """log(sum(exp(logits))) over the last axis, f32[...] of f32[..., V]."""
    peak = row_max(logits)
    peak = jnp.where(jnp.isinf(peak), 0.0, peak)
    return peak + row_log(row_sum(jnp.exp(logits - peak[..., None])))
