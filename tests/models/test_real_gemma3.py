"""Gemma 3 270M from its GGUF, in five block formats, against transformers on the same file."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import golden_json
from paged_rows import PagedTarget

import jaxspec
from jaxspec.config import load_config
from jaxspec.files import open_checkpoint
from jaxspec.models.target import plan_target
from jaxspec.weights.packed_weights import keeps_packed

GOLDEN = golden_json("gemma3-270m")
CHUNK = 64


@pytest.fixture(scope="module")
def gemma3():
    """The model of `configs/gemma3-270m-ngram.toml`, downloaded once into the cache folder."""
    source = load_config("gemma3-270m-ngram").target
    assert (source.file, source.sha256) == (GOLDEN["member"], GOLDEN["sha256"])
    return open_checkpoint(source.source, file=source.file, sha256=source.sha256, progress=False)


def test_text_has_the_ids_of_transformers(gemma3):
    assert gemma3.tokenizer.encode(GOLDEN["text"]) == GOLDEN["token_ids"]
    assert gemma3.tokenizer.decode(GOLDEN["token_ids"]) == GOLDEN["text"]


@pytest.fixture(scope="module")
def paged(gemma3):
    """The network as the engine keeps it, Q8_0 packed where kernels for that run."""
    target = plan_target(gemma3, dtype=jnp.float32).read(packed=keeps_packed(jnp.dtype(jnp.float32)))
    return PagedTarget(target, 1, 3 * CHUNK, page_size=16, width=CHUNK)


def test_tokens_are_as_likely_as_in_transformers(paged):
    ids, nll = np.asarray(GOLDEN["token_ids"]), []
    for start in range(0, 3 * CHUNK, CHUNK):
        logits, _, _ = paged.feed([ids[start : start + CHUNK]], [start])
        likely = jax.nn.log_softmax(logits[0])
        nll.append(-likely[jnp.arange(CHUNK), ids[start + 1 : start + 1 + CHUNK]])
    expected = np.asarray(GOLDEN["nll"][: 3 * CHUNK])
    assert np.mean(nll) == pytest.approx(expected.mean(), rel=1e-4)
    np.testing.assert_allclose(np.concatenate(nll), expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("text", GOLDEN["greedy"], ids=range(len(GOLDEN["greedy"])))
def test_greedy_tokens_are_those_of_transformers(gemma3, paged, text):
    prompt, answer = gemma3.tokenizer.encode(text["prompt"]), text["token_ids"]
    logits, _, _ = paged.feed([[*prompt, *answer[:-1]]], [0])
    best = logits[0, len(prompt) - 1 : len(prompt) + len(answer) - 1].argmax(axis=-1)
    assert best.tolist() == answer


@pytest.mark.slow
def test_the_engine_answers_with_these_tokens():
    with jaxspec.load("gemma3-270m-ngram", batch_size=1, max_model_len=128, progress=False) as engine:
        for text in GOLDEN["greedy"]:
            answer = engine.generate(text["prompt"], raw=True, max_new_tokens=len(text["token_ids"]))
            assert answer.token_ids == text["token_ids"]
            assert answer.stats.steps < len(text["token_ids"])
