"""Feed-forward networks of routed experts."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxspec_kernels.choose_experts import choose_experts
from jaxspec_kernels.expert_matmul import (
    Mxfp4Weight,
    PackedExperts,
    Weights,
    expert_matmul,
    gated_expert_matmul,
    gates_experts,
    reads_each_expert_once,
)
from jaxspec_kernels.packed_matmul import CodedExperts
from jaxspec_kernels.row_sum import sum_in_order

from jaxspec.config import ModelConfig
from jaxspec.models.layers.transformer import Linear
from jaxspec.sharding import (
    PendingSum,
    later_psum,
    local_part,
    local_start,
    on_first_device,
    split_over,
)
from jaxspec.weights.expert_sources import ExpertSources, stacked_experts, tensor_per_expert
from jaxspec.weights.parameters import Source, parameter

STACKED_EXPERTS = tuple(f"mlp.experts.{projection}_proj" for projection in ("gate", "up", "down"))
"""The expert tensors of a layer in a GGUF, by their Hugging Face names."""


class MoE(nnx.Module):
    """The weighted sum of the few experts that a linear router chooses for each row.

    Of experts with equal scores, those with the lower index are chosen. With several devices, each holds a
    part of every expert's inner width, or some of the experts, and the devices' results are summed.

    Attributes:
      router_name: the router's name in a checkpoint.
      router_bias: whether the router has a bias.
      num_inner: how many projections of a row an expert's activation takes: gate and up, or up alone.
      has_both_forms: whether a checkpoint may have one tensor for all experts instead of one for each
        (`MoeConfig.is_stacked`).
    """

    router_name: ClassVar[str] = "gate"
    router_bias: ClassVar[bool] = False
    num_inner: ClassVar[int] = 2
    has_both_forms: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        assert config.moe is not None
        self.config = config.moe
        count, width, inner = config.moe.num_experts, config.hidden_size, config.moe.intermediate_size
        sources = stacked_experts if config.moe.is_stacked else self.sources
        expert_width, parts = config.moe.latent_size or width, self.num_inner
        experts = sources(f"{name}.experts", count, expert_width, inner)
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
            (count, expert_width, parts, inner),
            ("experts", "embed", None, "expert_inner"),
            experts.gate_up,
            dtype=dtype,
            fan_in=expert_width,
        )
        self.down = parameter(
            rngs,
            (count, inner, expert_width),
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

        inner_axes = (("experts", count), (None, parts), ("expert_inner", inner))
        self.gate_up_bias = bias(experts.gate_up_bias, *inner_axes)
        self.down_bias = bias(experts.down_bias, (None, count), ("embed", expert_width))

    @classmethod
    def sources(cls, name: str, count: int, width: int, inner: int) -> ExpertSources:
        """Where a checkpoint stores the `count` experts, of width M and inner width F, called `name`.

        What they give as gate and up is what `activate` takes, [E, M, num_inner, F].
        """
        return tensor_per_expert(name, count, width, inner)

    def activate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """The input of the down projection, from the `num_inner` outputs, [..., F] each."""
        return jax.nn.silu(gate) * up

    def expert_input(self, rows: jax.Array) -> jax.Array:
        """What the experts read of the rows [R, M] by which they are chosen."""
        return rows

    def expert_output(self, y: jax.Array | PendingSum) -> jax.Array | PendingSum:
        """What is added to the stream, from the weighted sum of the experts' outputs."""
        return y

    def route(self, x: jax.Array, *tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Chooses k experts for each row of x [R, M]: their weights f32[R, k] and indices i32[R, k].

        Args:
          tokens: i32[R], for a router that reads them.
        """
        return choose_experts(
            self.router(x, out_dtype=jnp.float32),
            keep=self.config.experts_per_token,
            softmax="chosen" if self.config.normalize else "all",
        )

    def __call__(self, x: jax.Array, *tokens: jax.Array) -> jax.Array | PendingSum:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self._route_each(rows, *tokens)
        # Reading only the chosen experts pays for few rows. For many rows it pays only if the kernel reads
        # each expert once; a gather would copy most experts several times.
        stored = (self.gate_up[...], self.down[...])
        reads_once = all(reads_each_expert_once(rows.dtype, weight) for weight in stored)
        run = self._chosen if reads_once or chosen.size <= self.config.num_experts else self._every
        y = run(self.expert_input(rows), weights, chosen).astype(x.dtype).reshape(*x.shape[:-1], -1)
        return self.expert_output(later_psum(y, self._inner_axis or self._expert_axis))

    def _route_each(self, *rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Like `route`; with packed experts, a row's result does not depend on the number of rows."""
        if not isinstance(self.gate_up[...], PackedExperts):
            return self.route(*rows)

        # XLA's products and sums depend on the number of rows in the last bits. One row at a time costs
        # little beside the experts.
        def one(row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            weights, chosen = self.route(*(each[None] for each in row))
            return weights[0], chosen[0]

        return jax.lax.map(one, rows)

    @property
    def _inner_axis(self) -> str | None:
        """The mesh axis that every expert's inner width is split over; None if it is whole."""
        return split_over(self.gate_up[...].shape[-1], self.config.intermediate_size)

    @property
    def _expert_axis(self) -> str | None:
        """The mesh axis that the experts are divided among; None if this device has all of them."""
        return split_over(self.gate_up[...].shape[0], self.config.num_experts)

    def _chosen(self, rows: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """f32[R, M], reading only the chosen experts."""
        experts = chosen.reshape(-1)
        mine, part = experts, self.gate_up[...].shape[0]
        if self._expert_axis:
            mine = experts - local_start(part)
            is_mine = (mine >= 0) & (mine < part)
            mine, weights = jnp.where(is_mine, mine, 0), jnp.where(is_mine.reshape(chosen.shape), weights, 0)
        y = expert_matmul(self._inner(rows, mine), mine, self.down[...])
        if self.down_bias is not None:
            y = y + on_first_device(self.down_bias[...], self._inner_axis)[experts]
        y = y.reshape(*chosen.shape, -1)
        return sum_in_order(weights[:, :, None] * y, axis=1)[:, 0]

    def _inner(self, rows: jax.Array, experts: jax.Array) -> jax.Array:
        """The input of the down projection of each of `experts`, [A, F]; see `expert_matmul`."""
        gate_up = self.gate_up[...]
        is_plain = type(self).activate is MoE.activate and self.gate_up_bias is None
        if is_plain and gates_experts(rows.dtype, gate_up):
            return gated_expert_matmul(rows, experts, gate_up)
        fused = expert_matmul(rows, experts, gate_up)
        if self.gate_up_bias is not None:
            fused = fused + self.gate_up_bias[...][experts]
        return self.activate(*jnp.unstack(fused, axis=1)).astype(rows.dtype)

    def shares(self, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """The weight of every expert, f32[R, E], from the result of `route`, which chose none twice."""
        share = jnp.zeros((len(chosen), self.config.num_experts), jnp.float32)
        return share.at[jnp.arange(len(chosen))[:, None], chosen].set(weights)

    def _every(self, rows: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """f32[R, M], running every row through all experts; those that it did not choose have weight 0."""
        part = self.gate_up[...].shape[0]
        share = local_part(self.shares(weights, chosen), part, along=1)
        fused = _einsum("rm,emcf->recf", rows, self.gate_up[...])
        if self.gate_up_bias is not None:
            fused = fused + self.gate_up_bias[...]
        inner = self.activate(*jnp.unstack(fused, axis=2))
        y = _einsum("ref,efm->rm", (share[..., None] * inner).astype(rows.dtype), self.down[...])
        if self.down_bias is None:
            return y
        bias = local_part(on_first_device(self.down_bias[...], self._inner_axis), part)
        return y + _einsum("re,em->rm", share, bias)


def _einsum(axes: str, x: jax.Array, kernel: Weights) -> jax.Array:
    """An einsum whose result is float32, whatever the operands' dtypes."""
    if isinstance(kernel, Mxfp4Weight | PackedExperts | CodedExperts):
        kernel = kernel.dense()
        x = x.astype(kernel.dtype)
    # Without "highest" a GPU rounds float32 operands to TF32, which can change greedy tokens.
    precision = "highest" if kernel.dtype == jnp.float32 else None
    return jnp.einsum(axes, x, kernel, precision=precision, preferred_element_type=jnp.float32)
