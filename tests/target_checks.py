"""Checks for targets of all families; the tests of each family name its goldens."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from golden_files import assert_close, golden_checkpoint, golden_folder, golden_outputs
from paged_rows import PagedTarget

import jaxspec
from jaxspec.attention import StateShape
from jaxspec.files import Checkpoint
from jaxspec.models.target import load_target
from jaxspec.weights.loading import export_tensors


def check_one_pass(case: str, checkpoint: Checkpoint | None = None) -> None:
    """Checks that logits and all hidden states of a prompt equal those of transformers.

    Args:
      case: the golden.
      checkpoint: its checkpoint in another form.
    """
    model = load_target(checkpoint or golden_checkpoint(case), dtype=jnp.float32)
    golden = golden_outputs(case)
    ids = golden["input_ids"].astype(np.int32)
    capture = tuple(range(model.config.num_hidden_layers + 1))
    paged = PagedTarget(model, *ids.shape, page_size=16, width=ids.shape[1], capture=capture)
    logits, hidden, captured = paged.feed(ids, [0, 0])
    assert_close(logits, golden["logits"])
    assert_close(hidden, golden["normed"])
    for state, expected in zip(captured, golden["hidden"], strict=True):
        assert_close(state, expected)


def check_pieces(case: str, size: int) -> None:
    """Checks prompts read in pieces through a poisoned cache; the second slot is five tokens ahead."""
    model, golden = load_target(golden_checkpoint(case), dtype=jnp.float32), golden_outputs(case)
    ids = golden["input_ids"].astype(np.int32)
    length = ids.shape[1]
    paged = PagedTarget(model, 2, length, page_size=4, width=max(size, 5), fill=np.nan)
    starts = [0, 5]
    paged.feed([[], ids[1, :5]], [0, 0])
    while min(starts) < length:
        rows = [ids[slot, start : start + size] for slot, start in enumerate(starts)]
        logits, _, _ = paged.feed(rows, starts)
        for slot, row in enumerate(rows):
            if len(row):
                at = slice(starts[slot], starts[slot] + len(row))
                assert_close(logits[slot, : len(row)], golden["logits"][slot, at])
            starts[slot] += len(row)


def check_export(case: str) -> None:
    """Checks that a target's parameters are exported bit for bit as the tensors that were loaded."""
    checkpoint = golden_checkpoint(case)
    exported = export_tensors(load_target(checkpoint, dtype=jnp.float32))
    assert set(exported) == set(checkpoint.tensors)
    for name, tensor in checkpoint.tensors.items():
        np.testing.assert_array_equal(exported[name], tensor.read(), err_msg=name)


def check_greedy(case: str, drafter: Mapping[str, Any] = {"kind": "ngram"}) -> None:
    """Checks greedy answers of an engine with drafts: eight prompts together, and one alone.

    Prompts are read in chunks of eight tokens, and pages hold eight.
    """
    golden = golden_outputs(case)
    lengths, answers = golden["greedy_lengths"].tolist(), golden["greedy"]
    pairs = [
        (ids[:length].tolist(), answers[row, i].tolist())
        for row, ids in enumerate(golden["input_ids"])
        for i, length in enumerate(lengths)
    ]
    prompts, expected = zip(*pairs, strict=True)
    sizes = {"batch_size": 8, "slot_sizes": (1,), "page_size": 8, "prefill_chunk": 8, "prefill_batch_size": 1}
    asked = {"max_new_tokens": answers.shape[-1], "ignore_eos": True}
    with jaxspec.load(
        golden_folder(case),
        drafter={**drafter, "num_speculative_tokens": 3},
        max_model_len=max(lengths) + answers.shape[-1],
        sampling_modes=("greedy",),
        progress=False,
        **sizes,
    ) as engine:
        together = engine.generate(list(prompts), **asked)
        alone = engine.generate(prompts[0], **asked)
    assert [each.token_ids for each in together] == list(expected)
    assert alone.token_ids == expected[0]
    assert sum(each.stats.accepted for each in together) > 0


def check_rule_in_chunks(rule: Any, shape: StateShape, length: int, *, size: float = 1.0) -> None:
    """Checks that a chunk is its rows one after another, of two texts; the shorter one ends in NaN. Outputs
    differ by at most 1e-5 times `size`, about as large as they are."""
    states, rows = random_rows(shape, 2, length, seed=length)
    counts = np.array([length, max(length - 3, 0)])
    valid = np.arange(length) < counts[:, None]
    chunk, step = jax.jit(rule.chunk), jax.jit(rule.step)
    outputs, after = chunk(states, jnp.where(valid[..., None, None], rows, jnp.nan), jnp.asarray(valid))
    for text, count in enumerate(counts):
        state = tuple(array[text : text + 1] for array in states)
        for i in range(count):
            output, state = step(state, rows[text : text + 1, i])
            np.testing.assert_allclose(outputs[text, i], output[0], atol=1e-5 * size)
        for one, other in zip(after, state, strict=True):
            np.testing.assert_allclose(one[text], other[0], atol=1e-5 * size)


def check_rule_alone(rule: Any, shape: StateShape) -> None:
    """Checks that a row of a step has the same bits whatever the sequences beside it are."""
    states, rows = random_rows(shape, 5, 1)
    step = jax.jit(rule.step)
    together = step(states, rows[:, 0])
    alone = step(tuple(array[3:4] for array in states), rows[3:4, 0])
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(one[3], other[0])


def random_rows(shape: StateShape, texts: int, length: int, *, seed: int = 0) -> Any:
    """Random states of so many texts, and rows [n, C, H, F]."""
    rng = np.random.default_rng(seed)
    sizes = [(texts, shape.num_heads, *each) for each, _ in shape.states]
    rows = normal(rng, texts, length, shape.num_heads, shape.row)
    return tuple(normal(rng, *size) for size in sizes), rows


def normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
