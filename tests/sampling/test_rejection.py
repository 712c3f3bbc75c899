from functools import partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.random import Purpose

from jaxspec.sampling import DraftVocabulary, SamplingMode, Verdict, process_logits, sample, verify

SLOTS, DRAFTS, VOCABULARY = 5, 3, 33
check = jax.jit(verify, static_argnames="mode")
process = jax.jit(partial(process_logits, mode=SamplingMode.TRUNCATED))


def case(**changes):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(SLOTS, DRAFTS + 1, VOCABULARY)).astype(np.float32)
    return {
        "logits": jnp.asarray(logits),
        "drafts": jnp.asarray(logits.argmax(-1)[:, :DRAFTS], jnp.int32),
        "draft_count": jnp.full(SLOTS, DRAFTS),
        "draft_logits": None,
        "draft_vocab": None,
        "positions": jnp.arange(SLOTS)[:, None] * 100 + jnp.arange(DRAFTS + 1),
    } | changes


def vocabulary(target_ids):
    """The draft vocabulary of these target ids, in this order."""
    target_ids = jnp.asarray(target_ids, jnp.int32)
    draft_ids = jnp.full(VOCABULARY, -1).at[target_ids].set(jnp.arange(len(target_ids)))
    return DraftVocabulary(target_ids, draft_ids)


def test_greedy_accepts_up_to_the_first_other_token(sampling_state):
    given = case()
    best = np.asarray(given["logits"].argmax(-1))
    for wrong in range(DRAFTS):
        drafts = given["drafts"].at[wrong, wrong].add(1)
        verdict = check(
            **(given | {"drafts": drafts}),
            sampling=sampling_state(SLOTS, temperature=0),
            mode=SamplingMode.GREEDY,
        )
        expected = np.full(SLOTS, DRAFTS)
        expected[wrong] = wrong
        np.testing.assert_array_equal(verdict.accepted, expected)
        np.testing.assert_array_equal(verdict.token, best[np.arange(SLOTS), expected])


@pytest.mark.parametrize("one_hot", [True, False])
def test_temperature_0_slots_in_a_sampled_batch_are_greedy(one_hot, sampling_state):
    given = case()
    drafts = given["drafts"].at[1, 1].add(1).at[4, 0].add(1)
    draft_logits = None if one_hot else jnp.zeros((SLOTS, DRAFTS, VOCABULARY))
    given |= {"drafts": drafts, "draft_logits": draft_logits, "draft_count": jnp.array([3, 3, 3, 1, 3])}
    greedy = check(**given, sampling=sampling_state(SLOTS, temperature=0), mode=SamplingMode.GREEDY)
    mixed = check(
        **given,
        sampling=sampling_state(SLOTS, temperature=[0, 0, 3, 0, 0], top_k=2, top_p=0.3, min_p=0.9),
        mode=SamplingMode.TRUNCATED,
    )
    cold = np.array([0, 1, 3, 4])
    np.testing.assert_array_equal(greedy.accepted[cold], [3, 1, 1, 0])
    np.testing.assert_array_equal(mixed.accepted[cold], greedy.accepted[cold])
    np.testing.assert_array_equal(mixed.token[cold], greedy.token[cold])


@pytest.mark.parametrize("draft_vocabulary", [None, "shuffled"])
def test_a_target_that_drafts_for_itself_is_always_accepted(draft_vocabulary, sampling_state):
    slots = 5000
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(slots, DRAFTS + 1, VOCABULARY)) * 5, jnp.float32)
    state = sampling_state(slots, temperature=0.8)
    own = process(logits, state)[:, :-1]
    drafts = jax.random.categorical(jax.random.key(0), own).astype(jnp.int32)
    order = rng.permutation(VOCABULARY) if draft_vocabulary else None
    verdict = check(
        logits,
        drafts,
        jnp.full(slots, DRAFTS),
        own if order is None else own[..., order],
        None if order is None else vocabulary(order),
        state,
        jnp.tile(jnp.arange(DRAFTS + 1), (slots, 1)),
        mode=SamplingMode.TRUNCATED,
    )
    # A shuffled softmax may differ in its last bit, which rejects one draft in a million.
    assert (verdict.accepted == DRAFTS).sum() >= slots - (0 if order is None else 1)


