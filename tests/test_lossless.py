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
from jaxspec import lossless
from jaxspec.engine.device import step
from jaxspec.lossless import homogeneity

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
    assert str(report).startswith("greedy: the same tokens, ")
    assert "sampled: the same distribution (p = " in str(report)


def test_one_prompt_is_checked_as_one(drafter, target):
    report = jaxspec.check_lossless(drafter, target, prompts=[3, 5, 8], seed=2**64 - 30, **CHECK)
    assert report
    assert report.greedy.drafted > 0


def test_a_prompt_without_room_for_what_is_compared_is_named(drafter, target):
    with pytest.raises(ValueError, match="prompt of 46 tokens leaves no room for 3 more"):
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
        jaxspec.check_lossless({"kind": "ngram"}, bad, samples=0, **sizes)


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


def test_homogeneity():
    assert homogeneity(Counter(a=500, b=500), Counter(a=510, b=490)) > 0.1
    assert homogeneity(Counter(a=500, b=500), Counter(a=600, b=400)) < 1e-4
    assert homogeneity(Counter(a=5), Counter(b=4)) == 1.0  # all of it is rare
    rare = Counter(dict.fromkeys(range(300), 1))
    assert homogeneity(Counter(a=700) + rare, Counter(a=1000)) < 1e-4
