"""Mamba-2: a recurrent layer whose state maps keys to values and decays by a factor that each row chooses.

With a head's step size t_t and decay d_t = exp(-exp(A) t_t), and keys k and queries q (B and C in the paper),

    S_t = d_t S_{t-1} + k_t (t_t v_t)^T,    o_t = S_t^T q_t + D v_t.

Values, keys and queries come out of a short causal convolution; the heads of a group share keys and queries.

Source: T. Dao and A. Gu, arXiv 2405.21060; the `NemotronHMamba2Mixer` of transformers, apart from its lower
bound `time_step_min` on t. That is applied to prompts and not to single tokens, so the same text would have
two states; vLLM has no such bound.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxspec_kernels.causal_conv import causal_conv, last_inputs

from jaxspec.attention import AnyMemory, Recurrence, RopeTables, States, StateShape
from jaxspec.config.mamba import MambaConfig
from jaxspec.models.parameters import Projection, bias_parameter, parameter, product
from jaxspec.models.sources_by_head import BiasByHead, ConvByHead, InputsByHead
from jaxspec.sharding import PendingSum, later_psum, split_over


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
            self.config,
            self.conv[...],
            None if self.conv_bias is None else self.conv_bias[...],
            self.log_decay[...],
            self.step_bias[...],
            self.skip[...],
        )
        recurrence = Recurrence(
            mamba_state_shape(self.config), projected[..., values:], rule.step, rule.chunk
        )
        read, memory = memory.recur(layer, recurrence)
        gates = memory.outputs(layer, projected[..., :values]).astype(jnp.float32)
        gated = read.reshape(gates.shape).astype(x.dtype).astype(jnp.float32) * jax.nn.silu(gates)
        normed = gated * lax.rsqrt(jnp.square(gated).mean(axis=-1, keepdims=True) + self.eps)
        scaled = self.scale[...] * normed.astype(x.dtype)
        part = product(scaled, self.output[...], contracting=2)
        y = later_psum(part, split_over(groups, self.config.num_groups))
        return y if self.output_bias is None else y + self.output_bias[...], memory


@dataclass(frozen=True)
class Mamba2Rule:
    """The rule with a layer's weights; its methods are those of a `Recurrence`. H counts groups.

    Attributes:
      config: the sizes.
      conv: [H, W, channels], the weights of the convolution.
      conv_bias: [H, channels], or None.
      log_decay, step_bias, skip: f32[H, r], A, the bias of step sizes, and D.
    """

    config: MambaConfig
    conv: jax.Array
    conv_bias: jax.Array | None
    log_decay: jax.Array
    step_bias: jax.Array
    skip: jax.Array

    def step(self, states: States, rows: jax.Array) -> tuple[jax.Array, States]:
        """See `Recurrence.step`: outputs f32[n, H, r, P]."""
        state, inputs = states
        mixed, size = self._split(rows)
        window = jnp.concatenate([inputs, mixed.astype(inputs.dtype)[:, :, None]], axis=2)
        value, key, query = self._convolved(window)
        value, key, query = value[:, :, :, 0], key[:, :, 0], query[:, :, 0]
        state = state * jnp.exp(self._rate * size)[..., None, None]
        state = state + key[:, :, None, :, None] * (value * size[..., None])[..., None, :]
        read = (state * query[:, :, None, :, None]).sum(axis=3)
        return read + self.skip[..., None] * value, (state, window[:, :, 1:])

    def chunk(self, states: States, rows: jax.Array, valid: jax.Array) -> tuple[jax.Array, States]:
        """See `Recurrence.chunk`: outputs f32[n, C, H, r, P].

        A row reads the state before the chunk, and the values of the chunk up to its own by the products of
        their keys with its query; both have decayed since.
        """
        state, inputs = states
        mixed, size = self._split(jnp.where(valid[:, :, None, None], rows, 0))
        # A step of no size neither decays a state nor adds to it.
        size = jnp.where(valid[:, :, None, None], size, 0)
        mixed = jnp.moveaxis(mixed, 1, 2).astype(inputs.dtype)  # [n, H, C, channels]
        text = jnp.concatenate([inputs, mixed], axis=2)
        value, key, query = self._convolved(text)
        inputs = last_inputs(text, valid.sum(axis=1), inputs.shape[2])

        size = jnp.moveaxis(size, 1, -1)  # [n, H, r, C]
        total = jnp.cumsum(self._rate[..., None] * size, axis=-1)
        index = jnp.arange(rows.shape[1])
        since = jnp.minimum(total[..., :, None] - total[..., None, :], 0)
        decay = jnp.where(index[:, None] >= index, jnp.exp(since), 0)
        added = value * size[..., None]
        products = _einsum("nhtk,nhsk->nhts", query, key)[:, :, None] * decay
        read = _einsum("nhtk,nhrkv->nhrtv", query, state) * jnp.exp(total)[..., None]
        read = read + _einsum("nhrts,nhrsv->nhrtv", products, added)
        read = read + self.skip[..., None, None] * value
        left = jnp.exp(total[..., -1:] - total)
        state = state * jnp.exp(total[..., -1])[..., None, None]
        state = state + _einsum("nhtk,nhrtv->nhrkv", key, added * left[..., None])
        return jnp.moveaxis(read, 3, 1), (state, inputs)

    @property
    def _rate(self) -> jax.Array:
        return -jnp.exp(self.log_decay)

    def _split(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The convolution's inputs [..., H, channels], and step sizes f32[..., H, r], of rows [..., H, F]."""
        mixed, size = jnp.split(rows, [sum(self.config.sections)], axis=-1)
        return mixed, jax.nn.softplus(size.astype(jnp.float32) + self.step_bias)

    def _convolved(self, text: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Values f32[n, H, r, C, P], and keys and queries f32[n, H, C, state size], of inputs
        [n, H, W - 1 + C, channels]."""
        active = jax.nn.silu(causal_conv(text, self.conv, self.conv_bias)).astype(jnp.float32)
        values, size, _ = self.config.sections
        value, key, query = jnp.split(active, [values, values + size], axis=-1)
        value = value.reshape(*value.shape[:-1], self.config.group, self.config.head_size)
        return jnp.moveaxis(value, -2, 2), key, query


def _einsum(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(axes, x, y, precision="highest")
