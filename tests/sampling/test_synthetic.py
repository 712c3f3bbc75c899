import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling import SamplingMode, verify_synthetic
from jaxspec.sampling.synthetic import acceptance_rates

SLOTS, DRAFTS, VOCABULARY = 20_000, 3, 8


def run(state, mean_acceptance_length, *, mode, **changes):
    given = {
        "logits": jnp.zeros((SLOTS, DRAFTS + 1, VOCABULARY)).at[..., 5].set(1.0),
        "drafts": jnp.ones((SLOTS, DRAFTS), jnp.int32),
        "draft_count": jnp.full(SLOTS, DRAFTS),
        "draft_logits": None,
        "draft_vocab": None,
        "positions": jnp.tile(jnp.arange(DRAFTS + 1), (SLOTS, 1)),
    } | changes
    return jax.jit(verify_synthetic, static_argnames=("mode", "mean_acceptance_length"))(
        **given, sampling=state, mode=mode, mean_acceptance_length=mean_acceptance_length
    )


@pytest.mark.parametrize(
    ("length", "mode"),
    [
        (1.0, SamplingMode.GREEDY),
        (1.3, SamplingMode.TEMPERATURE),
        (2.0, SamplingMode.TRUNCATED),
        (2.75, SamplingMode.GREEDY),
        (4.0, SamplingMode.GREEDY),
    ],
)
def test_the_mean_is_the_one_asked_for(length, mode, sampling_state):
    verdict = run(sampling_state(SLOTS), length, mode=mode)
    fraction = length % 1
    error = 5 * np.sqrt(fraction * (1 - fraction) / SLOTS)
    assert abs(verdict.accepted.mean() + 1 - length) <= error + 1e-6
    assert set(np.unique(verdict.accepted)) <= {int(length) - 1, int(length)}


def test_the_token_after_the_drafts_is_the_targets(sampling_state):
    greedy = run(sampling_state(SLOTS, temperature=0), 2.5, mode=SamplingMode.GREEDY)
    assert (greedy.token == 5).all()
    sampled = run(sampling_state(SLOTS), 2.5, mode=SamplingMode.TEMPERATURE)
    searched = run(sampling_state(SLOTS), 2.5, mode=SamplingMode.TRUNCATED)
    np.testing.assert_array_equal(searched.token, sampled.token)
    truncated = run(sampling_state(SLOTS, top_k=1), 2.5, mode=SamplingMode.TRUNCATED)
    assert (truncated.token == 5).all()
    assert (sampled.token != 1).all()  # rejected at the first or second draft: p without the draft
    assert (sampled.token == 5).mean() == pytest.approx(np.e / (np.e + 6), abs=0.02)


def test_only_real_drafts_count(sampling_state):
    state = sampling_state(SLOTS, temperature=0)
    assert (run(state, 4.0, mode=SamplingMode.GREEDY, draft_count=jnp.ones(SLOTS)).accepted == 1).all()
    placeholders = jnp.ones((SLOTS, DRAFTS), jnp.int32).at[:, 2].set(-1)
    assert (run(state, 4.0, mode=SamplingMode.GREEDY, drafts=placeholders).accepted == 2).all()


@pytest.mark.parametrize("length", [0.9, 4.1, float("nan")])
def test_a_length_out_of_range_is_named(length):
    with pytest.raises(ValueError, match="mean_acceptance_length must lie between 1 and 4 with 3 drafts"):
        acceptance_rates(length, DRAFTS)
