"""`check_lossless` passes correct drafters, and reports what is wrong with others, and where."""

import shutil
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import perturb, write_target

import jaxspec
from jaxspec.drafters.kinds.draft_model import DraftModel
from jaxspec.drafters.kinds.ngram import NGramDrafter
from jaxspec.drafters.registry import DRAFTERS
from jaxspec.engine.device import step
from jaxspec.lab import lossless
from jaxspec.lab.lossless import homogeneity

SIZES = {"batch_size": 50, "max_model_len": 48, "page_size": 8, "prefill_chunk": 16, "slot_sizes": ()}
CHECK = {"max_new_tokens": 16, "samples": 600, **SIZES}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("lossless") / "target", vocab_size=24, gain=1.2)


@pytest.fixture(scope="module")
def drafter(target):
    near = perturb(target, target.parent / "near", scale=0.3)
    return {"kind": "draft_model", "source": str(near), "num_speculative_tokens": 2}


def test_nothing_is_found_where_nothing_is(drafter, target):
    report = jaxspec.check_lossless(drafter, target, **CHECK)
    assert report
    assert report.differences == ()
    assert report.greedy.drafted > report.greedy.accepted > 0
    assert report.sampled.accepted > 0
    assert report.outcome == "equal"
    assert 0.15 < report.smallest_difference < lossless.ENOUGH
    assert str(report).startswith("greedy: the same tokens, ")
    assert "sampled at temperature 1: the same distribution (p = " in str(report)
    assert f"600 samples of a prompt show differences of {report.smallest_difference:.2f} and" in str(report)


class Liar(DraftModel):
    """Its drafts are drawn from other logits than it says."""

    title = "a liar"

    def propose(self, *args, **settings):
        proposal, cache = super().propose(*args, **settings)
        lie = None if proposal.logits is None else 0.2 * proposal.logits
        return replace(proposal, logits=lie), cache


@pytest.mark.parametrize(("samples", "outcome"), [(20, "cannot tell"), (600, "different")])
def test_a_lie_about_the_distribution_is_never_called_lossless(
    drafter, target, monkeypatch, samples, outcome
):
    monkeypatch.setitem(DRAFTERS, "liar", Liar)
    report = jaxspec.check_lossless({**drafter, "kind": "liar"}, target, **{**CHECK, "samples": samples})
    assert report.outcome == outcome
    assert not report
    assert report.differences == ()
    assert ("cannot tell, with too few samples" in str(report)) == (outcome == "cannot tell")


def test_drafts_that_are_never_accepted_are_warned_about(target, monkeypatch):
    class Shy(NGramDrafter):
        def propose(self, *args, **settings):
            proposal, cache = super().propose(*args, **settings)
            return replace(proposal, count=jnp.zeros_like(proposal.count)), cache

    monkeypatch.setitem(DRAFTERS, "shy", Shy)
    sizes = {**CHECK, "samples": 0, "sampling_modes": ("greedy",)}
    with pytest.warns(UserWarning, match="no draft was accepted in the greedy answers"):
        report = jaxspec.check_lossless({"kind": "shy"}, target, prompts=[[5, 6, 5]], **sizes)
    assert report.outcome == "equal"
    assert "sampled: not compared" in str(report)


def test_it_samples_at_the_temperature_it_was_asked(drafter, target, monkeypatch):
    asked = set()
    make_request = jaxspec.Engine.make_request

    def recorded(engine, prompt, params, **options):
        asked.add((params.temperature, params.max_new_tokens))
        return make_request(engine, prompt, params, **options)

    monkeypatch.setattr(jaxspec.Engine, "make_request", recorded)
    check = {**CHECK, "samples": 20, "temperature": 0.7}
    report = jaxspec.check_lossless(drafter, target, prompts=[3, 5, 8], **check)
    assert {(0.7, 3)} <= asked <= {(0.7, 3), (0.0, 16)}
    assert report.temperature == 0.7
    assert "sampled at temperature 0.7: " in str(report)


def test_one_prompt_is_checked_as_one(drafter, target):
    report = jaxspec.check_lossless(drafter, target, prompts=[3, 5, 8], seed=2**64 - 30, **CHECK)
    assert report
    assert report.greedy.drafted > 0


def test_a_prompt_without_room_for_what_is_compared_is_named(drafter, target):
    with pytest.raises(ValueError, match="16 do not fit: after a prompt of 46 tokens"):
        jaxspec.check_lossless(drafter, target, prompts=[[5, 6] * 23], **CHECK)


