"""The loss of the training-time test: soft cross-entropy against the target, step by step.

Rows and steps count where inference drafts: the row's newest token and the drafted one both belong to an
answer. A position whose best token is outside the draft vocabulary cannot be drafted; it is left out of
the loss and counts as wrong in the accuracy.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.drafters.base import Target
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.training.packed_rows import PackedRows, shift_left
from jaxspec.training.target_features import target_features
from jaxspec.training.unroll import Memory, empty_memory, unroll_step


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Labels:
    """What the target says after every position.

    Attributes:
      probabilities: f32[B, S, W], its distribution, renormalised over the draft vocabulary.
      best: i32[B, S], the draft id of its most likely token, -1 for one that cannot be drafted.
    """

    probabilities: jax.Array
    best: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepSums:
    """Sums over a batch, per draft step: f32[steps] each.

    Attributes:
      loss: cross-entropy in nats, over the positions that can be drafted.
      correct: positions where the head's and the target's most likely tokens agree.
      count: positions that inference may draft.
    """

    loss: jax.Array
    correct: jax.Array
    count: jax.Array

    @property
    def step_loss(self) -> jax.Array:
        """f32[steps], per position."""
        return self.loss / jnp.maximum(self.count, 1)

    @property
    def accuracy(self) -> jax.Array:
        """f32[steps], share of the positions."""
        return self.correct / jnp.maximum(self.count, 1)


def make_labels(head: Eagle3, target: Target, hidden: jax.Array) -> Labels:
    """Labels of the target's final hidden states [B, S, M]."""
    # A few positions at a time: the whole vocabulary for a whole batch would be the largest array of all.
    columns = jnp.moveaxis(hidden, 1, 0)
    best = lax.map(lambda x: target.logits(x).argmax(axis=-1).astype(jnp.int32), columns, batch_size=8).T
    if head.draft_vocab is not None:
        best = jnp.take(head.draft_vocab, best, axis=0)
    # The head's output rows are the target's own.
    logits = head.head(hidden, out_dtype=jnp.float32)
    return Labels(jax.nn.softmax(logits, axis=-1), best)


def drafted_positions(rows: PackedRows, k: int) -> jax.Array:
    """bool[B, S]: rows from which inference may draft in step k."""
    newest = shift_left(rows.answer, 1)
    drafted = shift_left(rows.answer, 2 + k)
    return newest & drafted & (rows.segments == shift_left(rows.segments, 2 + k))


def unrolled_loss(
    head: Eagle3, target: Target, rows: PackedRows, *, num_steps: int, step_decay: float
) -> tuple[jax.Array, StepSums]:
    """The loss of one batch.

    Returns:
      f32[], the sum over steps k of step_decay ** k times the mean cross-entropy; and its parts.
    """
    hidden, captured = target_features(target, rows, head.capture)
    labels = make_labels(head, target, hidden)
    hidden, captured, labels = lax.stop_gradient((hidden, captured, labels))
    x, memory = head.fuse(hidden, captured), empty_memory(head)
    steps = []
    for k in range(num_steps):
        # One step's logits at a time: they are recomputed on the way back instead of kept.
        x, memory, sums = jax.checkpoint(partial(_step, head, target, k))(rows, labels, x, memory)
        steps.append(sums)
    sums = jax.tree.map(lambda *parts: jnp.stack(parts), *steps)
    weights = step_decay ** jnp.arange(num_steps, dtype=jnp.float32)
    return (weights * sums.step_loss).sum(), sums


def _step(
    head: Eagle3, target: Target, k: int, rows: PackedRows, labels: Labels, hidden: jax.Array, memory: Memory
) -> tuple[jax.Array, Memory, StepSums]:
    hidden, memory = unroll_step(head, target, rows, hidden, memory)
    ahead = 1 + k
    log_q = jax.nn.log_softmax(head.logits(target, hidden[:, :-ahead]), axis=-1)
    best = labels.best[:, ahead:]
    counted = drafted_positions(rows, k)[:, :-ahead]
    cross_entropy = -(labels.probabilities[:, ahead:] * log_q).sum(axis=-1)
    sums = StepSums(
        loss=jnp.where(counted & (best >= 0), cross_entropy, 0.0).sum(),
        correct=(counted & (log_q.argmax(axis=-1) == best)).sum(dtype=jnp.float32),
        count=counted.sum(dtype=jnp.float32),
    )
    return hidden, memory, sums
