"""Sampled through the whole engine, tokens have the distribution of plain decoding, whatever drafts.

On 16 tokens the exact distribution of a pair of neighbouring tokens can be computed. A random stream
shared by two purposes, a wrong q, or drafts accepted at another row than theirs bend it.
"""

from functools import cache
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
from extensions import write_bigram
from paged_rows import PagedTarget
from tiny_assistant import GEMMA4, write_assistant
from tiny_engines import MAMBA, RECURRENT
from tiny_models import (
    perturb,
    write_dflash,
    write_eagle1,
    write_eagle3,
    write_peagle,
    write_target,
)
from tiny_mtp import COMPRESSED, LATENT, write_with_mtp

import jaxspec
from jaxspec import SamplingParams
from jaxspec.files import open_checkpoint
from jaxspec.models.target import load_target

VOCABULARY, SAMPLES = 16, 4000
PROMPT = [3, 7, 1, 3, 7, 9, 3, 7, 1, 3, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("distribution")
    target = write_target(root / "target", vocab_size=VOCABULARY, gain=1.2)
    write_eagle3(root / "repeats", target, draft_vocab_size=12)
    write_eagle3(root / "random", target, draft_vocab_size=VOCABULARY, repeats=False)
    write_eagle1(root / "eagle1", target)
    perturb(target, root / "near", scale=0.3)
    write_peagle(root / "peagle", target, draft_vocab_size=12)
    write_dflash(root / "dflash", target, draft_vocab_size=12)
    write_dflash(root / "dspark", target, draft_vocab_size=12, markov="vanilla")
    write_dflash(root / "random dspark", target, repeats=False, markov="rnn")
    write_bigram(root / "bigram", vocab_size=VOCABULARY)
    compressed = write_target(root / "compressed alone", vocab_size=VOCABULARY, gain=1.2, **COMPRESSED)
    write_with_mtp(root / "compressed", compressed)
    latent = write_target(root / "latent alone", vocab_size=VOCABULARY, gain=1.2, **LATENT)
    write_with_mtp(root / "latent", latent)
    states = write_target(root / "states alone", vocab_size=VOCABULARY, gain=1.2, **RECURRENT)
    write_with_mtp(root / "states", states)
    mamba = write_target(root / "mamba alone", vocab_size=VOCABULARY, **MAMBA)
    write_with_mtp(root / "mamba", mamba)
    gemma4 = write_target(root / "gemma4", vocab_size=VOCABULARY, gain=1.2, **GEMMA4)
    write_assistant(root / "assistant of clusters", gemma4, clusters=8)
    return root


@pytest.fixture(scope="module")
def exact(folder):
    """A target's joint probability [V, V, V] of three tokens after the prompt, at a temperature and top_p."""

    @cache
    def last_rows(target):
        model = load_target(open_checkpoint(folder / target), dtype=jnp.float32)
        tails = list(product(range(VOCABULARY), repeat=2))
        width = len(PROMPT) + 2
        paged = PagedTarget(model, len(tails), width, page_size=16, width=width)
        logits, _, _ = paged.feed([[*PROMPT, *tail] for tail in tails], [0] * len(tails))
        return np.asarray(logits[:, -3:], np.float64).reshape(VOCABULARY, VOCABULARY, 3, VOCABULARY)

    def joint(target, temperature, top_p):
        p = np.exp(last_rows(target) / temperature)
        p /= p.sum(-1, keepdims=True)
        # Tokens are kept from the most likely one on, until top_p is reached.
        order = np.argsort(-p, axis=-1)
        falling = np.take_along_axis(p, order, -1)
        kept = falling.cumsum(-1) - falling < top_p
        p *= np.take_along_axis(kept, np.argsort(order, axis=-1), -1)
        p /= p.sum(-1, keepdims=True)
        first, second, third = p[0, 0, 0], p[:, 0, 1], p[:, :, 2]
        return first[:, None, None] * second[:, :, None] * third

    return joint


def excess(counts, probabilities):
    """How many standard deviations a chi-square statistic lies above its mean; rare cells are lumped."""
    counts, expected = counts.ravel(), probabilities.ravel() * counts.sum()
    assert counts[expected == 0].sum() == 0
    common = expected >= 10
    counts = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], max(expected[~common].sum(), 1e-9))
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


