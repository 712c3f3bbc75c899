"""The loss of the training-time test: the head's distribution against the target's, in every draft step.

A row counts in a step if inference could draft there: if the row's newest token and the drafted token both
belong to the same answer. If the target's most likely token is outside the draft vocabulary, the position
counts as wrong in the accuracy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.attention import PackedMemory
from jaxspec.drafters.base import Target
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.models.layers import Linear
from jaxspec.sharding import all_sum
from jaxspec.training.packed_rows import PackedRows, run_target, shift_left
from jaxspec.training.unroll import unroll_step

# The number of positions per chunk of logits over the whole vocabulary and over the draft vocabulary. A chunk
# fits a GPU's cache, so that repeated passes over it do not read from memory.
_LABELLED, _DRAFTED = 256, 1024


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Labels:
    """The target's predictions after every position. The axis of positions comes first, for chunks.

    Attributes:
      probabilities: [S, B, W] in the dtype of the hidden states: the target's probabilities of the tokens in
        the draft vocabulary; their sum may be less than 1.
      best: i32[S, B]: the draft id of the target's most likely token, or -1 if it is not in the draft
        vocabulary.
    """

    probabilities: jax.Array
    best: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepSums:
    """Sums over a batch for every draft step, f32[steps] each.

    Attributes:
      loss: cross-entropy in nats with the target's distribution, renormalised over the draft vocabulary, over
        the positions whose most likely token is in the draft vocabulary.
      overlap: sum over tokens of the smaller of both probabilities: the acceptance probability of a draft
        sampled at temperature 1.
      correct: positions where the most likely tokens of head and target agree.
      count: positions where inference could draft.
    """

    loss: jax.Array
    overlap: jax.Array
    correct: jax.Array
    count: jax.Array

    def means(self) -> dict[str, jax.Array]:
        """ "loss", "overlap" and "accuracy", f32[steps] each: means over the `count` positions."""
        count = jnp.maximum(self.count, 1)
        return {
            "loss": self.loss / count,
            "overlap": self.overlap / count,
            "accuracy": self.correct / count,
        }


def make_labels(head: Eagle3, target: Target, hidden: jax.Array) -> Labels:
    """The labels for the target's final hidden states [B, S, M]."""

    def label(x: jax.Array) -> Labels:
        logits = target.logits(x)
        best = logits.argmax(axis=-1).astype(jnp.int32)
        if head.draft_vocab is not None:
            best = jnp.take(head.draft_vocab.draft_ids, best, axis=0)
        # The head's output rows are the target's own.
        drafted = head.head(x, out_dtype=jnp.float32)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return Labels(jnp.exp(drafted - total).astype(x.dtype), best)

    batch, length, width = hidden.shape
    size = max(1, min(length, _LABELLED // batch))
    padded = _lengthen(hidden, -(-length // size) * size)
    chunks = jnp.moveaxis(padded, 1, 0).reshape(-1, size, batch, width)
    labels = lax.map(label, chunks)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:length], labels)


def drafted_positions(rows: PackedRows, k: int) -> jax.Array:
    """bool[B, S]: rows from which inference could draft in step k."""
    newest = shift_left(rows.answer, 1)
    drafted = shift_left(rows.answer, 2 + k)
    return newest & drafted & (rows.segments == shift_left(rows.segments, 2 + k))


def unrolled_loss(
    head: Eagle3,
    target: Target,
    rows: PackedRows,
    *,
    num_steps: int,
    step_decay: float,
    objective: str = "cross_entropy",
    cross_entropy_weight: jax.Array | float = 1.0,
    axis: str | None = None,
) -> tuple[jax.Array, StepSums]:
    """The loss of one batch. The head's output rows are frozen and get no gradient.

    Args:
      head, target: the head to train and its target.
      rows: the batch.
      num_steps: draft steps.
      step_decay: the weight of step k is step_decay ** k.
      objective, cross_entropy_weight: see `position_loss`.
      axis: the mesh axis over which the batch is split, if it is; `rows` is then this device's part. Summing
        the results over all devices gives those of the whole batch.

    Returns:
      f32[], the weighted sum over steps of the mean loss per position; and the sums for the metrics.
    """
    hidden, captured = lax.stop_gradient(run_target(target, rows, head.capture))
    batch, length = rows.tokens.shape
    size = max(1, min(length, _DRAFTED // batch))
    padded = -(-length // size) * size
    by_row = hidden.reshape(batch, length, -1)
    labels = lax.stop_gradient(make_labels(head, target, _lengthen(by_row, padded + num_steps)))
    x, memory = head.fuse(hidden, captured), PackedMemory(head.kinds, rows.positions, rows.segments)
    total, steps = jnp.float32(0), []
    for k in range(num_steps):
        x, memory = unroll_step(head, target, rows, x, memory)
        normed = x if head.config.norm_output else head.norm(x)
        normed = _lengthen(normed.reshape(batch, length, -1), padded)
        counted = _lengthen(drafted_positions(rows, k), padded)

        def loss(
            logits: jax.Array, counted: jax.Array, start: jax.Array, ahead: int = 1 + k
        ) -> tuple[jax.Array, StepSums]:
            label = _chunk(labels, start + ahead, size)
            return _summed_loss(logits, label, counted, objective, cross_entropy_weight)

        value, sums = _by_chunks(head.head, loss, normed, counted, size)
        total += step_decay**k * value / jnp.maximum(all_sum(sums.count, axis), 1)
        steps.append(sums)
    return total, jax.tree.map(lambda *parts: jnp.stack(parts), *steps)


def position_loss(
    objective: str, cross_entropy: jax.Array, overlap: jax.Array, cross_entropy_weight: jax.Array | float
) -> jax.Array:
    """The loss of a position, from its cross-entropy and overlap.

    Args:
      objective: "cross_entropy"; or "total_variation", which is 1 - overlap, the probability that a draft is
        rejected at temperature 1.
      cross_entropy, overlap: f32[...] of the positions.
      cross_entropy_weight: weight of the cross-entropy under "total_variation", whose weight is the rest. The
        total variation has almost no gradient where the distributions hardly overlap, so an untrained head
        needs the cross-entropy.

    Source: A. Samarin et al., arXiv 2602.23881.
    """
    if objective == "cross_entropy":
        return cross_entropy
    return cross_entropy_weight * cross_entropy + (1 - cross_entropy_weight) * (1 - overlap)


def _summed_loss(
    logits: jax.Array, labels: Labels, counted: jax.Array, objective: str, weight: jax.Array | float
) -> tuple[jax.Array, StepSums]:
    p = labels.probabilities.astype(jnp.float32)
    log_q = jax.nn.log_softmax(logits, axis=-1)
    inside = p.sum(axis=-1)
    cross_entropy = -(p * log_q).sum(axis=-1) / jnp.maximum(inside, 1e-6)
    cross_entropy = jnp.where(counted & (labels.best >= 0), cross_entropy, 0.0)
    overlap = jnp.minimum(p, jnp.exp(log_q)).sum(axis=-1)
    loss = position_loss(objective, cross_entropy, overlap, weight)
    sums = StepSums(
        loss=cross_entropy.sum(),
        overlap=jnp.where(counted, overlap, 0.0).sum(),
        correct=(counted & (logits.argmax(axis=-1) == labels.best)).sum(dtype=jnp.float32),
        count=counted.sum(dtype=jnp.float32),
    )
    return jnp.where(counted, loss, 0.0).sum(), sums


def _by_chunks(
    project: Linear,
    loss: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, StepSums]],
    x: jax.Array,
    counted: jax.Array,
    size: int,
) -> tuple[jax.Array, StepSums]:
    """Sums `loss(logits, counted, start)` over chunks [size, B, ...] of project(x [B, S, M]) and counted
    [B, S].

    Each chunk's gradient is computed in the forward pass, so that logits are neither kept nor computed twice.
    """
    x, counted = jnp.moveaxis(x, 1, 0), counted.T

    def one(start: jax.Array) -> tuple[jax.Array, StepSums, jax.Array]:
        part = _chunk(x, start, size)
        (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(
            project(part, out_dtype=jnp.float32), _chunk(counted, start, size), start
        )
        (gradient,) = jax.linear_transpose(project, part)(gradient.astype(x.dtype))
        return value, sums, gradient

    values, sums, gradient = lax.map(one, jnp.arange(0, x.shape[0], size))
    # A zero whose derivative is the gradient computed above.
    gradient = lax.stop_gradient(gradient.reshape(x.shape))
    zero = (gradient * (x - lax.stop_gradient(x))).sum(dtype=jnp.float32)
    return lax.stop_gradient(values.sum()) + zero, jax.tree.map(lambda x: x.sum(axis=0), sums)


def _chunk(tree: Any, start: jax.Array | int, size: int) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), tree)


def _lengthen(x: jax.Array, length: int) -> jax.Array:
    """Pads [B, S, ...] with zeros to [B, length, ...]."""
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])
