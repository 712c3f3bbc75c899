"""The loss of the training-time test: the head's distribution against the target's, in every draft step.

A row counts in a step if inference could draft there: if the row's newest token and the drafted token both
belong to the same answer. If the target's most likely token is outside the draft vocabulary, the position
counts as wrong in the accuracy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.attention import PackedMemory
from jaxspec.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.drafters.base import Target
from jaxspec.lab.training.packed_rows import PackedRows, run_target, shift_left
from jaxspec.lab.training.unroll import unroll_step
from jaxspec.sharding import psum

# The number of rows per chunk of logits over the whole vocabulary and over the draft vocabulary. A chunk fits
# a GPU's cache, so that repeated passes over it do not read from memory.
_LABELLED, _DRAFTED = 256, 1024


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Labels:
    """The target's predictions after the rows that need one, in no particular order.

    Attributes:
      probabilities: [P, W] in the dtype of the hidden states: the target's probabilities of the tokens in
        the draft vocabulary; their sum may be less than 1.
      best: i32[P]: the draft id of the target's most likely token, or -1 if it is not in the draft
        vocabulary.
      index: i32[N], where each of the batch's rows is; the label of a row that needs none is meaningless.
    """

    probabilities: jax.Array
    best: jax.Array
    index: jax.Array

    def of(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The probabilities and the best tokens of some rows."""
        index = self.index.at[rows].get(mode="clip")
        return self.probabilities[index], self.best[index]


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