@pytest.mark.parametrize("mode", SamplingMode)
@pytest.mark.parametrize("one_hot", [True, False])
def test_drafts_past_the_count_are_never_accepted(one_hot, mode, sampling_state):
    given = case()
    count = jnp.array([0, 1, 2, 3, 0])
    certain = given["logits"] * 1000  # every true draft is accepted
    draft_logits = None if one_hot else certain[:, :-1]
    given |= {"logits": certain, "draft_logits": draft_logits, "draft_count": count}
    state = sampling_state(SLOTS, temperature=0.0 if mode == SamplingMode.GREEDY else 1.0)
    filled = check(**given, sampling=state, mode=mode)
    np.testing.assert_array_equal(filled.accepted, count)
    best = np.asarray(given["logits"].argmax(-1))
    np.testing.assert_array_equal(filled.token, best[np.arange(SLOTS), count])
    past = jnp.arange(DRAFTS) >= count[:, None]
    for garbage in (-1, 2**31 - 1, -(2**31)):
        drafts = jnp.where(past, garbage, given["drafts"])
        same = check(**(given | {"drafts": drafts}), sampling=state, mode=mode)
        np.testing.assert_array_equal(same.accepted, filled.accepted)
        np.testing.assert_array_equal(same.token, filled.token)


def test_a_placeholder_is_never_accepted(sampling_state):
    given = case(drafts=jnp.full((SLOTS, DRAFTS), -1))
    last_best = given["logits"].at[..., -1].set(1e4)  # what index -1 would wrap to
    for temperature in (0, 1):
        verdict = check(
            **(given | {"logits": last_best}),
            sampling=sampling_state(SLOTS, temperature=temperature),
            mode=SamplingMode.TRUNCATED,
        )
        assert (verdict.accepted == 0).all()
        assert (verdict.token == VOCABULARY - 1).all()


def test_a_draft_outside_the_draft_vocabulary_is_never_accepted(sampling_state):
    given = case()
    draft_vocab = vocabulary(np.delete(np.arange(VOCABULARY), given["drafts"][0, 1]))
    certain = given["logits"] * 1000
    verdict = check(
        **(given | {"logits": certain, "draft_vocab": draft_vocab, "draft_logits": certain[:, :-1, :-1]}),
        sampling=sampling_state(SLOTS),
        mode=SamplingMode.TRUNCATED,
    )
    assert verdict.accepted[0] <= 1


@pytest.mark.parametrize("one_hot", [True, False])
def test_a_draft_that_the_target_cannot_draw_is_rejected(one_hot, sampling_state):
    """log p is -inf, and so may log q be."""
    given = case()
    masked = given["logits"].at[jnp.arange(SLOTS), 0, given["drafts"][:, 0]].set(-jnp.inf)
    for draft_logits in (given["logits"][:, :-1], masked[:, :-1]):
        verdict = check(
            **(given | {"logits": masked, "draft_logits": None if one_hot else draft_logits}),
            sampling=sampling_state(SLOTS),
            mode=SamplingMode.TRUNCATED,
        )
        assert (verdict.accepted == 0).all()
        assert (verdict.token != given["drafts"][:, 0]).all()


@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("where", ["target", "draft", "both", "one"])
def test_nan_gives_an_id_in_range(where, temperature, one_hot, sampling_state):
    given = case()
    draft_logits = given["logits"][:, :-1]
    if where in ("draft", "both"):
        draft_logits = jnp.full_like(draft_logits, jnp.nan)
    logits = given["logits"]
    if where in ("target", "both"):
        logits = jnp.full_like(logits, jnp.nan)
    elif where == "one":
        logits = logits.at[:, 1, 4].set(jnp.nan)
    state = sampling_state(SLOTS, temperature=temperature, top_k=5, top_p=0.9)
    changed = given | {"logits": logits, "draft_logits": None if one_hot else draft_logits}
    for mode in SamplingMode:
        verdict = check(**changed, sampling=state, mode=mode)
        assert ((verdict.accepted >= 0) & (verdict.accepted <= DRAFTS)).all()
        assert ((verdict.token >= 0) & (verdict.token < VOCABULARY)).all()


