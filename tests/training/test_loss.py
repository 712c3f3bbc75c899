"""The loss against a row-by-row computation, and which rows and steps count."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.config import ModelConfig
from jaxspec.models.llama import Llama
from jaxspec.training.config import HeadConfig
from jaxspec.training.head import head_config, new_head
from jaxspec.training.loss import drafted_positions, make_labels, unrolled_loss
from jaxspec.training.packed_rows import PackedRows
from jaxspec.training.target_features import target_features
from jaxspec.training.unroll import empty_memory, unroll_step

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


def test_loss_and_accuracy_equal_a_row_by_row_computation():
    target = Llama(TARGET, dtype=jnp.float32, rngs=nnx.Rngs(0))
    ids = np.arange(0, 40, 2, dtype=np.int32)
    config = head_config(HeadConfig(), TARGET, ids.size)
    head = new_head(config, target, ids, num_speculative_tokens=2, page_size=4, seed=1)
    rows = packed((3, 6), (2, 5), length=18)
    loss, sums = unrolled_loss(head, target, rows, num_steps=2, step_decay=0.8)

    hidden, captured = target_features(target, rows, head.capture)
    logits = np.asarray(target.logits(hidden)[0], np.float64)
    x, memory, expected = head.fuse(hidden, captured), empty_memory(head), 0.0
    for k in range(2):
        x, memory = unroll_step(head, target, rows, x, memory)
        draft = np.asarray(head.logits(target, x)[0], np.float64)
        total, correct, count = 0.0, 0, 0
        for i in np.flatnonzero(drafted_positions(rows, k)[0]):
            label, drafted = logits[i + 1 + k], draft[i]
            count += 1
            correct += ids[drafted.argmax()] == label.argmax()
            if label.argmax() in ids:
                p = np.exp(label[ids]) / np.exp(label[ids]).sum()
                total -= (p * (drafted - np.log(np.exp(drafted).sum()))).sum()
        np.testing.assert_allclose(
            [sums.loss[k], sums.correct[k], sums.count[k]], [total, correct, count], rtol=1e-4
        )
        expected += 0.8**k * total / count
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


def test_labels_mark_what_cannot_be_drafted():
    target = Llama(TARGET, dtype=jnp.float32, rngs=nnx.Rngs(0))
    ids = np.arange(10, 30, dtype=np.int32)
    config = head_config(HeadConfig(), TARGET, ids.size)
    head = new_head(config, target, ids, num_speculative_tokens=2, page_size=4, seed=1)
    rows = packed((3, 61), length=64)
    hidden, _ = target_features(target, rows, ())
    best = np.asarray(target.logits(hidden)[0].argmax(axis=-1))
    inside = (best >= 10) & (best < 30)
    assert 0 < inside.sum() < 64
    np.testing.assert_array_equal(make_labels(head, target, hidden).best[0], np.where(inside, best - 10, -1))