def make_labels(head: AutoregressiveDrafter, target: Target, hidden: jax.Array, needed: jax.Array) -> Labels:
    """The labels of the rows in `needed`, bool[N], from the target's final hidden states [N, M]."""

    def label(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = hidden[rows]
        logits = drafted = target.logits(x)
        best = logits.argmax(axis=-1).astype(jnp.int32)
        if head.draft_vocab is not None:
            best = jnp.take(head.draft_vocab.draft_ids, best, axis=0)
            drafted = jnp.take(logits, head.draft_vocab.target_ids, axis=-1)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return jnp.exp(drafted - total).astype(x.dtype), best

    (probabilities, best), _, place = _by_chunks(lambda rows, _: (label(rows), ()), needed, _LABELLED)
    return Labels(probabilities, best, place)


def drafted_positions(rows: PackedRows, k: int) -> jax.Array:
    """bool[B, S]: rows from which inference could draft in step k."""
    newest = shift_left(rows.answer, 1)
    drafted = shift_left(rows.answer, 2 + k)
    return newest & drafted & (rows.segments == shift_left(rows.segments, 2 + k))


def unrolled_loss(
    head: AutoregressiveDrafter,
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
    hidden, captured = lax.stop_gradient(run_target(target, rows, head.needs.capture))
    # A later step drafts the same tokens as the first step does from later rows.
    needed = jnp.pad(drafted_positions(rows, 0), ((0, 0), (1, 0)))[:, :-1].ravel()
    labels = lax.stop_gradient(make_labels(head, target, hidden, needed))
    x, memory = head.fuse(hidden, captured), PackedMemory(head.kinds, rows.positions, rows.segments)
    total, steps = jnp.float32(0), []
    for k in range(num_steps):
        x, memory = unroll_step(head, target, rows, x, memory)
        loss = partial(
            _summed_loss,
            labels=labels,
            ahead=1 + k,
            objective=objective,
            weight=cross_entropy_weight,
        )
        project = partial(head.project, target)
        value, sums = _loss_of_rows(project, loss, head.normed(x), drafted_positions(rows, k).ravel())
        total += step_decay**k * value / jnp.maximum(psum(sums.count, axis), 1)
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
      cross_entropy_weight: weight of the cross-entropy under "total_variation"; one minus it is the weight of
        the total variation. That has almost no gradient where the distributions hardly overlap, so an
        untrained head needs the cross-entropy.

    Source: A. Samarin et al., arXiv 2602.23881.
    """
    if objective == "cross_entropy":
        return cross_entropy
    return cross_entropy_weight * cross_entropy + (1 - cross_entropy_weight) * (1 - overlap)


def _summed_loss(
    logits: jax.Array,
    rows: jax.Array,
    counted: jax.Array,
    *,
    labels: Labels,
    ahead: int,
    objective: str,
    weight: jax.Array | float,
) -> tuple[jax.Array, StepSums]:
    """The summed loss of rows with these logits [C, W], and the sums for the metrics."""
    probabilities, best = labels.of(rows + ahead)
    p = probabilities.astype(jnp.float32)
    log_q = jax.nn.log_softmax(logits, axis=-1)
    inside = p.sum(axis=-1)
    cross_entropy = -(p * log_q).sum(axis=-1) / jnp.maximum(inside, 1e-6)
    cross_entropy = jnp.where(counted & (best >= 0), cross_entropy, 0.0)
    overlap = jnp.minimum(p, jnp.exp(log_q)).sum(axis=-1)
    loss = position_loss(objective, cross_entropy, overlap, weight)
    sums = StepSums(
        loss=cross_entropy.sum(),
        overlap=jnp.where(counted, overlap, 0.0).sum(),
        correct=(counted & (logits.argmax(axis=-1) == best)).sum(dtype=jnp.float32),
        count=counted.sum(dtype=jnp.float32),
    )
    return jnp.where(counted, loss, 0.0).sum(), sums


def _loss_of_rows(
    project: Callable[..., jax.Array],
    loss: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, StepSums]],
    x: jax.Array,
    counted: jax.Array,
) -> tuple[jax.Array, StepSums]:
    """Sums `loss(logits, rows, counted)` over the rows in `counted`, bool[N], with the logits of x [N, M].

    Each chunk's gradient is computed in the forward pass, so that logits are neither kept nor computed twice.
    """
    known = lax.stop_gradient(x)

    def one(rows: jax.Array, is_chosen: jax.Array) -> tuple[jax.Array, tuple[jax.Array, StepSums]]:
        part = known[rows]
        (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(
            project(part, out_dtype=jnp.float32), rows, is_chosen
        )
        # Of logits in the states' dtype, so that this product is in that dtype, too.
        _, back = jax.vjp(partial(project, out_dtype=x.dtype), part)
        (gradient,) = back(gradient.astype(x.dtype))
        return gradient, (value, sums)

    gradient, (value, sums), place = _by_chunks(one, counted, _DRAFTED)
    # A zero whose derivative is the gradient computed above.
    gradient = lax.stop_gradient(jnp.where(counted[:, None], gradient[place], 0))
    zero = (gradient * (x - known)).sum(dtype=jnp.float32)
    return lax.stop_gradient(value) + zero, lax.stop_gradient(sums)


def _by_chunks(
    function: Callable[[jax.Array, jax.Array], tuple[Any, Any]], chosen: jax.Array, size: int
) -> tuple[Any, Any, jax.Array]:
    """Calls `function(rows, is_chosen)` for the rows in `chosen`, bool[N], a chunk at a time.

    In long prompts most rows are not chosen, and cost nothing here.

    Args:
      function: gets i32[C], rows, and bool[C], whether they are chosen: all are but in the last chunk.
        Returns values [C, ...], and values to be summed over the chunks.
      chosen: the rows.
      size: the most rows of a chunk.

    Returns:
      The values of all chunks, [P, ...]; the sums; and i32[N], the place of each chosen row among the values.
    """
    length = chosen.size
    size = min(size, length)
    num_chunks = -(-length // size)
    order = jnp.argsort(~chosen, stable=True).astype(jnp.int32)
    place = (
        jnp.zeros(length, jnp.int32).at[order].set(jnp.arange(length, dtype=jnp.int32), unique_indices=True)
    )
    order = jnp.pad(order, (0, num_chunks * size - length))
    count = chosen.sum(dtype=jnp.int32)

    def chunk(i: jax.Array | int) -> tuple[Any, Any]:
        rows = lax.dynamic_slice_in_dim(order, i * size, size)
        return function(rows, i * size + jnp.arange(size) < count)

    def add(i: jax.Array, done: tuple[Any, Any]) -> tuple[Any, Any]:
        values, sums = chunk(i)
        write = partial(lax.dynamic_update_slice_in_dim, start_index=i * size, axis=0)
        return jax.tree.map(write, done[0], values), jax.tree.map(jnp.add, done[1], sums)

    values, sums = jax.eval_shape(chunk, 0)
    empty = jax.tree.map(lambda x: jnp.zeros((num_chunks * size, *x.shape[1:]), x.dtype), values)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    values, sums = lax.fori_loop(0, -(-count // size), add, (empty, zeros))
    return values, sums, place
