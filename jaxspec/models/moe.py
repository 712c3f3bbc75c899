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
from jaxspec.sharding import all_sum, first_of, once, own_part, split_over

STACKED_EXPERTS = tuple(f"mlp.experts.{projection}_proj" for projection in ("gate", "up", "down"))
"""What GGUFs hold of a layer's experts, in Hugging Face's names."""


class MoE(nnx.Module):
    """The weighted sum of the few experts that a linear router chooses for each row.

    A tie between experts goes to the one of the lower index.
    A device has a part of every expert's inner width, or some of the experts, and adds up what these give.

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
            axes=("embed", None),
            bias=self.router_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.gate_up = parameter(
            rngs,
            (count, width, 2, inner),
            ("experts", "embed", None, "expert_inner"),
            experts.gate_up,
            dtype=dtype,
            fan_in=width,
        )
        self.down = parameter(
            rngs,
            (count, inner, width),
            ("experts", "expert_inner", "embed"),
            experts.down,
            dtype=dtype,
            fan_in=inner,
        )

        def bias(source: Source | None, *axes: tuple[str | None, int]) -> nnx.Param | None:
            names, shape = zip(*axes, strict=True)
            if source is None:
                return None
            return parameter(rngs, shape, names, source, dtype=dtype, init="zeros")

        inner_axes = (("experts", count), (None, 2), ("expert_inner", inner))
        self.gate_up_bias = bias(experts.gate_up_bias, *inner_axes)
        self.down_bias = bias(experts.down_bias, (None, count), ("embed", width))

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
        reads_once = reads_each_expert_once(rows.dtype, self.gate_up[...])
        run = self._chosen if reads_once or chosen.size <= self.config.num_experts else self._every
        y = run(rows, weights, chosen).astype(x.dtype)
        return all_sum(y, self._inner_axis or self._expert_axis).reshape(x.shape)

    @property
    def _inner_axis(self) -> str | None:
        """The mesh axis that every expert is split over."""
        return split_over(self.gate_up[...].shape[-1], self.config.intermediate_size)

    @property
    def _expert_axis(self) -> str | None:
        """The mesh axis that the experts are split over."""
        return split_over(self.gate_up[...].shape[0], self.config.num_experts)

    def _chosen(self, rows: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """f32[R, M], reading the experts that were chosen."""
        experts = chosen.reshape(-1)
        mine, part = experts, self.gate_up[...].shape[0]
        if self._expert_axis:
            mine = experts - first_of(part)
            is_mine = (mine >= 0) & (mine < part)
            mine, weights = jnp.where(is_mine, mine, 0), jnp.where(is_mine.reshape(chosen.shape), weights, 0)
        repeated = jnp.repeat(rows, chosen.shape[1], axis=0)
        fused = expert_matmul(repeated, mine, self.gate_up[...])
        if self.gate_up_bias is not None:
            fused = fused + self.gate_up_bias[...][mine]
        inner = self.activate(fused[:, 0], fused[:, 1]).astype(rows.dtype)
        y = expert_matmul(inner, mine, self.down[...])
        if self.down_bias is not None:
            y = y + once(self.down_bias[...], self._inner_axis)[experts]
        return (weights[..., None] * y.reshape(*chosen.shape, -1)).sum(axis=1)

    def _every(self, rows: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """f32[R, M], by way of all experts, those that a row did not choose with a weight of zero."""
        count, part = self.config.num_experts, self.gate_up[...].shape[0]
        share = jnp.zeros((len(rows), count), jnp.float32)
        share = share.at[jnp.arange(len(rows))[:, None], chosen].set(weights)
        share = own_part(share, part, along=1)
        fused = _einsum("rm,emcf->recf", rows, self.gate_up[...])
        if self.gate_up_bias is not None:
            fused = fused + self.gate_up_bias[...]
        inner = self.activate(fused[:, :, 0], fused[:, :, 1])
        y = _einsum("ref,efm->rm", (share[..., None] * inner).astype(rows.dtype), self.down[...])
        if self.down_bias is None:
            return y
        bias = own_part(once(self.down_bias[...], self._inner_axis), part)
        return y + _einsum("re,em->rm", share, bias)


def _einsum(axes: str, x: jax.Array, kernel: jax.Array | Mxfp4Weight) -> jax.Array:
    """f32, whatever the operands' dtype."""
    if isinstance(kernel, Mxfp4Weight):
        kernel = kernel.dense()
    # Without "highest" a GPU would round float32 operands to TF32, and greedy equality with them.
    precision = "highest" if kernel.dtype == jnp.float32 else None
    return jnp.einsum(axes, x, kernel, precision=precision, preferred_element_type=jnp.float32)
