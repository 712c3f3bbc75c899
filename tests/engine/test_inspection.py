"""Steps driven from Python are those of the compiled loop, and show what these keep to themselves."""

from functools import partial
from itertools import chain, repeat
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_generation import Text

import jaxspec
from jaxspec.engine.device.step import PHASES, engine_step
from jaxspec.lab import inspection, plots
from jaxspec.lab.inspection import _Run, inspect_steps

SAMPLINGS = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5},
    "truncated": {"temperature": 1.0, "top_k": 12, "top_p": 0.9, "min_p": 0.2, "seed": 6},
}


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        *((name, "greedy") for name in ("ngram", "dflash", "none")),
        *(("eagle3", sampling) for sampling in SAMPLINGS),
    ],
)
def test_tokens_and_acceptance_are_those_of_the_compiled_loop(tiny_engines, prompts, name, sampling):
    """With a prompt of several chunks, and an answer that ends inside a block."""
    engine = tiny_engines.load(name, 3)
    options = {"max_new_tokens": 18, **SAMPLINGS[sampling]}
    for prompt in (prompts[2], prompts[4]):
        expected = engine.generate(prompt, **options)
        inspected = inspect_steps(engine, prompt, **options)
        assert inspected.generation.token_ids == expected.token_ids
        assert inspected.generation.verified == expected.verified
        assert inspected.generation.stats == expected.stats
        tokens = [token for step in inspected.steps for token in step.tokens]
        assert tokens == expected.token_ids[1:]
        assert [(len(s.draft_tokens), s.num_accepted) for s in inspected.steps] == expected.verified


def test_a_block_at_the_end_of_an_answer_is_drafted_as_in_the_engine(tiny_engines, prompts):
    """DFlash's rows see those behind them, up to the last page that the request may need."""
    engine = tiny_engines.load("dflash", 3)
    prompt = prompts[1]
    to_the_end_of_a_page = 16 - len(prompt) % 8
    for seed in range(10):
        options = {"max_new_tokens": to_the_end_of_a_page, "temperature": 1.2, "seed": seed}
        expected = engine.generate(prompt, **options)
        inspected = inspect_steps(engine, prompt, **options).generation
        assert (inspected.token_ids, inspected.verified) == (expected.token_ids, expected.verified)


def test_every_step_leaves_what_the_compiled_one_leaves(tiny_engines, prompts, monkeypatch):
    """Drafts, outcomes, slot and caches; of a head whose drafts are noise, so that all it is given shows."""
    engine = tiny_engines.load("random eagle3", 3)
    params = jaxspec.SamplingParams(max_new_tokens=12, temperature=1.5, seed=2)
    request = engine.make_request(prompts[1], params)
    run = _Run(engine, request)
    models = run.oracle.models
    phase_by_phase, whole, count = run.oracle.step, nnx.jit(engine_step), 0

    def compared(plan, state, *watch):
        nonlocal count
        expected = whole(models, plan, jax.tree.map(jnp.copy, state))
        carry = phase_by_phase(plan, state, *watch)
        for one, other in ((carry.state, expected.state), (carry.outcomes, expected.outcomes)):
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), one, other)
        assert carry.proposal.tokens.tolist() == expected.proposal.tokens.tolist()
        count += plan.size.width > 0
        return carry

    monkeypatch.setattr(run.oracle, "step", compared)
    steps = list(run.steps())
    assert count == len(steps) > 3
    assert [token for step in steps for token in step.tokens] == request.token_ids[1:]


@pytest.mark.parametrize("name", ["eagle3", "near", "ngram"])
def test_greedy_acceptance_follows_from_the_probabilities(tiny_engines, prompts, name):
    """So each row of them stands at its draft's place."""
    steps = inspect_steps(tiny_engines.load(name, 3), prompts[1], max_new_tokens=30).steps
    for step in steps:
        likeliest = step.target_probabilities.argmax(axis=1).tolist()
        agrees = [one == two for one, two in zip(step.draft_tokens, likeliest, strict=False)]
        assert step.num_accepted == [*agrees, False].index(False)
        assert step.token == likeliest[step.num_accepted]
        assert step.accepted == [i < step.num_accepted for i in range(len(step.draft_tokens))]
        # The drafter's own likeliest, or its only one.
        assert step.draft_probabilities.argmax(axis=1).tolist() == step.draft_tokens
    assert {fate for step in steps for fate in step.fates} >= {"accepted", "rejected", "not reached"}


def test_a_target_that_drafts_for_itself_shows_one_distribution_twice(tiny_engines, prompts):
    # Without a seed every run would draw another text, and a few round their probabilities further apart.
    engine = tiny_engines.load("self", 3)
    steps = inspect_steps(engine, prompts[0], max_new_tokens=16, temperature=0.9, seed=1).steps
    for step in steps:
        np.testing.assert_allclose(step.draft_probabilities, step.target_probabilities[:-1], atol=1e-5)
        np.testing.assert_allclose(step.target_probabilities.sum(axis=1), 1, rtol=1e-5)
        assert step.fates == ["accepted", "accepted", "accepted", "bonus"]


