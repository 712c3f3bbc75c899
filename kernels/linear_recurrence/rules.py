"""Recurrences whose states map keys to values, with a layer's weights, in pure JAX.

With a row's key k, query q and value v, and the strength b and decay d that the row says, a state is

    S_t = d_t S_{t-1} + k_t (b_t (v_t - c d_t S_{t-1}^T k_t))^T,    o_t = S_t^T q_t + D v_t.

By the gated delta rule c is 1, as a row's value replaces what the state gave for its key, and D is 0. By
Mamba-2 c is 0, a strength is a step size, and keys and queries are B and C in the paper. Queries, keys and
values come out of a short causal convolution. Each of the H key heads serves r value heads, which have states
of their own; in Mamba-2 a key head is a group of heads.

Sources: S. Yang et al., arXiv 2412.06464, and the `Qwen3NextGatedDeltaNet` of transformers; T. Dao and A. Gu,
arXiv 2405.21060, and the `NemotronHMamba2Mixer` of transformers, apart from its lower bound `time_step_min`.
That is applied to prompts and not to single tokens, so the same text would have two states; vLLM has no such
bound.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jaxspec_kernels.linear_recurrence.causal_conv import causal_conv, last_inputs
from jaxspec_kernels.linear_recurrence.state_loops import States

Split = tuple[jax.Array, jax.Array, jax.Array]


class _Rule(ABC):
    """What both rules have in common; states are f32[n, H, r, D, V] and inputs [n, H, W - 1, channels]."""

    corrects: bool
    """Whether what the state gives for a key is taken from the key's new value (c)."""

    def step(self, states: States, rows: jax.Array) -> tuple[jax.Array, States]:
        """One row [n, H, F] of each sequence: outputs f32[n, H, r, V], and the states behind them."""
        state, inputs = states
        mixed, strength, log_decay = self._split(rows)
        window = jnp.concatenate([inputs, mixed.astype(inputs.dtype)[:, :, None]], axis=2)
        query, key, value = self._convolved(window)
        query, key, value = query[:, :, 0], key[:, :, 0], value[:, :, :, 0]
        state = state * jnp.exp(log_decay)[..., None, None]
        known = (state * key[:, :, None, :, None]).sum(axis=3) if self.corrects else 0
        change = (value - known) * strength[..., None]
        state = state + key[:, :, None, :, None] * change[..., None, :]
        read = (state * query[:, :, None, :, None]).sum(axis=3)
        return self._skipped(read, value), (state, window[:, :, 1:])

    def chunk(self, states: States, rows: jax.Array, valid: jax.Array) -> tuple[jax.Array, States]:
        """Rows [n, C, H, F], of which the first ones are valid: outputs f32[n, C, H, r, V], and the states
        behind the valid ones.

        A row reads the state before the chunk, and the changes of the chunk up to its own by the products of
        their keys with its query; both have decayed since. If a key's old value is taken away, the changes u
        of all rows solve (I + A) u = b (v - D S k), where A holds the products of each key with those before
        it, D the decays since the start: one triangular system for each state.
        """
        state, inputs = states
        rows = jnp.where(valid[:, :, None, None], rows, 0)
        mixed, strength, log_decay = self._split(rows)
        strength, log_decay = (jnp.where(valid[:, :, None, None], x, 0) for x in (strength, log_decay))
        mixed = jnp.moveaxis(mixed, 1, 2).astype(inputs.dtype)  # [n, H, C, channels]
        text = jnp.concatenate([inputs, mixed], axis=2)
        query, key, value = self._convolved(text)
        inputs = last_inputs(text, valid.sum(axis=1), inputs.shape[2])

        strength, log_decay = (jnp.moveaxis(x, 1, -1) for x in (strength, log_decay))  # [n, H, r, C]
        total = jnp.cumsum(log_decay, axis=-1)
        since = jnp.minimum(total[..., :, None] - total[..., None, :], 0)
        index = jnp.arange(rows.shape[1])
        decay = jnp.where(index[:, None] >= index, jnp.exp(since), 0)
        change = value * strength[..., None]
        if self.corrects:
            known = _einsum("nhtk,nhrkv->nhrtv", key, state) * jnp.exp(total)[..., None]
            earlier = jnp.where(index[:, None] > index, decay, 0)
            keys = _einsum("nhtk,nhsk->nhts", key, key)[:, :, None] * earlier * strength[..., None]
            change = strength[..., None] * (value - known)
            change = lax.linalg.triangular_solve(keys, change, left_side=True, lower=True, unit_diagonal=True)
        products = _einsum("nhtk,nhsk->nhts", query, key)[:, :, None] * decay
        read = _einsum("nhtk,nhrkv->nhrtv", query, state) * jnp.exp(total)[..., None]
        read = self._skipped(read + _einsum("nhrts,nhrsv->nhrtv", products, change), value)
        left = jnp.exp(total[..., -1:] - total)
        state = state * jnp.exp(total[..., -1])[..., None, None]
        state = state + _einsum("nhtk,nhrtv->nhrkv", key, change * left[..., None])
        return jnp.moveaxis(read, 3, 1), (state, inputs)

    @abstractmethod
    def _split(self, rows: jax.Array) -> Split:
        """The convolution's inputs [..., H, channels], and strengths and logarithms of decays f32[..., H, r]
        of rows [..., H, F]."""

    @abstractmethod
    def _convolved(self, text: jax.Array) -> Split:
        """Queries and keys f32[n, H, C, D], and values f32[n, H, r, C, V], of inputs
        [n, H, W - 1 + C, channels]."""

    def _skipped(self, read: jax.Array, value: jax.Array) -> jax.Array:
        """What was read [n, H, r, ..., V], with the part of the values that skips the state."""
        return read


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaRule(_Rule):
    """The gated delta rule. A row holds, for each key head, the convolution's inputs (a query, a key and r
    values: the channels), then r strengths and r steps.

    Attributes:
      conv: [H, W, channels], the weights of the convolution.
      log_decay, step_bias: f32[H, r].
      key_size: D, of queries and keys.
    """

    conv: jax.Array
    log_decay: jax.Array
    step_bias: jax.Array
    key_size: int = field(metadata={"static": True})

    corrects = True
    conv_bias = skip = None

    @property
    def places(self) -> tuple[int, int, int]:
        """Where a head's query, key and values begin among its channels."""
        return 0, self.key_size, 2 * self.key_size

    def _split(self, rows: jax.Array) -> Split:
        channels, group = self.conv.shape[2], self.log_decay.shape[1]
        mixed, strength, step = jnp.split(rows, [channels, channels + group], axis=-1)
        step = jax.nn.softplus(step.astype(jnp.float32) + self.step_bias)
        return mixed, jax.nn.sigmoid(strength.astype(jnp.float32)), -jnp.exp(self.log_decay) * step

    def _convolved(self, text: jax.Array) -> Split:
        active = jax.nn.silu(causal_conv(text, self.conv)).astype(jnp.float32)
        query, key, values = jnp.split(active, self.places[1:], axis=-1)
        value = _by_value_head(values, self.log_decay.shape[1])
        return _unit(query) * self.key_size**-0.5, _unit(key), value


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mamba2Rule(_Rule):
    """Mamba-2. A row holds, for each of the H groups of heads, the convolution's inputs (r values, a key and
    a query: the channels), then r step sizes.

    Attributes:
      conv: [H, W, channels], the weights of the convolution.
      conv_bias: [H, channels], or None.
      log_decay, step_bias, skip: f32[H, r], A, the bias of step sizes, and D.
      key_size: of queries and keys.
    """

    conv: jax.Array
    conv_bias: jax.Array | None
    log_decay: jax.Array
    step_bias: jax.Array
    skip: jax.Array
    key_size: int = field(metadata={"static": True})

    corrects = False

    @property
    def places(self) -> tuple[int, int, int]:
        """Where a group's query, key and values begin among its channels."""
        key = self.conv.shape[2] - 2 * self.key_size
        return key + self.key_size, key, 0

    def _split(self, rows: jax.Array) -> Split:
        mixed, size = jnp.split(rows, [self.conv.shape[2]], axis=-1)
        size = jax.nn.softplus(size.astype(jnp.float32) + self.step_bias)
        return mixed, size, -jnp.exp(self.log_decay) * size

    def _convolved(self, text: jax.Array) -> Split:
        active = jax.nn.silu(causal_conv(text, self.conv, self.conv_bias)).astype(jnp.float32)
        query_at, key_at, _ = self.places
        values, key, query = jnp.split(active, [key_at, query_at], axis=-1)
        return query, key, _by_value_head(values, self.log_decay.shape[1])

    def _skipped(self, read: jax.Array, value: jax.Array) -> jax.Array:
        skip = self.skip.reshape(*self.skip.shape, *(1 for _ in value.shape[3:]))
        return read + skip * value


Rule = DeltaRule | Mamba2Rule


def _by_value_head(values: jax.Array, group: int) -> jax.Array:
    """[n, H, r, C, V] of [n, H, C, r * V]."""
    values = values.reshape(*values.shape[:-1], group, values.shape[-1] // group)
    return jnp.moveaxis(values, -2, 2)


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + 1e-6)


def _einsum(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(axes, x, y, precision="highest")
