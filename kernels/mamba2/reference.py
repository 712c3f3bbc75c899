"""Mamba-2 in pure JAX: a recurrence whose state maps keys to values, and decays as each row says.

With a head's step size t_t and decay d_t = exp(-exp(A) t_t), and keys k and queries q (B and C in the paper),

    S_t = d_t S_{t-1} + k_t (t_t v_t)^T,    o_t = S_t^T q_t + D v_t.

Values, keys and queries come out of a short causal convolution; the r heads of a group share keys and
queries.

Source: T. Dao and A. Gu, arXiv 2405.21060; the `NemotronHMamba2Mixer` of transformers, apart from its lower
bound `time_step_min` on t. That is applied to prompts and not to single tokens, so the same text would have
two states; vLLM has no such bound.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxspec_kernels.causal_conv import causal_conv, last_inputs
from jaxspec_kernels.state_loops import States, read_rows, verify_rows


def mamba_step(
    state: jax.Array,
    inputs: jax.Array,
    pending: jax.Array,
    rows: jax.Array,
    place: jax.Array,
    unapplied: jax.Array,
    conv: jax.Array,
    conv_bias: jax.Array | None,
    log_decay: jax.Array,
    step_bias: jax.Array,
    skip: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The rule over each slot's last token and its drafts; `state_loops.verify_rows` says which rows count.

    A row holds, for each of the H groups of heads, the convolution's inputs (r values, a key and a query: the
    channels), then r step sizes.

    Args:
      state: f32[places, H, r, D, P], updated.
      inputs: [places, H, W - 1, channels], the last inputs of the convolution, updated.
      pending: [B, K, H, F], updated.
      rows: [G, Q, H, F].
      place, unapplied: i32[G].
      conv: [H, W, channels], the weights of the convolution.
      conv_bias: [H, channels], or None.
      log_decay, step_bias, skip: f32[H, r], A, the bias of step sizes, and D.

    Returns:
      The updated arrays, and the outputs f32[G, Q, H, r, P], zeros for a group without a place.
    """
    rule = Mamba2Rule(conv, conv_bias, log_decay, step_bias, skip, state.shape[3])
    (state, inputs), pending, outputs = verify_rows(
        rule.step, (state, inputs), pending, rows, place, unapplied
    )
    has_place = (place < len(state)).reshape(-1, 1, 1, 1, 1)
    return state, inputs, pending, jnp.where(has_place, outputs, 0)


def mamba_scan(
    state: jax.Array,
    inputs: jax.Array,
    rows: jax.Array,
    count: jax.Array,
    is_start: jax.Array,
    source: jax.Array,
    place: jax.Array,
    copy: jax.Array,
    conv: jax.Array,
    conv_bias: jax.Array | None,
    log_decay: jax.Array,
    step_bias: jax.Array,
    skip: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The rule over rows of prompts; `state_loops.read_rows` says which rows count, and where states are.

    Args:
      state, inputs, conv, conv_bias, log_decay, step_bias, skip: as in `mamba_step`.
      rows: [G, C, H, F].
      count, source, place, copy: i32[G].
      is_start: bool[G].

    Returns:
      The updated arrays, and the outputs f32[G, C, H, r, P]. Those of rows that do not count are finite.
    """
    rule = Mamba2Rule(conv, conv_bias, log_decay, step_bias, skip, state.shape[3])
    (state, inputs), outputs = read_rows(
        rule.chunk, (state, inputs), rows, count, is_start, source, place, copy
    )
    return state, inputs, outputs


@dataclass(frozen=True)
class Mamba2Rule:
    """The rule with a layer's weights.

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
    key_size: int

    def step(self, states: States, rows: jax.Array) -> tuple[jax.Array, States]:
        """One row [n, H, F] of each sequence: outputs f32[n, H, r, P], and the states behind them."""
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
        """Rows [n, C, H, F], of which the first ones are valid: outputs f32[n, C, H, r, P], and the states
        behind the valid ones.

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
        mixed, size = jnp.split(rows, [self.conv.shape[2]], axis=-1)
        return mixed, jax.nn.softplus(size.astype(jnp.float32) + self.step_bias)

    def _convolved(self, text: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Values f32[n, H, r, C, P], and keys and queries f32[n, H, C, D], of inputs
        [n, H, W - 1 + C, channels]."""
        active = jax.nn.silu(causal_conv(text, self.conv, self.conv_bias)).astype(jnp.float32)
        values, group = active.shape[-1] - 2 * self.key_size, self.skip.shape[1]
        value, key, query = jnp.split(active, [values, values + self.key_size], axis=-1)
        value = value.reshape(*value.shape[:-1], group, values // group)
        return jnp.moveaxis(value, -2, 2), key, query


def _einsum(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(axes, x, y, precision="highest")
