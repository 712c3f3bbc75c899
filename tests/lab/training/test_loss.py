"""The loss and its gradient against a plain computation, and which rows and steps count."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxspec_kernels.matmul import MIN_WEIGHT_BYTES

from jaxspec.attention import PackedMemory
from jaxspec.config import ModelConfig
from jaxspec.jax_settings import platform
from jaxspec.lab.training import loss
from jaxspec.lab.training.config import HeadConfig
from jaxspec.lab.training.head import head_config, is_trained, new_head
from jaxspec.lab.training.loss import drafted_positions, make_labels
from jaxspec.lab.training.packed_rows import PackedRows, run_target
from jaxspec.lab.training.unroll import unroll_step
from jaxspec.models.families.llama import Llama

TARGET = ModelConfig("llama", 40, 32, 48, 6, 4, 2, 8, tie_word_embeddings=True)


def packed(*conversations: tuple[int, int], length: int) -> PackedRows:
    """One row of (prompt length, answer length) conversations with random tokens."""
    rng = np.random.default_rng(0)
    positions, segments = np.zeros((2, length), np.int32)
    answer, begin = np.zeros(length, bool), 0
    for segment, (prompt, reply) in enumerate(conversations, 1):
        place = slice(begin, begin + prompt + reply)
        positions[place] = np.arange(prompt + reply)
        segments[place] = segment
        answer[begin + prompt : begin + prompt + reply] = True
        begin += prompt + reply
    tokens = rng.integers(0, 40, length, np.int32)
    return PackedRows(*(jnp.asarray(x)[None] for x in (tokens, positions, segments, answer)))


def test_counted_are_rows_that_the_engine_drafts_from():
    rows = packed((3, 4), (2, 3), length=14)
    # The engine drafts from a row whose next token is of the answer, up to the answer's last token.
    assert np.flatnonzero(drafted_positions(rows, 0)[0]).tolist() == [2, 3, 4, 8, 9]
    assert np.flatnonzero(drafted_positions(rows, 1)[0]).tolist() == [2, 3, 8]
    assert np.flatnonzero(drafted_positions(rows, 2)[0]).tolist() == [2]


IDS = np.arange(0, 40, 2, dtype=np.int32)
ROWS = packed((3, 6), (2, 5), length=18)


@pytest.fixture(scope="module")
def models():
    target = Llama(TARGET, dtype=jnp.float32, rngs=nnx.Rngs(0))
    config = head_config(HeadConfig(), TARGET, IDS.size)
    return new_head(config, target, IDS, num_speculative_tokens=2, seed=1), target


def whole_rows_loss(head, target, objective, weight):
    """The loss and its parts [steps] from whole logits, with the gradient that jax takes of them."""
    hidden, captured = run_target(target, ROWS, head.needs.capture)
    p_full = jax.nn.softmax(target.logits(hidden))
    memory = PackedMemory(head.kinds, ROWS.positions, ROWS.segments)
    x, total, parts = head.fuse(hidden, captured), 0.0, []
    for k in range(2):
        x, memory = unroll_step(head, target, ROWS, x, memory)
        with jax.ensure_compile_time_eval():
            i = np.flatnonzero(drafted_positions(ROWS, k)[0])
        logits, p = head.logits(target, x)[i], p_full[i + 1 + k]
        best = p.argmax(-1)
        renormalised = p[:, IDS] / p[:, IDS].sum(-1, keepdims=True)
        cross_entropy = -(renormalised * jax.nn.log_softmax(logits)).sum(-1) * jnp.isin(best, IDS)
        overlap = jnp.minimum(p[:, IDS], jax.nn.softmax(logits)).sum(-1)
        direct = cross_entropy if objective == "cross_entropy" else 1 - overlap
        total += 0.8**k * (weight * cross_entropy + (1 - weight) * direct).mean()
        correct = (jnp.asarray(IDS)[logits.argmax(-1)] == best).sum()
        parts.append([cross_entropy.sum(), overlap.sum(), correct, len(i)])
    return total, jnp.array(parts).T


@pytest.fixture(scope="module")
def whole(models):
    """The loss, its parts and the gradient from whole logits, found once for all sizes of chunks."""
    head, target = models
    graph, params, frozen = nnx.split(head, is_trained, ...)

    @cache
    def of(objective, weight):
        def whole_loss(params):
            return whole_rows_loss(nnx.merge(graph, params, frozen), target, objective, weight)

        return jax.jit(jax.value_and_grad(whole_loss, has_aux=True))(params)

    return of


@pytest.mark.parametrize(("objective", "weight"), [("cross_entropy", 1.0), ("total_variation", 0.3)])
@pytest.mark.parametrize("chunk", [1024, 4])
def test_loss_and_gradient_equal_those_of_whole_logits(models, whole, monkeypatch, objective, weight, chunk):
    monkeypatch.setattr(loss, "_DRAFTED", chunk)
    head, target = models
    graph, params, frozen = nnx.split(head, is_trained, ...)

    def by_chunks(params):
        return loss.unrolled_loss(
            nnx.merge(graph, params, frozen),
            target,
            ROWS,
            num_steps=2,
            step_decay=0.8,
            objective=objective,
            cross_entropy_weight=weight,
        )

    (value, sums), gradient = jax.jit(jax.value_and_grad(by_chunks, has_aux=True))(params)
    (expected, parts), expected_gradient = whole(objective, weight)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose([sums.loss, sums.overlap, sums.correct, sums.count], parts, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6 * max(1, float(jnp.abs(theirs).max())))


def test_total_variation_is_how_likely_a_draft_is_rejected():
    cross_entropy, overlap = jnp.array([2.0]), jnp.array([0.75])
    assert loss.position_loss("cross_entropy", cross_entropy, overlap, 0.25).tolist() == [2.0]
    assert loss.position_loss("total_variation", cross_entropy, overlap, 0.25).tolist() == [0.6875]


def test_labels_of_a_vocabulary_that_is_worth_a_kernel():
    """The kernel for few rows on a CPU takes no part in a vmap; of tiny weights it is never chosen."""
    shape = replace(TARGET, vocab_size=MIN_WEIGHT_BYTES // (4 * TARGET.hidden_size))
    target = Llama(shape, dtype=jnp.float32, rngs=nnx.Rngs(0))
    head = new_head(head_config(HeadConfig(), shape, 20), target, IDS, num_speculative_tokens=2, seed=1)
    hidden = jax.random.normal(jax.random.key(0), (600, shape.hidden_size))
    needed = jnp.arange(600) % 3 > 0
    labels = jax.jit(lambda *args: make_labels(head, target, *args))(hidden, needed)
    probabilities, best = labels.of(np.flatnonzero(needed))
    p = jax.nn.softmax(hidden @ target.output_kernel)[needed]
    rtol = 1e-4 if platform() == "cpu" else 2e-3
    np.testing.assert_allclose(probabilities, p[:, IDS], rtol=rtol, atol=1e-7)
    assert best.shape == (400,)


def test_labels_mark_what_cannot_be_drafted():
    target = Llama(TARGET, dtype=jnp.float32, rngs=nnx.Rngs(0))
    ids = np.arange(10, 30, dtype=np.int32)
    config = head_config(HeadConfig(), TARGET, ids.size)
    head = new_head(config, target, ids, num_speculative_tokens=2, seed=1)
    rows = packed((3, 61), length=64)
    hidden, _ = jax.jit(lambda: run_target(target, rows, ()))()
    best = np.asarray(target.logits(hidden).argmax(axis=-1))
    inside = (best >= 10) & (best < 30)
    assert 0 < inside.sum() < 64
    labels = make_labels(head, target, hidden, jnp.ones(64, bool))
    np.testing.assert_array_equal(labels.of(jnp.arange(64))[1], np.where(inside, best - 10, -1))
