"""Greedy output is plain decoding's, token for token, whatever drafts; `test_pairs.py` says that this is the
model's."""

import pytest
from golden_files import HEAD_KINDS, golden_folder
from tiny_engines import SIZES, tokens_of

import jaxspec

NEW_TOKENS = 40


@pytest.fixture(scope="module")
def plain(tiny_engines, prompts):
    return tokens_of(tiny_engines.load().generate(prompts, max_new_tokens=NEW_TOKENS))


@pytest.mark.parametrize(
    ("name", "k"),
    [
        ("ngram", 1),
        ("ngram", 5),
        ("eagle3", 1),
        ("eagle3", 5),
        ("near", 1),
        ("eagle1", 3),
        ("fewer rows", 3),
        ("peagle", 3),
        ("dflash", 3),
    ],
)
def test_drafting_changes_no_token(tiny_engines, prompts, plain, name, k):
    """With other K than those of test_pairs.py, which are 3, 5 and 7."""
    modes = ("greedy", "sampled") if k == 3 else ("greedy",)
    engine = tiny_engines.load(name, k, sampling_modes=modes)
    generations = engine.generate(prompts, max_new_tokens=NEW_TOKENS)
    assert tokens_of(generations) == plain
    accepted = sum(generation.stats.accepted for generation in generations)
    drafted = sum(generation.stats.drafted for generation in generations)
    assert 0 < accepted < drafted


@pytest.mark.parametrize(
    "name", ["random eagle3", "random eagle1", "random peagle", "random dflash", "random dspark"]
)
def test_noise_for_drafts_changes_no_token(tiny_engines, prompts, plain, name):
    engine = tiny_engines.load(name, sampling_modes=("greedy",))
    assert tokens_of(engine.generate(prompts, max_new_tokens=NEW_TOKENS)) == plain


@pytest.mark.parametrize(
    "sizes",
    [
        {"page_size": 1},
        {"page_size": 128},  # one page is more than the limit
        {"max_model_len": 77, "prefill_chunk": 5, "prefill_batch_size": 2},  # nothing divides anything
        {"num_pages": 9},  # the longest request needs all pages
    ],
    ids=lambda sizes: " ".join(f"{key}={value}" for key, value in sizes.items()),
)
def test_odd_sizes_change_no_token(tiny_engines, prompts, plain, sizes):
    engine = tiny_engines.load("eagle3", sampling_modes=("greedy",), **sizes)
    assert tokens_of(engine.generate(prompts, max_new_tokens=NEW_TOKENS)) == plain


def test_the_goldens_heads_change_no_token(prompts):
    """Windowed and full layers, recycled norms, draft vocabularies: on the target they were made for."""
    target = golden_folder("llama-tied")

    def answers(drafter):
        engine = jaxspec.load(target, drafter=drafter, sampling_modes=("greedy",), progress=False, **SIZES)
        return tokens_of(engine.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True))

    plain = answers({})
    for case in ("eagle3-sliding-window", "eagle1-two-layers", "dflash-speculators"):
        kind = HEAD_KINDS[case]
        assert answers({"kind": kind, "source": str(golden_folder(case))}) == plain


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_that_the_target_lacks_are_never_drafted(tiny_engines, prompts, plain, temperature):
    """Without them, this draft model is a copy of the target."""
    engine = tiny_engines.load("more rows")
    answers = engine.generate(prompts, max_new_tokens=NEW_TOKENS, temperature=temperature, seed=1)
    assert all(answer.stats.accepted == answer.stats.drafted > 0 for answer in answers)
    assert temperature or tokens_of(answers) == plain
