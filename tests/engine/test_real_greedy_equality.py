"""Greedy output of the real model, in float32, is plain decoding's for every drafter.

The long form reads twenty prompts from the JSONL file of `turns` that JAXSPEC_PROMPTS names (MT-bench):

    JAXSPEC_PROMPTS=mt_bench.jsonl python -m pytest tests/engine/test_real_greedy_equality.py -m slow -s
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from compare_greedy import compare
from flax import nnx

import jaxspec
from jaxspec import DrafterConfig, Engine, EngineConfig
from jaxspec.config import load_config
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.kinds.eagle1 import Eagle1, Eagle1Config
from jaxspec.drafters.kinds.eagle3 import Eagle3, Eagle3Config, default_capture
from jaxspec.drafters.loading import Build, load_drafter
from jaxspec.files import open_checkpoint
from jaxspec.models.target import load_target

PAGE_SIZE = 16
PROMPTS = ["Count from 1 to 20.", "Write a Python function that adds two numbers."]
TIE = 1e-4
"""A difference counts as none where the target's two best logits lie this close."""


@pytest.fixture(scope="module")
def checkpoint():
    source = load_config("smollm2-135m").target
    return open_checkpoint(source.source, file=source.file, sha256=source.sha256, progress=False)


@pytest.fixture(scope="module")
def target(checkpoint):
    return load_target(checkpoint, dtype=jnp.float32)


def make_drafter(kind: str, k: int, target) -> Drafter:
    config = target.config
    layer = replace(config, num_hidden_layers=1, layer_types=config.layer_types[:1])
    sizes = {"num_speculative_tokens": k, "dtype": jnp.float32, "rngs": nnx.Rngs(k)}
    if kind == "random eagle3":
        capture = default_capture(config.num_hidden_layers)
        return Eagle3(Eagle3Config(layer, 2048, config.hidden_size, capture), **sizes)
    if kind == "random eagle1":
        return Eagle1(Eagle1Config(layer), **sizes)
    if kind == "shipped eagle3":
        drafter = load_config("smollm2-135m-eagle3").drafter
        drafter = replace(drafter, num_speculative_tokens=k)
    else:
        drafter = DrafterConfig(kind=kind, num_speculative_tokens=max(k, 1))
    return load_drafter(drafter, target, Build(jnp.dtype("float32")))


def answers(checkpoint, target, kind, k, prompts, max_new_tokens):
    engine = Engine(
        target,
        make_drafter(kind, k, target),
        tokenizer=checkpoint.tokenizer,
        eos_token_ids=checkpoint.eos_token_ids,
        config=EngineConfig(batch_size=4, max_model_len=1024, page_size=PAGE_SIZE, prefill_chunk=64),
        sampling_modes=("greedy",),
        progress=False,
    )
    return engine.generate(prompts, max_new_tokens=max_new_tokens)


def assert_same_but_for_ties(target, plain, other):
    """Where answers part, the target must have been undecided, and that is printed."""
    for part in compare(target, plain, other)["parts"]:
        print(f"differs at token {part['token']}, where the two best logits are {part['margin']:.1e} apart")
        assert part["margin"] < TIE
        lengths = [len(answers[part["prompt"]].token_ids) for answers in (plain, other)]
        assert part["token"] < min(lengths)  # neither ends before the other


def test_drafting_changes_no_token_of_the_real_model(checkpoint, target):
    """And is worth its steps. `test_company.py` has n-grams, `test_greedy_equality.py` noise for drafts."""
    plain = answers(checkpoint, target, "none", 0, PROMPTS, 24)
    generations = answers(checkpoint, target, "shipped eagle3", 3, PROMPTS, 24)
    assert_same_but_for_ties(target, plain, generations)
    stats = jaxspec.AcceptanceStats()
    for generation in generations:
        stats.add(generation.stats)
    assert stats.acceptance_length > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("kind", ["ngram", "shipped eagle3", "random eagle3", "random eagle1"])
def test_twenty_prompts_of_256_tokens(checkpoint, target, kind, k):
    path = os.environ.get("JAXSPEC_PROMPTS")
    assert path, "JAXSPEC_PROMPTS must name a JSONL file of prompts; see the head of this file"
    lines = Path(path).read_text("utf-8").splitlines()
    prompts = [json.loads(line)["turns"][0] for line in lines[::4]][:20]
    if not _PLAIN:
        _PLAIN.extend(answers(checkpoint, target, "none", 0, prompts, 256))
    assert_same_but_for_ties(target, _PLAIN, answers(checkpoint, target, kind, k, prompts, 256))
    jax.clear_caches()


_PLAIN: list[jaxspec.Generation] = []
