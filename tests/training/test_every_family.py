"""Every family's target gives a head its features, and a head over it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import golden_checkpoint
from paged_rows import PagedTarget
from tiny_engines import ATTENTION
from tiny_models import write_target

from jaxspec.checkpoints import open_checkpoint
from jaxspec.models.loading import load_target
from jaxspec.models.registry import FAMILIES
from jaxspec.training.config import HeadConfig, TrainConfig
from jaxspec.training.head import head_config, new_head
from jaxspec.training.packed_rows import PackedRows, run_target
from jaxspec.training.trainer import Trainer

GOLDENS = {
    "llama": "llama-yarn-rope",
    "qwen2": "qwen2-windowed",
    "qwen3": "qwen3-windowed",
    "qwen3_moe": "qwen3-moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "deepseek-v3",
    "glm4_moe_lite": "glm4-moe-lite",
}
WRITTEN = {
    "mistral": {"model_type": "mistral", "sliding_window": 6},
    "jaxspec_indexed_window": ATTENTION["indexed window"],
    "parallel": ATTENTION["own family"],
}
LENGTHS = (17, 11)
"""Of the texts in one row, behind which there is padding."""
WIDTH = sum(LENGTHS) + 3


@pytest.fixture(scope="module", params=FAMILIES)
def target(request, tmp_path_factory):
    if request.param in GOLDENS:
        checkpoint = golden_checkpoint(GOLDENS[request.param])
    else:
        folder = tmp_path_factory.mktemp("family") / "target"
        checkpoint = open_checkpoint(write_target(folder, **WRITTEN[request.param]))
    target = load_target(checkpoint, dtype=jnp.float32)
    assert target.config.family == request.param
    return target


def packed(target):
    """Both texts in each of two rows."""
    positions = np.concatenate([*(np.arange(length) for length in LENGTHS), np.zeros(3, int)])
    segments = np.repeat([1, 2, 0], [*LENGTHS, 3])
    tokens = np.random.default_rng(0).integers(target.config.vocab_size, size=(2, WIDTH))
    answer = (positions > 3) & (segments > 0)
    placed = (jnp.asarray(np.broadcast_to(x, (2, WIDTH))) for x in (positions, segments, answer))
    return PackedRows(jnp.asarray(tokens), *placed)


def test_features_are_what_the_engines_pass_captures(target):
    capture = tuple(range(target.config.num_hidden_layers + 1))
    rows = packed(target)
    hidden, captured = jax.jit(lambda rows: run_target(target, rows, capture))(rows)
    paged = PagedTarget(target, 2, max(LENGTHS), page_size=8, width=max(LENGTHS), capture=capture)
    begin = 0
    for length in LENGTHS:
        texts = np.asarray(rows.tokens)[:, begin : begin + length]
        _, own, own_captured = paged.feed(texts.tolist(), [0, 0])
        for one, other in zip((hidden, *captured), (own, *own_captured), strict=True):
            expected = np.asarray(other[:, :length])
            found = np.asarray(one).reshape(2, WIDTH, -1)[:, begin : begin + length]
            np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())
        begin += length


def test_a_head_takes_a_training_step(target):
    depth, ids = target.config.num_hidden_layers, np.arange(0, target.config.vocab_size, 2)
    shape = head_config(HeadConfig(capture=(1, depth)), target.config, ids.size)
    head = new_head(shape, target, ids, num_speculative_tokens=2, seed=0)
    config = TrainConfig(
        steps=2, batch_size=2, row_length=WIDTH, warmup_steps=0, num_unroll_steps=2, validation_rows=0
    )
    trainer = Trainer(head, target, config)
    before = jax.tree.map(np.asarray, trainer.initial_state().params)
    state, sums = trainer.update(trainer.initial_state(), packed(target))
    assert np.isfinite(sums.loss).all()
    assert (np.asarray(sums.count) > 0).all()
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True):
        assert np.isfinite(new).all()
        assert np.abs(new - old).max() > 0