def test_an_empty_residual_falls_back_to_the_target(sampling_state):
    """p equals q and the draft is one that both exclude: rejected, and p - q is zero everywhere."""
    logits = case()["logits"].at[..., 0].set(-jnp.inf)
    verdict = check(
        **case(logits=logits, draft_logits=logits[:, :-1], drafts=jnp.zeros((SLOTS, DRAFTS), jnp.int32)),
        sampling=sampling_state(SLOTS),
        mode=SamplingMode.TRUNCATED,
    )
    assert (verdict.accepted == 0).all()
    assert ((verdict.token > 0) & (verdict.token < VOCABULARY)).all()
    assert len(np.unique(verdict.token)) > 1


@pytest.mark.parametrize("one_hot", [True, False])
def test_a_slot_gets_the_same_alone(one_hot, sampling_state):
    given = case(draft_count=jnp.array([0, 1, 2, 3, 3]))
    given["draft_logits"] = None if one_hot else given["logits"][:, :-1] * 0.5
    state = sampling_state(SLOTS, temperature=[0.5, 1, 1.5, 2, 0], top_k=[0, 0, 9, 0, 0], top_p=0.9)
    together = check(**given, sampling=state, mode=SamplingMode.TRUNCATED)
    for b in range(SLOTS):
        alone = {name: None if x is None else x[b : b + 1] for name, x in given.items()}
        own_state = jax.tree.map(itemgetter(slice(b, b + 1)), state)
        verdict = check(**alone, sampling=own_state, mode=SamplingMode.TRUNCATED)
        assert verdict.accepted[0] == together.accepted[b]
        assert verdict.token[0] == together.token[b]


@pytest.mark.parametrize("one_hot", [True, False])
def test_a_greater_mode_gives_the_same(one_hot, sampling_state):
    """Also where a neighbour is what asks for it."""
    slots = 400
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.normal(size=(slots, DRAFTS + 1, VOCABULARY)) * 2, jnp.float32)
    given = {
        "logits": logits,
        "drafts": logits.argmax(-1)[:, :DRAFTS].astype(jnp.int32),
        "draft_count": jnp.full(slots, DRAFTS),
        "draft_logits": None if one_hot else logits[:, :-1] * 1.5,
        "draft_vocab": None,
        "positions": jnp.tile(jnp.arange(DRAFTS + 1), (slots, 1)),
    }
    slot = np.arange(slots)
    is_greedy, is_truncated = slot % 4 == 0, slot % 4 == 1
    warm = np.where(is_greedy, 0, 1.2)
    greedy = check(**given, sampling=sampling_state(slots, temperature=0), mode=SamplingMode.GREEDY)
    plain = check(
        **given, sampling=sampling_state(slots, temperature=warm, min_p=0.02), mode=SamplingMode.TEMPERATURE
    )
    truncated = check(
        **given,
        sampling=sampling_state(slots, temperature=warm, min_p=0.02, top_k=np.where(is_truncated, 2, 0)),
        mode=SamplingMode.TRUNCATED,
    )
    for name in ("accepted", "token"):
        lesser, middle, greater = (getattr(verdict, name) for verdict in (greedy, plain, truncated))
        np.testing.assert_array_equal(middle[is_greedy], lesser[is_greedy])
        np.testing.assert_array_equal(greater[~is_truncated], middle[~is_truncated])
        assert (greater[is_truncated] != middle[is_truncated]).any()
    assert 0 < plain.accepted[~is_greedy].mean() < DRAFTS


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_without_drafts_it_is_plain_decoding(temperature, sampling_state):
    logits = case()["logits"][:, :1]
    position = jnp.arange(SLOTS) * 31
    state = sampling_state(SLOTS, temperature=temperature, top_k=7)
    none = jnp.zeros((SLOTS, 0), jnp.int32)
    processed = process(logits, state)[:, 0]
    plain = jax.jit(sample, static_argnums=3)(processed, state, position, Purpose.BONUS)
    for mode in SamplingMode if temperature == 0 else (SamplingMode.TRUNCATED,):
        verdict = check(logits, none, jnp.zeros(SLOTS), None, None, state, position[:, None], mode=mode)
        assert isinstance(verdict, Verdict)
        np.testing.assert_array_equal(verdict.accepted, 0)
        np.testing.assert_array_equal(verdict.token, plain)
