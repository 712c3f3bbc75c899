"""Engines over Nemotron-H and LFM2: what drafts, who else is there and what is kept change no answer."""

import pytest
from conversations import assert_as_alone, conversation
from tiny_engines import SIZES, limit_pages, start_afresh, tokens_of
from tiny_models import write_eagle3, write_target

import jaxspec

LFM2 = {
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention"],
    "norm_eps": 1e-5,
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("k", [1, 5])
def test_any_number_of_drafts_gives_the_tokens_of_plain_decoding(engines_of, prompts, k):
    """Four are below, and seven in test_pairs.py."""
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
