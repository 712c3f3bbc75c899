"""Mamba-2 layers, whose states map keys to values (`jaxspec_kernels.linear_recurrence`)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxspec_kernels.linear_recurrence import Mamba2Rule, recurrence_scan, recurrence_step

from jaxspec.attention import AnyMemory, Recurrence, RopeTables, StateShape
from jaxspec.config.mamba import MambaConfig
from jaxspec.sharding import PendingSum, later_psum, split_over
from jaxspec.weights.parameters import Projection, bias_parameter, parameter, product
from jaxspec.weights.sources_by_head import BiasByHead, ConvByHead, InputsByHead


def mamba_state_shape(config: MambaConfig) -> StateShape:
    """A map from keys to values for each head, and the last inputs of the convolution."""
    channels = sum(config.sections)
    maps = (config.group, config.state_size, config.head_size)
    states = ((maps, "float32"), ((config.conv_width - 1, channels), None))
    return StateShape(config.num_groups, states, channels + config.group)


class Mamba2(nnx.Module):
    """A Mamba-2 layer, in the place of attention: rope and positions do not reach it.

    Args:
      config: its sizes.
      width: M.
      eps: of the norm of its outputs, which every group has for itself.
      name: in a checkpoint.
    """

    def __init__(
        self, config: MambaConfig, width: int, eps: float, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.config, self.eps = config, eps
        groups, heads, channels = config.num_groups, config.group, sum(config.sections)
        values = heads * config.head_size
        sections = (values, *config.sections, heads)  # gates first, step sizes last
        args: dict[str, Any] = {"dtype": dtype}
        # Always float32: their exponentials decide how long a state lasts.
        whole: dict[str, Any] = {"dtype": jnp.dtype(jnp.float32)}
        self.inputs = parameter(
            rngs,
            (width, groups, sum(sections)),
            ("embed", "kv_heads", None),
            InputsByHead((f"{name}.in_proj.weight",), (sections,), False, groups, width),
            fan_in=width,
            **args,
        )
        self.input_bias = bias_parameter(
            config.bias,
            rngs,
            (groups, sum(sections)),
            ("kv_heads", None),
            BiasByHead(f"{name}.in_proj.bias", groups, sections),
            **args,
        )
        self.conv = parameter(
            rngs,
            (groups, config.conv_width, channels),
            ("kv_heads", None, None),
            ConvByHead(f"{name}.conv1d.weight", groups, config.sections, config.conv_width),
            fan_in=config.conv_width,
            **args,
        )
        self.conv_bias = bias_parameter(
            config.conv_bias,
            rngs,
            (groups, channels),
            ("kv_heads", None),
            BiasByHead(f"{name}.conv1d.bias", groups, config.sections),
            **args,
        )

        def by_head(leaf: str, size: int, *, init: str, **args: Any) -> nnx.Param:
            source = BiasByHead(f"{name}.{leaf}", groups, (size,))
            return parameter(rngs, (groups, size), ("kv_heads", None), source, init=init, **args)

        self.log_decay = by_head("A_log", heads, init="zeros", **whole)
        self.step_bias = by_head("dt_bias", heads, init="ones", **whole)
        self.skip = by_head("D", heads, init="ones", **whole)
        self.scale = by_head("norm.weight", values, init="ones", **args)
        self.output = parameter(
            rngs,
            (groups, values, width),
            ("kv_heads", "head_dim", "embed"),
            Projection(f"{name}.out_proj.weight", (groups, values), (width,)),
            fan_in=groups * values,
            **args,
        )
        self.output_bias = bias_parameter(
            config.bias,
            rngs,
            (width,),
            ("embed",),
            Projection(f"{name}.out_proj.bias", (), (width,)),
            **args,
        )

    def __call__(
        self, x: jax.Array, memory: AnyMemory, layer: int, rope: RopeTables
    ) -> tuple[jax.Array | PendingSum, AnyMemory]:
        """Maps x [N, M] to [N', M]; also returns the memory. `layer` is the layer's index in the memory."""
        projected = product(x, self.inputs[...])
        if self.input_bias is not None:
            projected = projected + self.input_bias[...]
        groups, values = projected.shape[1], self.config.sections[0]
        rule = Mamba2Rule(
            self.conv[...],
            None if self.conv_bias is None else self.conv_bias[...],
            self.log_decay[...],
            self.step_bias[...],
            self.skip[...],
            self.config.state_size,
        )
        recurrence = Recurrence.with_kernels(
            mamba_state_shape(self.config),
            projected[..., values:],
            rule,
            (recurrence_step, recurrence_scan),
        )
        read, memory = memory.recur(layer, recurrence)
        gates = memory.outputs(layer, projected[..., :values]).astype(jnp.float32)
        gated = read.reshape(gates.shape).astype(x.dtype).astype(jnp.float32) * jax.nn.silu(gates)
        normed = gated * lax.rsqrt(jnp.square(gated).mean(axis=-1, keepdims=True) + self.eps)
        scaled = self.scale[...] * normed.astype(x.dtype)
        part = product(scaled, self.output[...], contracting=2)
        y = later_psum(part, split_over(groups, self.config.num_groups))
        return y if self.output_bias is None else y + self.output_bias[...], memory
