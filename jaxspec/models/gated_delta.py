"""The gated delta rule: a recurrent layer whose state maps keys to values.

A row's key and value replace what the state gave for this key. With decay d_t and strength b_t,

    S_t = d_t S_{t-1} + k_t (b_t (v_t - d_t S_{t-1}^T k_t))^T,    o_t = S_t^T q_t.

Queries, keys and values come out of a short causal convolution; each of the H key heads serves r value heads,
and each of these has a state of its own.

Source: S. Yang et al., arXiv 2412.06464; the `Qwen3NextGatedDeltaNet` of transformers.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec.attention import AnyMemory, Recurrence, RopeTables, States, StateShape
from jaxspec.config import ModelConfig
from jaxspec.config.delta import DeltaConfig
from jaxspec.models.causal_conv import causal_conv, last_inputs
from jaxspec.models.parameters import Projection, Source, Whole, parameter, product
from jaxspec.models.sources_by_head import ConvByHead, InputsByHead
from jaxspec.sharding import PendingSum, later_psum, local_part, split_over


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
            self.config,
            self.conv[...],
            local_part(self.log_decay[...].reshape(-1, self.config.group), heads),
            local_part(self.step_bias[...].reshape(-1, self.config.group), heads),
        )
        rows = jnp.concatenate([mixed, scalars], axis=-1)
        recurrence = Recurrence(delta_state_shape(self.config), rows, rule.step, rule.chunk)
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


@dataclass(frozen=True)
class DeltaRule:
    """The rule with a layer's weights; its methods are those of a `Recurrence`.

    Attributes:
      config: the sizes.
      conv: [H, W, channels], the weights of the convolution.
      log_decay, step_bias: f32[H, r].
    """

    config: DeltaConfig
    conv: jax.Array
    log_decay: jax.Array
    step_bias: jax.Array

    def step(self, states: States, rows: jax.Array) -> tuple[jax.Array, States]:
        """See `Recurrence.step`: outputs f32[n, H, r, V]."""
        state, inputs = states
        mixed, strength, log_decay = self._split(rows)
        window = jnp.concatenate([inputs, mixed.astype(inputs.dtype)[:, :, None]], axis=2)
        query, key, value = self._convolved(causal_conv(window, self.conv)[:, :, 0])
        state = state * jnp.exp(log_decay)[..., None, None]
        known = (state * key[:, :, None, :, None]).sum(axis=3)
        change = (value - known) * strength[..., None]
        state = state + key[:, :, None, :, None] * change[..., None, :]
        read = (state * query[:, :, None, :, None]).sum(axis=3)
        return read, (state, window[:, :, 1:])

    def chunk(self, states: States, rows: jax.Array, valid: jax.Array) -> tuple[jax.Array, States]:
        """See `Recurrence.chunk`: outputs f32[n, C, H, r, V].

        The changes u_t of all rows solve (I + A) u = b (v - D S k), where A holds the products of each key
        with those before it, D the decays since the start: one triangular system for each state.
        """
        state, inputs = states
        count = valid.sum(axis=1)
        rows = jnp.where(valid[:, :, None, None], rows, 0)
        mixed, strength, log_decay = self._split(rows)
        strength = jnp.where(valid[:, :, None, None], strength, 0)
        log_decay = jnp.where(valid[:, :, None, None], log_decay, 0)
        mixed = jnp.moveaxis(mixed, 1, 2).astype(inputs.dtype)  # [n, H, C, channels]
        text = jnp.concatenate([inputs, mixed], axis=2)
        length = rows.shape[1]
        query, key, value = self._convolved(causal_conv(text, self.conv))
        inputs = last_inputs(text, count, inputs.shape[2])

        strength, log_decay = (jnp.moveaxis(x, 1, -1) for x in (strength, log_decay))  # [n, H, r, C]
        total = jnp.cumsum(log_decay, axis=-1)
        since = total[..., :, None] - total[..., None, :]
        index = jnp.arange(length)
        decay = jnp.where(index[:, None] >= index, jnp.exp(jnp.minimum(since, 0)), 0)
        earlier = jnp.where(index[:, None] > index, decay, 0)
        keys = _einsum("nhtk,nhsk->nhts", key, key)[:, :, None] * earlier * strength[..., None]
        from_state = _einsum("nhtk,nhrkv->nhrtv", key, state) * jnp.exp(total)[..., None]
        wanted = strength[..., None] * (value - from_state)
        change = lax.linalg.triangular_solve(keys, wanted, left_side=True, lower=True, unit_diagonal=True)
        products = _einsum("nhtk,nhsk->nhts", query, key)[:, :, None] * decay
        read = _einsum("nhtk,nhrkv->nhrtv", query, state) * jnp.exp(total)[..., None]
        read = read + _einsum("nhrts,nhrsv->nhrtv", products, change)
        left = jnp.exp(total[..., -1:] - total)
        state = state * jnp.exp(total[..., -1])[..., None, None]
        state = state + _einsum("nhtk,nhrtv->nhrkv", key, change * left[..., None])
        return jnp.moveaxis(read, 3, 1), (state, inputs)

    def _split(self, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The convolution's inputs [..., H, channels], and strengths and logarithms of decays f32[..., H, r]
        of rows [..., H, F]."""
        channels, group = num_channels(self.config), self.config.group
        mixed, strength, step = jnp.split(rows, [channels, channels + group], axis=-1)
        step = jax.nn.softplus(step.astype(jnp.float32) + self.step_bias)
        return mixed, jax.nn.sigmoid(strength.astype(jnp.float32)), -jnp.exp(self.log_decay) * step

    def _convolved(self, sums: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries and keys f32[n, H, …, D], and values f32[n, H, r, …, V], of sums [n, H, …, channels]."""
        size, group = self.config.key_size, self.config.group
        active = jax.nn.silu(sums).astype(jnp.float32)
        query, key, values = jnp.split(active, [size, 2 * size], axis=-1)
        values = values.reshape(*values.shape[:-1], group, self.config.value_size)
        return _unit(query) * size**-0.5, _unit(key), jnp.moveaxis(values, -2, 2)


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + 1e-6)


def _einsum(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(axes, x, y, precision="highest")
