import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernel_cases.gumbel_sample import CASES
from jaxspec_kernels import random
from jaxspec_kernels.gumbel_sample import gumbel_sample
from jaxspec_kernels.random import Purpose
from op_base import OpTest
from optimised import optimised

OP = gumbel_sample
sample = jax.jit(gumbel_sample, static_argnames=("purpose", "implementation"))


def arguments(case):
    rng = np.random.default_rng(0)
    return {
        "logits": jnp.asarray(rng.normal(size=(case.slots, case.vocabulary)), jnp.float32),
        "temperature": jnp.asarray(np.arange(case.slots) % 3 * 0.7, jnp.float32),
        "seed": jnp.asarray(rng.integers(2**32, size=(case.slots, 2)), jnp.uint32),
        "position": jnp.asarray(rng.integers(2**20, size=case.slots), jnp.int32),
        "step": jnp.int32(case.step),
        "tokens": jnp.full((case.slots, case.drafts), -1, jnp.int32),
        "processed": jnp.full((case.slots, case.drafts, case.vocabulary), jnp.nan, jnp.float32),
    }


class TestGumbelSample(OpTest):
    """The column of the step is written; all other columns stay."""

    op = gumbel_sample
    cases = CASES
    usual = ("odd vocabulary",)
    bound = 1e-6
    by_row = (0, 1, 2, 3, 5, 6)
    in_place = (5, 6)
    exact = ("xla", "triton")

    def arguments(self, case):
        return tuple(arguments(case).values())

    def options(self, case):
        return {"purpose": Purpose.DRAFT}

    def definition(self, case, logits, temperature, seed, position, step, tokens, processed):
        @jax.jit
        def noise_of(seed, position):
            return random.gumbel(random.row_keys(seed, position, Purpose.DRAFT), case.vocabulary)

        temperature = temperature[:, None]
        rows = np.where(temperature > 0, logits / np.where(temperature > 0, temperature, 1), logits)
        tokens = np.array(tokens)
        tokens[:, step] = np.where(temperature > 0, rows + noise_of(seed, position), rows).argmax(axis=-1)
        if processed is not None:
            processed = np.array(processed)
            processed[:, step] = rows
        return tokens, processed

    def test_without_a_buffer_every_row_is_greedy(self, case, implementation):
        logits, temperature, *rest = self.arguments(case)[:-1]
        results = self.run(case, (logits, temperature, *rest, None), implementation)
        self.check(case, results, self.expected(case, (logits, 0 * temperature, *rest, None)))


@pytest.mark.parametrize("with_buffer", [True, False])
def test_parts_of_the_vocabulary_draw_what_the_whole_does(with_buffer):
    """A mapped axis stands for that of a mesh: every device has its part of logits and buffer."""
    parts, given = 3, arguments(CASES[2])
    given |= {name: given[name][..., : given[name].shape[-1] // 12 * 12] for name in ("logits", "processed")}
    if not with_buffer:
        given["processed"] = None
    whole, drawn_from = sample(**given, purpose=Purpose.DRAFT, implementation="xla")
    split = {name: given.pop(name) for name in ("logits", "processed")}

    def draw(part):
        return gumbel_sample(**given, **part, purpose=Purpose.DRAFT, axis="devices", implementation="xla")

    of_parts = jax.tree.map(lambda x: np.stack(np.split(np.asarray(x), parts, axis=-1)), split)
    tokens, from_parts = jax.jit(jax.vmap(draw, axis_name="devices"))(of_parts)
    for on_device in tokens:
        np.testing.assert_array_equal(on_device, whole)
    if with_buffer:
        np.testing.assert_array_equal(np.concatenate(from_parts, axis=-1), drawn_from)


@pytest.mark.parametrize("poison", [jnp.nan, -jnp.inf, jnp.inf])
def test_poisoned_logits_give_an_id_in_range(poison, implementation):
    given = arguments(CASES[2])
    for buffer in (given["processed"], None):
        for logits in (jnp.full_like(given["logits"], poison), given["logits"].at[:, 3].set(poison)):
            poisoned = given | {"logits": logits, "processed": buffer}
            tokens, _ = sample(**poisoned, purpose=Purpose.DRAFT, implementation=implementation)
            drawn = np.asarray(tokens)[:, 1]
            assert ((drawn >= 0) & (drawn < 1001)).all()


def test_a_heavy_tail_is_drawn(implementation):
    """200,000 tokens 18 nats below the best: together they have 0.3 % of the mass."""
    vocabulary, gap, trials, batch = 200_000, 18.0, 4000, 40
    logits = jnp.zeros((batch, vocabulary)).at[:, 0].set(gap)
    tokens = jnp.zeros((batch, 1), jnp.int32)

    def draw(first):
        seed = jnp.stack([first + jnp.arange(batch), jnp.full(batch, 5)], axis=-1).astype(jnp.uint32)
        position = jnp.zeros(batch, jnp.int32)
        buffer = jnp.zeros((batch, 1, vocabulary))
        drawn, _ = OP(
            logits,
            jnp.ones(batch),
            seed,
            position,
            jnp.int32(0),
            tokens,
            buffer,
            purpose=Purpose.BONUS,
            implementation=implementation,
        )
        return jnp.sum(drawn != 0)

    tail = optimised(lambda: jax.lax.map(draw, jnp.arange(0, trials, batch)).sum())()
    mass = (vocabulary - 1) * np.exp(-gap)
    chance = mass / (1 + mass)
    z = (tail - trials * chance) / np.sqrt(trials * chance * (1 - chance))
    assert abs(z) < 3
