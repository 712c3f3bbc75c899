import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jaxspec_kernels import random
from jaxspec_kernels.random import Purpose
from jaxspec_kernels.random_words import threefry2x32


def test_threefry_equals_jax():
    key = jnp.array([0x13198A2E, 0x03707344], jnp.uint32)
    counters = jnp.array([0, 1, 0xFFFFFFFF, 0x243F6A88, 7, 0, 0xFFFFFFFF, 0x85A308D3], jnp.uint32)
    ours = threefry2x32(key[0], key[1], counters[:4], counters[4:])
    np.testing.assert_array_equal(jnp.concatenate(ours), threefry_2x32(key, counters))


def test_both_words_of_a_block_are_used():
    key = jnp.array([[1, 2]], jnp.uint32)
    words = random.bits(key, 5)
    assert words.shape == (1, 5)
    for v in range(5):
        block = threefry2x32(key[0, 0], key[0, 1], jnp.uint32(v >> 1), jnp.uint32(0))
        assert words[0, v] == block[v & 1]


def test_row_keys_differ_by_seed_position_and_purpose():
    seed = jnp.array([[0, 0], [0, 1], [1, 0]], jnp.uint32)
    position = jnp.broadcast_to(jnp.arange(4), (3, 4))
    keys = np.stack([random.row_keys(seed, position, purpose) for purpose in Purpose])
    assert keys.shape == (4, 3, 4, 2)
    assert len(np.unique(keys.reshape(-1, 2), axis=0)) == 4 * 3 * 4


def test_every_draft_of_every_step_has_a_number_of_its_own():
    start, draft = jnp.meshgrid(jnp.array([0, 1, 2, 2**22 - 1]), jnp.arange(random.MAX_DRAFTS))
    numbers = random.draft_position(start, draft).astype(jnp.uint32)
    assert len(np.unique(numbers)) == numbers.size


def test_no_rows():
    keys = random.row_keys(jnp.zeros((2, 2), jnp.uint32), jnp.zeros((2, 0), jnp.int32), Purpose.ACCEPT)
    assert random.uniform(keys, 1).shape == (2, 0, 1)


def test_row_keys_take_a_purpose_per_slot():
    seed = jnp.array([[3, 4], [5, 6]], jnp.uint32)
    position = jnp.array([7, 8])
    mixed = random.row_keys(seed, position, jnp.array([Purpose.RECOVER, Purpose.BONUS]))
    np.testing.assert_array_equal(mixed[0], random.row_keys(seed, position, Purpose.RECOVER)[0])
    np.testing.assert_array_equal(mixed[1], random.row_keys(seed, position, Purpose.BONUS)[1])


def test_uniform_is_inside_the_open_interval_and_flat():
    draws = np.asarray(random.uniform(jnp.array([[8, 9]], jnp.uint32), 1_000_000))[0]
    counts = np.histogram(draws, bins=100, range=(0, 1))[0]
    assert ((counts - 1e4) ** 2 / 1e4).sum() < 99 + 5 * np.sqrt(2 * 99)


def test_the_extreme_words_stay_inside_the_open_interval(monkeypatch):
    words = jnp.array([[0, 2**32 - 1]], jnp.uint32)
    monkeypatch.setattr(random, "bits", lambda keys, n, first: words)
    draws = random.uniform(jnp.zeros((1, 2), jnp.uint32), 2)
    assert 0 < draws[0, 0] < draws[0, 1] < 1
    assert jnp.isfinite(random.gumbel(jnp.zeros((1, 2), jnp.uint32), 2)).all()


def test_gumbel_resolves_its_tail(monkeypatch):
    """The noise of rare words against float64: what float32 loses when u is near 1 must be near 0."""
    words = np.concatenate([np.arange(200), np.geomspace(200, 2**32 - 1e4, 400)]).astype(np.uint32)
    monkeypatch.setattr(random, "bits", lambda keys, n, first: jnp.asarray(words)[None])
    noise = random.gumbel(jnp.zeros((1, 2), jnp.uint32), len(words))[0]
    expected = -np.log(-np.log1p(-(words.astype(np.float64) + 0.5) / 2**32))
    assert expected.max() > 22
    np.testing.assert_allclose(noise, expected, atol=2e-3, rtol=1e-4)


def test_a_row_does_not_depend_on_its_batch():
    keys = random.bits(jnp.array([[1, 1]], jnp.uint32), 14).reshape(7, 2)
    draw = jax.jit(random.gumbel, static_argnums=1)
    batch = draw(keys, 1001)
    for row in range(7):
        np.testing.assert_array_equal(draw(keys[row : row + 1], 1001)[0], batch[row])