def test_an_answer_that_failed_is_told(drafter, target, monkeypatch):
    run = jaxspec.Engine.run

    def failing(engine, requests, **options):
        for index, generation in run(engine, requests, **options):
            is_sampled = len(generation.token_ids) == 3
            yield index, replace(generation, error="it is a fake") if is_sampled else generation

    monkeypatch.setattr(jaxspec.Engine, "run", failing)
    with pytest.raises(jaxspec.EngineError, match="an answer failed: it is a fake"):
        jaxspec.check_lossless(drafter, target, **CHECK)


def test_greedy_answers_that_failed_are_not_the_same(target, tmp_path):
    """A target whose logits are infinite, so that neither engine gives any token."""
    bad = shutil.copytree(target, tmp_path / "bad")
    tensors = load_file(bad / "model.safetensors")
    tensors = {name: np.full_like(array, 1e30) for name, array in tensors.items()}
    save_file(tensors, bad / "model.safetensors")
    sizes = {**SIZES, "batch_size": 1, "sampling_modes": ("greedy",)}
    with pytest.raises(jaxspec.EngineError, match="an answer failed: the target's logits are NaN"):
        jaxspec.check_lossless({"kind": "ngram"}, bad, samples=0, max_new_tokens=16, **sizes)


@pytest.mark.parametrize("level", [0, 1, float("nan")])
def test_a_level_that_is_none_is_refused(target, level):
    with pytest.raises(ValueError, match="significance must be between 0 and 1, got"):
        jaxspec.check_lossless({"kind": "ngram"}, target, significance=level)


@pytest.mark.parametrize("nothing", [{"prompts": []}, {"samples": -1}])
def test_nothing_to_compare_is_refused(target, monkeypatch, nothing):
    monkeypatch.setattr(lossless, "load", lambda *args, **settings: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="there must be prompts, and samples 0 or more"):
        jaxspec.check_lossless({"kind": "ngram"}, target, **nothing)


def test_drafts_that_are_never_rejected_are_found_out(drafter, target, monkeypatch):
    """The report names the token at which greedy answers differ; sampled ones follow the drafter."""
    verify = step.verify_drafts

    def credulous(logits, drafts, count, *args, **options):
        verdict = verify(logits, drafts, count, *args, **options)
        return replace(verdict, accepted=jnp.broadcast_to(count, verdict.accepted.shape))

    monkeypatch.setattr(step, "verify_drafts", credulous)
    report = jaxspec.check_lossless(drafter, target, **CHECK)
    assert not report
    first = report.differences[0]
    assert 1 <= first.token < 16
    assert first.plain != first.drafted
    said = f"prompt {first.prompt} differs at token {first.token}: {first.plain} without drafts"
    assert said in str(report)
    assert report.p_value < 1e-4
    assert "another distribution" in str(report)


def test_an_answer_that_ends_early_differs():
    plain, drafted = SimpleNamespace(token_ids=[3, 4, 5]), SimpleNamespace(token_ids=[3, 4])
    assert lossless.first_difference(0, plain, plain) is None
    assert lossless.first_difference(7, plain, drafted) == lossless.Difference(7, 2, 5, None)
    assert lossless.first_difference(7, drafted, plain) == lossless.Difference(7, 2, None, 5)


def test_the_smallest_difference_is_found_as_often_as_it_says():
    """Of samples whose distributions are that far apart, in few tokens or in all, at least nine of ten."""
    rng = np.random.default_rng(0)
    for size, moved in ((12, 1), (12, 6), (40, 20)):
        p = rng.dirichlet(np.full(size, 5.0))
        draw = lambda p: Counter(dict(enumerate(rng.multinomial(2000, p).tolist())))  # noqa: E731
        distance = lossless.smallest_difference(draw(p), draw(p), 1e-4)
        gain, loss = np.zeros(size), np.zeros(size)
        order = np.argsort(p)
        gain[order[:moved]] = distance / moved
        loss[order[moved:]] = distance * p[order[moved:]] / p[order[moved:]].sum()
        found = [homogeneity(draw(p), draw(p + gain - loss)) < 1e-4 for _ in range(60)]
        assert np.mean(found) >= 0.85
    assert lossless.smallest_difference(Counter(range(20)), Counter(range(20)), 1e-4) == 1.0  # all pooled
    assert lossless.smallest_difference(Counter(a=2000), Counter(a=2000), 1e-4) < 0.1


def test_homogeneity():
    assert homogeneity(Counter(a=500, b=500), Counter(a=510, b=490)) > 0.1
    assert homogeneity(Counter(a=500, b=500), Counter(a=600, b=400)) < 1e-4
    assert homogeneity(Counter(a=5), Counter(b=4)) == 1.0  # all of it is rare
    rare = Counter(dict.fromkeys(range(300), 1))
    assert homogeneity(Counter(a=700) + rare, Counter(a=1000)) < 1e-4
