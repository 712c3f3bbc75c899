import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.random import Purpose

from jaxspec.sampling import sample

TRIALS = 200_000
draw = jax.jit(sample, static_argnums=3)


def test_draws_follow_the_softmax(sampling_state, chi_square_excess):
    logits = jnp.linspace(-2, 2, 16)
    draws = draw(
        jnp.broadcast_to(logits, (TRIALS, 16)),
        sampling_state(TRIALS),
        jnp.arange(TRIALS) % 11,
        Purpose.BONUS,
    )
    assert chi_square_excess(np.bincount(draws, minlength=16), jax.nn.softmax(logits)) < 1


def test_temperature_0_takes_the_argmax(sampling_state):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(64, 100)), jnp.float32)
    state = sampling_state(64, temperature=jnp.arange(64) % 2)
    draws = draw(logits, state, jnp.zeros(64, jnp.int32), Purpose.BONUS)
    best = logits.argmax(-1)
    np.testing.assert_array_equal(draws[::2], best[::2])
    assert (draws[1::2] != best[1::2]).any()


def test_masked_tokens_are_never_drawn(sampling_state):
    logits = jnp.zeros((1000, 10)).at[:, 1:].set(-jnp.inf)
    assert (draw(logits, sampling_state(1000), jnp.arange(1000), Purpose.BONUS) == 0).all()


@pytest.mark.parametrize("poison", [jnp.nan, -jnp.inf, jnp.inf])
def test_poisoned_rows_give_an_id_in_range(poison, sampling_state):
    logits = jnp.full((2, 10), poison)
    draws = draw(logits, sampling_state(2, temperature=[0, 1]), jnp.arange(2), Purpose.BONUS)
    assert ((draws >= 0) & (draws < 10)).all()
