"""Whatever a drafter returns: what cannot be used is named while tracing, and nothing else does any harm."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engines import SIZES
from tiny_models import write_target

import jaxspec
from jaxspec.attention import CacheShape
from jaxspec.drafters.base import Drafter, Needs, Proposal
from jaxspec.drafters.checks import DrafterError
from jaxspec.drafters.registry import DRAFTERS
from jaxspec.engine.device.oracle import Oracle
from jaxspec.engine.device.plan import Plan, Size, empty_plan
from jaxspec.engine.device.state import init_state
from jaxspec.engine.device.step import Models, engine_step
from jaxspec.sampling import DraftVocabulary, SamplingMode

V, K = 48, 3
SETTINGS = {"kind": "wrong", "num_speculative_tokens": K}


class Wrong(Drafter):
    """Says to have drawn its drafts, which are past the vocabulary, uniformly."""

    title = "a wrong drafter"
    needs = Needs(state_size=2)

    @classmethod
    def plan(cls, config, target, build):
        return lambda _: cls(**config.settings)

    def refresh(self, target, rows, cache):
        return rows.outputs(jnp.zeros((len(rows.tokens), 2))), cache

    def propose(self, target, context, cache, *, num_drafts, mode):
        batch = len(context.length)
        logits = jnp.zeros((batch, num_drafts, V))
        return Proposal(self.ids(batch, num_drafts), jnp.full(batch, 99, jnp.int32), logits), cache

    def ids(self, batch, drafts):
        return jnp.full((batch, drafts), 10**6, jnp.int32)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(DRAFTERS, "wrong", Wrong)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("checks") / "target")


def load(target, drafter, **engine):
    sizes = {**SIZES, "sampling_modes": ("sampled",), "progress": False, **engine}
    return jaxspec.load(target, drafter=drafter, **sizes)


@pytest.fixture(scope="module")
def plain(target):
    with load(target, {"kind": "none"}) as engine:
        yield engine


def test_drafts_that_are_no_tokens_change_no_token(target, plain):
    """In the compiled step, in the loop driven from Python and in inspection, greedy and sampled."""
    prompts = [[3, 5, 8], [9, 8, 7, 9, 8]]
    sampled = {"max_new_tokens": 20, "temperature": 1.0, "seed": 5}
    answers = [answer.token_ids for answer in plain.generate(prompts, **sampled)]
    greedy = plain.generate(prompts[0], max_new_tokens=20).token_ids
    with load(target, SETTINGS) as engine:
        for is_driven in (False, True):
            if is_driven:
                Oracle(engine.programs).take_over(engine.programs)
            engine.forget_prefixes()
            drafted = engine.generate(prompts, **sampled)
            assert [answer.token_ids for answer in drafted] == answers
            assert all(answer.stats.drafted == 0 for answer in drafted)
            assert engine.generate(prompts[0], max_new_tokens=20).token_ids == greedy
            inspected = jaxspec.inspect_steps(engine, prompts[0], **sampled)
            assert inspected.generation.token_ids == engine.generate(prompts[0], **sampled).token_ids


def proposed(**changes):
    """A `propose` whose proposal is right but for these fields."""

    def propose(self, target, context, cache, *, num_drafts, mode):
        batch = len(context.length)
        right = Proposal(jnp.zeros((batch, K), jnp.int32), jnp.full(batch, K, jnp.int32), None)
        return replace(right, **changes), cache

    return propose


LAYER = CacheShape(2, 4)
WRONG = {
    "no pair": (
        {"propose": lambda *_, num_drafts, mode: None},
        "propose must return a Proposal and the cache, got None",
    ),
    "no proposal": (
        {"propose": lambda self, target, context, cache, **_: (context.length, cache)},
        "propose must return a Proposal and the cache, got int32[3] for the first",
    ),
    "no tokens": ({"propose": proposed(tokens=None)}, "returned tokens None, expected int32[3, 3], [B, K]"),
    "floats": (
        {"propose": proposed(tokens=np.zeros((3, K), np.float32))},
        "returned tokens float32[3, 3], expected int32[3, 3], [B, K]",
    ),
    "few tokens": (
        {"propose": proposed(tokens=np.zeros((3, K - 1), np.int32))},
        "returned tokens int32[3, 2], expected int32[3, 3], [B, K]",
    ),
    "one count": ({"propose": proposed(count=2)}, "returned count int, expected int32[3], [B]"),
    "narrow logits": (
        {"propose": proposed(logits=np.zeros((3, K, V - 8), np.float32))},
        "logits float32[3, 3, 40], expected float32[3, 3, 48], [B, K, W], where W is the target's vocabulary",
    ),
    "half precision": (
        {"propose": proposed(logits=np.zeros((3, K, V), np.float16))},
        "returned logits float16[3, 3, 48], expected float32[3, 3, 48]",
    ),
    "estimates of one draft less": (
        {"propose": proposed(confidence=np.zeros((3, K - 1), np.float32))},
        "returned confidence float32[3, 2], expected float32[3, 3], [B, K]",
    ),
    "wide logits": (
        {
            "propose": proposed(logits=np.zeros((3, K, V), np.float32)),
            "draft_vocab": DraftVocabulary(jnp.arange(12), jnp.arange(V)),
        },
        "expected float32[3, 3, 12], [B, K, W], where W is its draft vocabulary",
    ),
    "no cache": (
        {"propose": lambda *args, **how: (proposed()(*args, **how)[0], None)},
        "propose returned other caches (none) than it was given (float32[3, 2, 2, 8, 4])",
    ),
    "no states": ({"refresh": lambda *_: None}, "refresh must return states and the cache, got None"),
    "ids for states": (
        {"refresh": lambda self, target, rows, cache: (rows.outputs(rows.tokens), cache)},
        "refresh returned int32[3], not states of floats [N', M']",
    ),
    "every row": (
        {"refresh": lambda self, target, rows, cache: (jnp.zeros((len(rows.tokens), 2)), cache)},
        "refresh returned 12 rows instead of 3",
    ),
    "wide states": (
        {"refresh": lambda self, target, rows, cache: (rows.outputs(jnp.zeros((12, 5))), cache)},
        "refresh returned states of 5 numbers, not of state_size, 2",
    ),
    "another cache": (
        {"refresh": lambda self, target, rows, cache: (rows.outputs(jnp.zeros((12, 2))), (*cache, *cache))},
        "refresh returned other caches (float32[3, 2, 2, 8, 4], float32[3, 2, 2, 8, 4]) than it was given",
    ),
    "no caches": ({"cache_shapes": None}, "cache_shapes must be a tuple with a CacheShape, or a tuple of"),
    "a bare cache": ({"cache_shapes": LAYER}, "for each layer, got CacheShape(num_kv_heads=2, head_dim=4, "),
    "a size": ({"cache_shapes": (LAYER, (LAYER, 7))}, "for each layer, got (CacheShape("),
}


def step_of(plain, drafter):
    """Traces what the engine does with this drafter: its caches, and a step."""
    config = replace(plain.config, num_pages=2)
    target = Oracle(plain.programs).models.target
    state = init_state(target, drafter, config, mesh=plain.programs.mesh)
    size = Size(3, 0, SamplingMode.TEMPERATURE, K + 1)
    plan = Plan.unpack(jnp.asarray(empty_plan(size, config)), size, config)
    return jax.eval_shape(partial(engine_step, Models(target, drafter), plan), state.gather(plan))


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_used_is_named(plain, name):
    members, message = WRONG[name]
    mine = type("Mine", (Wrong,), {"propose": proposed(), "cache_shapes": (LAYER,), **members})
    with pytest.raises(DrafterError, match=f"^Mine.*{re.escape(message)}"):
        step_of(plain, mine(num_speculative_tokens=K))


def test_what_can_be_used_is_taken(plain):
    mine = type("Mine", (Wrong,), {"propose": proposed(), "cache_shapes": (LAYER,)})
    step_of(plain, mine(num_speculative_tokens=K))


def test_loading_names_it(target, monkeypatch, compiled_ahead):
    monkeypatch.setattr(Wrong, "propose", proposed(logits=np.zeros((3, K, V - 8), np.float32)))
    with pytest.raises(DrafterError, match=r"^Wrong\.propose returned logits "):
        load(target, SETTINGS)
