"""The default model, from its GGUF, against what transformers computed on the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import golden_json
from paged_rows import PagedTarget

from jaxspec.config import load_config
from jaxspec.files import open_checkpoint
from jaxspec.models.target import load_target

GOLDEN = golden_json("smollm2-135m")


@pytest.fixture(scope="module")
def smollm2():
    """The default model, downloaded once into the cache folder."""
    source = load_config("smollm2-135m").target
    assert source.sha256 == GOLDEN["sha256"]
    return open_checkpoint(source.source, file=source.file, sha256=source.sha256, progress=False)


@pytest.fixture(scope="module")
def logits(smollm2):
    """f32[S, V] of the fixed text, in two chunks through the paged cache."""
    ids = GOLDEN["token_ids"]
    chunk = -(-len(ids) // 2)
    paged = PagedTarget(load_target(smollm2, dtype=jnp.float32), 1, len(ids), page_size=16, width=chunk)
    first, _, _ = paged.feed([ids[:chunk]], [0])
    second, _, _ = paged.feed([ids[chunk:]], [chunk])
    return jnp.concatenate([first[0], second[0, : len(ids) - chunk]])


def test_every_token_is_as_likely_as_in_transformers(logits):
    ids = jnp.asarray(GOLDEN["token_ids"][1:])
    nll = -jax.nn.log_softmax(logits[:-1])[jnp.arange(len(ids)), ids]
    assert float(nll.mean()) == pytest.approx(GOLDEN["mean_nll"], rel=1e-4)
    np.testing.assert_allclose(nll, GOLDEN["nll"], rtol=1e-3, atol=2e-3)


def test_the_best_next_tokens_are_the_same(logits):
    best, ids = jax.lax.top_k(logits[-1], 5)
    assert ids.tolist() == GOLDEN["last_top5"]["token_ids"]
    np.testing.assert_allclose(best, GOLDEN["last_top5"]["logits"], rtol=1e-4)
