"""Layers of gated delta rules, whose states map keys to values (`jaxspec_kernels.linear_recurrence`).

Source: the `Qwen3NextGatedDeltaNet` of transformers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxspec_kernels.linear_recurrence import DeltaRule, recurrence_scan, recurrence_step

from jaxspec.attention import AnyMemory, Recurrence, RopeTables, StateShape
from jaxspec.config import ModelConfig
from jaxspec.config.delta import DeltaConfig
from jaxspec.sharding import PendingSum, later_psum, local_part, split_over
from jaxspec.weights.parameters import Projection, Source, Whole, parameter, product
from jaxspec.weights.sources_by_head import ConvByHead, InputsByHead


def delta_state_shape(config: DeltaConfig) -> StateShape:
    """A map from keys to values for each value head, and the last inputs of the convolution."""
    maps = (config.group, config.key_size, config.value_size)
    inputs = (config.conv_width - 1, num_channels(config))
    row = num_channels(config) + 2 * config.group
    return StateShape(config.num_key_heads, ((maps, "float32"), (inputs, None)), row)


def num_channels(config: DeltaConfig) -> int:
    """Channels of the convolution for each key head: its query, its key and its values."""
    return 2 * config.key_size + config.group * config.value_size


class GatedDeltaNet(nnx.Module):
    """A layer of the rule, in the place of attention: rope and positions do not reach it."""

    def __init__(self, config: ModelConfig, name: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        assert config.delta is not None
        delta, width = config.delta, config.hidden_size
        self.config, self.eps = delta, config.rms_norm_eps
        heads, group, size = delta.num_key_heads, delta.group, delta.value_size
        source = self.input_source(delta, name, width)
        self.inputs = parameter(
            rngs,
            (width, heads, num_channels(delta) + group * size + 2 * group),
            ("embed", "kv_heads", None),
            source,
            dtype=dtype,
            fan_in=width,
        )
        self.conv = parameter(
            rngs,
            (heads, delta.conv_width, num_channels(delta)),
            ("kv_heads", None, None),
            ConvByHead(
                f"{name}.conv1d.weight",
                heads,
                (delta.key_size, delta.key_size, group * size),
                delta.conv_width,
            ),
            dtype=dtype,
            fan_in=delta.conv_width,
        )
        # Always float32: their exponentials decide how long a state lasts.
        whole: dict[str, Any] = {"dtype": jnp.dtype(jnp.float32), "rngs": rngs}
        self.log_decay = _by_value_head(f"{name}.A_log", delta, init="zeros", **whole)
        self.step_bias = _by_value_head(f"{name}.dt_bias", delta, init="ones", **whole)
        self.scale = parameter(
            rngs, (size,), (None,), Whole(f"{name}.norm.weight", (size,)), dtype=dtype, init="ones"
        )
        self.output = parameter(
            rngs,
            (heads, group, size, width),
            ("kv_heads", None, "head_dim", "embed"),
            Projection(f"{name}.out_proj.weight", (heads, group, size), (width,)),
            dtype=dtype,
            fan_in=heads * group * size,
        )

    @classmethod
    def input_source(cls, delta: DeltaConfig, name: str, width: int) -> Source:
        """Where a checkpoint keeps what a row is projected to, [M, H, F + rV + …] in the order of `split`."""
        return InputsByHead.by_kind(name, delta, width)

    def __call__(
        self, x: jax.Array, memory: AnyMemory, layer: int, rope: RopeTables
    ) -> tuple[jax.Array | PendingSum, AnyMemory]:
        """Maps x [N, M] to [N', M]; also returns the memory. `layer` is the layer's index in the memory."""
        projected = product(x, self.inputs[...])
        heads, channels = projected.shape[1], num_channels(self.config)
        gated = self.config.group * self.config.value_size
        mixed, gates, scalars = jnp.split(projected, [channels, channels + gated], axis=-1)
        rule = DeltaRule(
            self.conv[...],
            local_part(self.log_decay[...].reshape(-1, self.config.group), heads),
            local_part(self.step_bias[...].reshape(-1, self.config.group), heads),
            self.config.key_size,
        )
        rows = jnp.concatenate([mixed, scalars], axis=-1)
        recurrence = Recurrence.with_kernels(
            delta_state_shape(self.config), rows, rule, (recurrence_step, recurrence_scan)
        )
        read, memory = memory.recur(layer, recurrence)
        gates = memory.outputs(layer, gates).reshape(read.shape)
        wide = read.astype(x.dtype).astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + self.eps)
        normed = (self.scale[...] * wide.astype(x.dtype)).astype(jnp.float32)
        gated_rows = (normed * jax.nn.silu(gates.astype(jnp.float32))).astype(x.dtype)
        part = product(gated_rows, self.output[...], contracting=3)
        return later_psum(part, split_over(heads, self.config.num_key_heads)), memory


def _by_value_head(name: str, config: DeltaConfig, *, init: str, **args: Any) -> nnx.Param:
    shape = (config.num_value_heads,)
    return parameter(args["rngs"], shape, (None,), Whole(name, shape), dtype=args["dtype"], init=init)