def test_a_draft_vocabulary_is_shown_in_the_targets(tiny_engines, prompts):
    """A head drafts some of the target's tokens; the others have a probability of 0."""
    engine = tiny_engines.load("eagle3", 3)
    vocabulary = inspect_steps(engine, prompts[0], max_new_tokens=6, temperature=1.0, seed=1)
    for step in vocabulary.steps:
        assert step.draft_probabilities.shape == (3, engine.vocab_size)
        np.testing.assert_allclose(step.draft_probabilities.sum(axis=1), 1, rtol=1e-5)
        chosen = step.draft_probabilities[range(3), step.draft_tokens]
        assert (chosen > 0).all()


def test_the_engine_is_left_alone(tiny_engines, prompts):
    engine = tiny_engines.load("near", 3)
    before = engine.counters
    inspect_steps(engine, prompts[0], max_new_tokens=4)
    assert engine.counters == before
    with pytest.raises(ValueError, match="prompt is empty"):
        inspect_steps(engine, [])


def test_a_request_may_have_a_k_of_its_own(tiny_engines, prompts):
    engine = tiny_engines.load("near", 3)
    steps = inspect_steps(engine, prompts[0], max_new_tokens=8, num_speculative_tokens=1).steps
    assert {len(step.draft_tokens) for step in steps} == {1}


def test_candidates(tiny_engines, prompts):
    step = inspect_steps(tiny_engines.load("near", 3), prompts[1], max_new_tokens=8).steps[0]
    rows = step.candidates(0, most=2)
    assert 2 <= len(rows) <= 4
    assert [row["target"] for row in rows] == sorted((row["target"] for row in rows), reverse=True)
    assert sum(row["is_draft"] for row in rows) == 1
    assert step.candidates(3)[0]["draft"] is None
    own = [row for place in range(4) for row in step.candidates(place, most=0) if row["is_own"]]
    assert [row["token_id"] for row in own] == [step.token]
    frame = step.to_pandas(most=2)
    assert list(frame["place"].unique()) == [0, 1, 2, 3]


def test_how_a_step_looks(tiny_config, tiny_engines, prompts):
    with jaxspec.load(tiny_config, progress=False) as engine:
        steps = inspect_steps(engine, "w8 w9 w8 w9", max_new_tokens=40, ignore_eos=True).steps
        step = next(step for step in steps if step.draft_tokens)
        bare = next(step for step in steps if not step.draft_tokens)
        page = Text(step._repr_html_())
        assert "draft 0" in page.text
        assert step.text(step.last_token) in page.text
        assert f"at position {step.position}" in page.text
        assert "no draft" in Text(bare._repr_html_()).text
    axes = plots.step_probabilities(step)
    assert len(axes) == len(step.draft_tokens) + 1
    assert axes[0].get_title(loc="left").startswith("draft 0, ")
    for place, ax in enumerate(axes):
        rows = step.candidates(place)
        widths = sorted(round(bar.get_width(), 6) for bar in ax.patches)
        shares = [row[side] for row in rows for side in ("target", "draft") if row[side] is not None]
        assert widths == sorted(round(share, 6) for share in shares)


def test_phases(tiny_engines, prompts, monkeypatch):
    """Each phase takes its own time, by a clock that is given here; the first step a thousand times that."""
    monkeypatch.setattr(inspection, "time", SimpleNamespace(perf_counter=clock().__next__))
    inspected = inspect_steps(tiny_engines.load("near", 3), prompts[0], max_new_tokens=8)
    assert len(inspected.steps) > 1
    names = [phase.__name__ for phase in PHASES]
    assert inspected.phases() == pytest.approx({name: float(i) for i, name in enumerate(names, 1)})
    assert list(inspected.phases()) == names
    assert inspect_steps(tiny_engines.load("near", 3), prompts[0], max_new_tokens=1).phases() == {}


def clock():
    """Seconds before and after each phase of each step: phase number i takes i milliseconds."""
    now = 0.0
    for slowness in chain([1000], repeat(1)):
        for i in range(1, len(PHASES) + 1):
            yield now
            now += slowness * i / 1000
            yield now


def test_an_engine_that_is_closed_meanwhile_is_one_line(tiny_config, monkeypatch):
    """Another thread closes it between two steps."""
    with jaxspec.load(tiny_config, progress=False, sampling_modes=("greedy",)) as engine:
        step = _Run.step

        def closing(run, dispatch):
            engine.close()
            return step(run, dispatch)

        monkeypatch.setattr(_Run, "step", closing)
        with pytest.raises(jaxspec.EngineError, match=r"^the engine was closed$"):
            inspect_steps(engine, [6, 7], max_new_tokens=4)
