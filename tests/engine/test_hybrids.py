"""Engines over Nemotron-H and LFM2: what drafts, who else is there and what is kept change no answer."""

from itertools import product

import numpy as np
import pytest
from conversations import assert_as_alone, conversation
from scipy.stats import chisquare
from tiny_engines import MAMBA, SIZES, limit_pages, start_afresh, tokens_of
from tiny_models import write_eagle3, write_target
from tiny_mtp import write_with_mtp

import jaxspec
from jaxspec import SamplingParams

VOCABULARY, SAMPLES, TEMPERATURE = 16, 4000, 0.9
PROMPT = [3, 7, 1, 3, 7, 9, 3, 7, 1, 3, 7]
LFM2 = {
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention"],
    "norm_eps": 1e-5,
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Targets whose sampled tokens repeat, with an MTP layer, and a head."""
    root = tmp_path_factory.mktemp("hybrids")
    target = write_target(root / "target", vocab_size=VOCABULARY, **{**MAMBA, "gain": 1.2})
    write_with_mtp(root / "mtp", target)
    write_eagle3(root / "eagle3", target, draft_vocab_size=12)
    return root


@pytest.fixture(scope="module")
def likely(folder):
    """How likely any three tokens are after the prompt, f64[V, V, V], as `score` says."""
    tails = list(product(range(VOCABULARY), repeat=3))
    sizes = {"batch_size": 16, "max_model_len": 24, "page_size": 8, "prefill_chunk": 16}
    with jaxspec.load(folder / "target", drafter="none", progress=False, **sizes) as engine:
        scores = engine.score([[*PROMPT, *tail] for tail in tails], temperature=TEMPERATURE)
    p = np.exp(np.asarray(scores.logprobs, np.float64)[:, -3:].sum(axis=1))
    return (p / p.sum()).reshape((VOCABULARY,) * 3)


@pytest.mark.parametrize("kind", ["ngram", "eagle3", "mtp"])
def test_tokens_are_as_likely_as_the_model_says_whatever_drafts(folder, likely, kind):
    drafter = {"kind": kind, "num_speculative_tokens": 3}
    if kind != "ngram":
        drafter["source"] = str(folder / kind)
    sizes = {"batch_size": 16, "max_model_len": 24, "page_size": 8, "prefill_chunk": 4}
    counts = np.zeros(likely.shape)
    with jaxspec.load(
        folder / "target", drafter=drafter, sampling_modes=("sampled",), progress=False, **sizes
    ) as engine:
        ask = {"max_new_tokens": 3, "temperature": TEMPERATURE, "ignore_eos": True}
        params = [SamplingParams(seed=i, **ask) for i in range(SAMPLES)]
        answers = engine.generate([PROMPT] * SAMPLES, params)
    for answer in answers:
        counts[tuple(answer.token_ids)] += 1
    for place in range(3):  # pairs of tokens: without the first, the second, or the third
        seen, expected = counts.sum(place).ravel(), likely.sum(place).ravel() * SAMPLES
        common = expected >= 10
        cells = zip((seen, expected), (seen[~common].sum(), expected[~common].sum()), strict=True)
        assert chisquare(*(np.append(each[common], rare) for each, rare in cells)).pvalue > 1e-5
    drafted, accepted = (sum(getattr(a.stats, name) for a in answers) for name in ("drafted", "accepted"))
    assert 0.02 < accepted / drafted < 0.95


@pytest.mark.parametrize("k", range(1, 8))
def test_any_number_of_drafts_gives_the_tokens_of_plain_decoding(engines_of, prompts, k):
    engines, options = engines_of["mamba"], {"sampling_modes": ("greedy",)}
    plain = engines.load(**options).generate(prompts, max_new_tokens=40)
    drafted = engines.load("mtp", k, **options).generate(prompts, max_new_tokens=40)
    assert tokens_of(drafted) == tokens_of(plain)
    assert sum(answer.stats.accepted for answer in drafted) > 0


@pytest.mark.parametrize("family", ["nemotron-h", "lfm2"])
def test_an_answer_is_the_same_alone_in_company_preempted_and_behind_a_kept_prefix(
    engines_of, prompts, tmp_path, monkeypatch, family
):
    if family == "nemotron-h":
        target = engines_of["mamba"].folders["target"]
        drafter = {"kind": "mtp", "source": str(engines_of["mamba"].folders["mtp"])}
    else:
        target = write_target(tmp_path / "target", **LFM2)
        drafter = {"kind": "eagle3", "source": str(write_eagle3(tmp_path / "head", target))}
    drafter["num_speculative_tokens"] = 4
    with jaxspec.load(
        target, drafter=drafter, sampling_modes=("sampled",), progress=False, **SIZES
    ) as engine:
        start_afresh(engine)
        in_company = conversation(engine, prompts)
        assert_as_alone(engine, in_company)
        limit_pages(engine, 12, monkeypatch)
        before = engine.core.scheduler.num_preempted
        with_few_pages = conversation(engine, prompts)
        assert engine.core.scheduler.num_preempted > before
    assert [tokens_of([one]) for _, one in with_few_pages] == [tokens_of([one]) for _, one in in_company]
    assert any(answer.cached_tokens for _, answer in in_company)
    assert sum(answer.stats.accepted for _, answer in in_company)
