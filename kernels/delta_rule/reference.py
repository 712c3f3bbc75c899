"""The gated delta rule in pure JAX: a recurrence whose state maps keys to values.

A row's key and value replace what the state gave for this key. With decay d_t and strength b_t,

    S_t = d_t S_{t-1} + k_t (b_t (v_t - d_t S_{t-1}^T k_t))^T,    o_t = S_t^T q_t.

Queries, keys and values come out of a short causal convolution; each of the H key heads serves r value heads,
and each of these has a state of its own.

Source: S. Yang et al., arXiv 2412.06464; the `Qwen3NextGatedDeltaNet` of transformers.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxspec_kernels.causal_conv import causal_conv, last_inputs
from jaxspec_kernels.state_loops import States, read_rows, verify_rows


def delta_step(
    state: jax.Array,
    inputs: jax.Array,
    pending: jax.Array,
    rows: jax.Array,
    place: jax.Array,
    unapplied: jax.Array,
    conv: jax.Array,
    log_decay: jax.Array,
    step_bias: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The rule over each slot's last token and its drafts; `state_loops.verify_rows` says which rows count.

    A row holds, for each key head, the convolution's inputs (a query, a key and r values: the channels), then
    r strengths and r steps.

    Args:
      state: f32[places, H, r, D, V], updated.
      inputs: [places, H, W - 1, channels], the last inputs of the convolution, updated.
      pending: [B, K, H, F], updated.
      rows: [G, Q, H, F].
      place, unapplied: i32[G].
      conv: [H, W, channels], the weights of the convolution.
      log_decay, step_bias: f32[H, r].

    Returns:
      The updated arrays, and the outputs f32[G, Q, H, r, V], zeros for a group without a place.
    """
    rule = DeltaRule(conv, log_decay, step_bias, state.shape[3])
    (state, inputs), pending, outputs = verify_rows(
        rule.step, (state, inputs), pending, rows, place, unapplied
    )
    has_place = (place < len(state)).reshape(-1, 1, 1, 1, 1)
    return state, inputs, pending, jnp.where(has_place, outputs, 0)


def delta_scan(
    state: jax.Array,
    inputs: jax.Array,
    rows: jax.Array,
    count: jax.Array,
    is_start: jax.Array,
    source: jax.Array,
    place: jax.Array,
    copy: jax.Array,
    conv: jax.Array,
    log_decay: jax.Array,
    step_bias: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The rule over rows of prompts; `state_loops.read_rows` says which rows count, and where states are.

    Args:
      state, inputs, conv, log_decay, step_bias: as in `delta_step`.
      rows: [G, C, H, F].
      count, source, place, copy: i32[G].
      is_start: bool[G].

    Returns:
      The updated arrays, and the outputs f32[G, C, H, r, V]. Those of rows that do not count are finite.
    """
    rule = DeltaRule(conv, log_decay, step_bias, state.shape[3])
    (state, inputs), outputs = read_rows(
        rule.chunk, (state, inputs), rows, count, is_start, source, place, copy
    )
    return state, inputs, outputs


@dataclass(frozen=True)
class DeltaRule:
    """The rule with a layer's weights.

    Attributes:
      conv: [H, W, channels], the weights of the convolution.
      log_decay, step_bias: f32[H, r].
      key_size: D, of queries and keys.
    """

    conv: jax.Array
    log_decay: jax.Array
    step_bias: jax.Array
    key_size: int

    def step(self, states: States, rows: jax.Array) -> tuple[jax.Array, States]:
        """One row [n, H, F] of each sequence: outputs f32[n, H, r, V], and the states behind them."""
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
        """Rows [n, C, H, F], of which the first ones are valid: outputs f32[n, C, H, r, V], and the states
        behind the valid ones.

        The changes u_t of all rows solve (I + A) u = b (v - D S k), where A holds the products of each key
        with those before it, D the decays since the start: one triangular system for each state.
        """
        state, inputs = states
        rows = jnp.where(valid[:, :, None, None], rows, 0)
        mixed, strength, log_decay = self._split(rows)
        strength = jnp.where(valid[:, :, None, None], strength, 0)
        log_decay = jnp.where(valid[:, :, None, None], log_decay, 0)
        mixed = jnp.moveaxis(mixed, 1, 2).astype(inputs.dtype)  # [n, H, C, channels]
        text = jnp.concatenate([inputs, mixed], axis=2)
        length = rows.shape[1]
        query, key, value = self._convolved(causal_conv(text, self.conv))
        inputs = last_inputs(text, valid.sum(axis=1), inputs.shape[2])

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
        channels, group = self.conv.shape[2], self.log_decay.shape[1]
        mixed, strength, step = jnp.split(rows, [channels, channels + group], axis=-1)
        step = jax.nn.softplus(step.astype(jnp.float32) + self.step_bias)
        return mixed, jax.nn.sigmoid(strength.astype(jnp.float32)), -jnp.exp(self.log_decay) * step

    def _convolved(self, sums: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries and keys f32[n, H, …, D], and values f32[n, H, r, …, V], of sums [n, H, …, channels]."""
        active = jax.nn.silu(sums).astype(jnp.float32)
        query, key, values = jnp.split(active, [self.key_size, 2 * self.key_size], axis=-1)
        group = self.log_decay.shape[1]
        values = values.reshape(*values.shape[:-1], group, values.shape[-1] // group)
        return _unit(query) * self.key_size**-0.5, _unit(key), jnp.moveaxis(values, -2, 2)


def _unit(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + 1e-6)


def _einsum(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(axes, x, y, precision="highest")