DRAFTERS = {
    "plain": {},
    "ngram": {"kind": "ngram"},
    "eagle3 that repeats": {"kind": "eagle3", "source": "repeats"},
    "random eagle3": {"kind": "eagle3", "source": "random"},
    "eagle1": {"kind": "eagle1", "source": "eagle1"},
    "draft model": {"kind": "draft_model", "source": "near"},
    "mtp over compressed": {"target": "compressed", "kind": "mtp"},
    "peagle": {"kind": "peagle", "source": "peagle"},
    "dflash": {"kind": "dflash", "source": "dflash"},
    "mtp": {"target": "latent", "kind": "mtp"},
    "mtp over states": {"target": "states", "kind": "mtp"},
    "mtp over mamba": {"target": "mamba", "kind": "mtp"},
    "assistant of clusters": {
        "target": "gemma4",
        "kind": "gemma4_assistant",
        "source": "assistant of clusters",
    },
    "bigram": {"kind": "bigram", "source": "bigram"},
    "one-hot eagle3": {"kind": "eagle3", "source": "repeats", "sampling": "greedy"},
    "dspark": {"kind": "dspark", "source": "dspark"},
    "random dspark": {"kind": "dspark", "source": "random dspark"},
}
"""Each drafter once, and each kind of attention; `test_pairs.py` has pairs of both. Those of
`tiny_engines.DRAWS` draw from smaller and larger vocabularies."""


WAYS = ((0, 1.0, 1.0), (10**6, 0.7, 0.9))
"""The first seed, the temperature and top_p."""
IN_BOTH_WAYS = ("plain", "ngram", "random eagle3")
"""Drafters that are asked in both; the others in turn, because what is drawn from does not depend on them."""


def ways_of(name):
    return WAYS if name in IN_BOTH_WAYS else [WAYS[list(DRAFTERS).index(name) % 2]]


@pytest.mark.parametrize("name", DRAFTERS)
def test_pairs_of_tokens_are_as_likely_as_in_plain_decoding(folder, exact, name):
    drafter = dict(DRAFTERS[name])
    target = drafter.pop("target", "target")
    if "source" in drafter:
        drafter["source"] = str(folder / drafter["source"])
    if drafter:
        drafter["num_speculative_tokens"] = 3
    engine = jaxspec.load(
        folder / target,
        drafter=drafter,
        sampling_modes=("sampled",),
        progress=False,
        batch_size=16,
        max_model_len=24,
        page_size=8,
        prefill_chunk=4,
        prefill_batch_size=16,
    )
    accepted = drafted = 0
    for begin, temperature, top_p in ways_of(name):
        counts = np.zeros((VOCABULARY,) * 3)
        requests = [
            engine.make_request(
                PROMPT,
                SamplingParams(
                    max_new_tokens=3,
                    temperature=temperature,
                    top_p=top_p,
                    seed=begin + i,
                    ignore_eos=True,
                ),
            )
            for i in range(SAMPLES)
        ]
        # All at once, so that every slot is always taken.
        engine.submit(requests, lambda request: lambda piece: None)
        assert engine.wait_idle(timeout=250)
        for request in requests:
            counts[tuple(request.token_ids)] += 1
            accepted += request.stats.accepted
            drafted += request.stats.drafted
        expected = exact(target, temperature, top_p)
        assert counts.sum() == SAMPLES
        assert excess(counts.sum(2), expected.sum(2)) < 5
        assert excess(counts.sum(0), expected.sum(0)) < 5
        assert excess(counts.sum(1), expected.sum(1)) < 5
    if drafter:
        assert 0.05 < accepted / drafted < 0.95
