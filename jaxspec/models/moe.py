"""Feed-forward networks of routed experts."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxspec_kernels.expert_matmul import Mxfp4Weight, expert_matmul, reads_each_expert_once

from jaxspec.config import ModelConfig
from jaxspec.models.expert_sources import ExpertSources, tensor_per_expert
from jaxspec.models.layers import Linear
from jaxspec.models.parameters import Source, parameter

STACKED_EXPERTS = tuple(f"mlp.experts.{projection}_proj" for projection in ("gate", "up", "down"))
"""What GGUFs hold of a layer's experts, in Hugging Face's names."""


class MoE(nnx.Module):
    """The weighted sum of the few experts that a linear router chooses for each row.

    A tie between experts goes to the one of the lower index.

    Attributes:
      router_name: what a checkpoint calls the router.
      router_bias: it has one.
    """

    router_name: ClassVar[str] = "gate"
    router_bias: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        assert config.moe is not None
        self.config = config.moe
        count, width, inner = config.moe.num_experts, config.hidden_size, config.moe.intermediate_size
        experts = self.sources(f"{name}.experts", count, width, inner)
        self.router = Linear(
            width,
            count,
            f"{name}.{self.router_name}",
            axes=("embed", "experts"),
            bias=self.router_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.gate_up = parameter(
            rngs,
            (count, width, 2, inner),
            ("experts", "embed", None, "feed_forward"),
            experts.gate_up,
            dtype=dtype,
            fan_in=width,
        )
        self.down = parameter(
            rngs,
            (count, inner, width),
            ("experts", "feed_forward", "embed"),
            experts.down,
            dtype=dtype,
            fan_in=inner,
        )

        def bias(source: Source | None, *axes: tuple[str | None, int]) -> nnx.Param | None:
            names, shape = zip(*axes, strict=True)
            if source is None:
                return None
            return parameter(rngs, shape, names, source, dtype=dtype, init="zeros")

        inner_axes = (("experts", count), (None, 2), ("feed_forward", inner))
        self.gate_up_bias = bias(experts.gate_up_bias, *inner_axes)
        self.down_bias = bias(experts.down_bias, ("experts", count), ("embed", width))

    @classmethod
    def sources(cls, name: str, count: int, width: int, inner: int) -> ExpertSources:
        """Where a checkpoint keeps so many experts [M, F] that it calls `name`."""
        return tensor_per_expert(name, count, width, inner)

    def activate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """What the down projection reads, of the two others' outputs."""
        return jax.nn.silu(gate) * up

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights f32[R, k] and experts i32[R, k] of rows x [R, M]."""
        logits = self.router(x, out_dtype=jnp.float32)
        chosen_logits, chosen = jax.lax.top_k(logits, self.config.experts_per_token)
        if self.config.normalize:
            return jax.nn.softmax(chosen_logits), chosen
        return jnp.exp(chosen_logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)), chosen

    def __call__(self, x: jax.Array) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(rows)
        # Few rows read only the experts that they chose. Where each of them is copied, many rows would read
        # most experts more than once.
        once = reads_each_expert_once(chosen.size, rows.dtype, self.gate_up[...])
        run = self._chosen if once or chosen.size <= self.config.num_experts else self._every
        return run(rows, weights, chosen).astype(x.dtype).reshape(x.shape)

    def _chosen(self, rows: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """f32[R, M], reading the experts that were chosen."""
        experts = chosen.reshape(-1)
        repeated = jnp.repeat(rows, chosen.shape[1], axis=0)
        fused = expert_matmul(repeated, experts, self.gate_up[...])
        if self.gate_up_bias is not None:
            fused = fused + self.gate_up_bias[...][experts]
        inner = self.activate(fused[:, 0], fused[:, 1]).astype(rows.dtype)
        y = expert_matmul(inner, experts, self.down[...])
        if self.down_bias is not None:
            y = y + self.down_bias[...][experts]
        return (weights[..., None] * y.reshape(*chosen.shape, -1)).sum(axis=1)

    def _every(self, rows: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """f32[R, M], by way of all experts, those that a row did not choose with a weight of zero."""
        count = self.config.num_experts
        share = jnp.zeros((len(rows), count), jnp.float32)
        share = share.at[jnp.arange(len(rows))[:, None], chosen].set(weights)
        fused = _einsum("rm,emcf->recf", rows, self.gate_up[...])
        if self.gate_up_bias is not None:
            fused = fused + self.gate_up_bias[...]
        inner = self.activate(fused[:, :, 0], fused[:, :, 1])
        y = _einsum("ref,efm->rm", (share[..., None] * inner).astype(rows.dtype), self.down[...])
        return y if self.down_bias is None else y + _einsum("re,em->rm", share, self.down_bias[...])


def _einsum(axes: str, x: jax.Array, kernel: jax.Array | Mxfp4Weight) -> jax.Array:
    """f32, whatever the operands' dtype."""
    if isinstance(kernel, Mxfp4Weight):
        kernel = kernel.dense()
    # Without "highest" a GPU would round float32 operands to TF32, and greedy equality with them.
    precision = "highest" if kernel.dtype == jnp.float32 else None
    return jnp.einsum(axes, x, kernel, precision=precision, preferred_element_type=jnp.float32)
