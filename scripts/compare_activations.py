"""Compare the log-likelihood of texts with rounded activations and caches, and in float32.

    python scripts/compare_activations.py smollm2-135m [--input ANSWERS.jsonl] [--json FILE] [--fp8]

Scores a fixed text, and the answers in a JSONL file of prompts and answers, each after its prompt in the
model's chat template. The exit status is 1 if one of them changes by more than --bound. Activations are
rounded as on a CPU, or with --fp8 as on a GPU: to FP8, before products with the checkpoint's matrices in FP8.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from bench.script import new_parser, run_script
from flax import nnx
from jaxspec_kernels.fp8_matmul.reference import split_fp8
from jaxspec_kernels.matmul import matmul

from jaxspec.attention import PackedMemory
from jaxspec.config import SourceConfig, named_target
from jaxspec.files import Checkpoint, CheckpointError, Tokenizer, open_checkpoint
from jaxspec.files.quantized.codes import QuantizedTensor
from jaxspec.lab.training.prompt_files import read_rows
from jaxspec.models.decoder import Decoder
from jaxspec.models.target import plan_target
from jaxspec.weights import parameters
from jaxspec.weights.packed_weights import Activations, resolve_activations

_TEXT = Path(__file__).parents[1] / "tests" / "goldens" / "smollm2-135m.json"
_Text = tuple[list[int], list[int]]
"""Token ids of a prompt and of its answer."""
_FLOAT32 = jnp.dtype(jnp.float32)
_KINDS: dict[str, tuple[Activations, jnp.dtype | None]] = {
    "float32": ("float32", None),
    "int8": ("int8", None),
    "int8 and a float16 cache": ("int8", jnp.dtype(jnp.float16)),
    "8-bit cache": ("float32", jnp.dtype(jnp.float8_e4m3fn)),
    "int8 and an 8-bit cache": ("int8", jnp.dtype(jnp.float8_e4m3fn)),
}
"""Activations and the cache's dtype by name; the first is what others are compared with."""
_FP8_KINDS = ("float32", "fp8")
_Shapes = frozenset[tuple[int, int]]
"""Shapes of matrices before whose products activations are rounded to FP8, as `_matrix` gives them."""


def main(arguments: list[str] | None = None) -> int:
    return run_script(__file__, _parse, _compare, arguments)


def _compare(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    if not args.fp8:
        resolve_activations("int8", _FLOAT32)
    source = named_target(SourceConfig(args.config))
    checkpoint = open_checkpoint(source.source, file=source.file, sha256=source.sha256)
    if checkpoint.tokenizer is None:
        raise ValueError(f"{checkpoint.name} has no tokenizer")
    text = json.loads(_TEXT.read_text("utf-8"))["text"]
    sets: dict[str, list[_Text]] = {"fixed text": [([], checkpoint.tokenizer.encode(text))]}
    if args.input:
        sets[args.input.name] = list(read_answers(checkpoint.tokenizer, args.input, args.limit))
    if args.fp8:
        losses = {name: measure_fp8(checkpoint, sets, rounds=name == "fp8") for name in _FP8_KINDS}
    else:
        losses = {name: measure(checkpoint, sets, *kind) for name, kind in _KINDS.items()}
    rows, changes = [], []
    for name, texts in sets.items():
        by_kind = {kind: loss[name] for kind, loss in losses.items()}
        rows.append({"texts": name, "count": len(texts), "nats_per_token": by_kind})
        print(f"{name}: {len(texts)} texts, -log p per token")
        for kind, loss in by_kind.items():
            changes.append(loss / by_kind["float32"] - 1)
            print(f"  {kind:<25}{loss:.5f}  {changes[-1]:+.3%}")
    return {"rows": rows}, int(max(map(abs, changes)) > args.bound)


def read_answers(tokenizer: Tokenizer, path: Path, limit: int) -> Iterator[_Text]:
    """Token ids of the prompt and the answer of every row.

    Raises:
      ValueError: a row is malformed or has no answer.
    """
    for row in read_rows(path)[:limit]:
        if row.answer is None:
            raise ValueError(f"{row.where}: has no answer")
        prompt = tokenizer.apply_chat_template(row.messages, arguments=row.chat_template_kwargs)
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        yield ids, tokenizer.encode(row.answer, add_special_tokens=False)


def measure(
    checkpoint: Checkpoint,
    sets: dict[str, list[_Text]],
    activations: Activations,
    cache_dtype: jnp.dtype | None,
) -> dict[str, float]:
    """The mean negative log-likelihood of each set, in nats per token."""
    target = plan_target(checkpoint, dtype=_FLOAT32).read(packed=True, activations=activations)
    return {name: _mean(target, texts, cache_dtype) for name, texts in sets.items()}


def measure_fp8(checkpoint: Checkpoint, sets: dict[str, list[_Text]], *, rounds: bool) -> dict[str, float]:
    """`measure` with all weights dequantized; if `rounds`, inputs are rounded to FP8 where a GPU rounds them.

    Raises:
      CheckpointError: no matrix is in FP8.
    """
    plan = plan_target(checkpoint, dtype=_FLOAT32)
    shapes = {
        _matrix(variable.get_value())
        for variable, stored in plan.parameters
        if all(isinstance(tensor, QuantizedTensor) and tensor.kind == "FP8" for tensor in stored)
    }
    if not shapes:
        raise CheckpointError(f"{checkpoint.name}: no matrix is in FP8")
    target, chosen = plan.read(), frozenset(shapes if rounds else ())
    return {name: _mean(target, texts, None, chosen) for name, texts in sets.items()}


def _matrix(array: Any) -> tuple[int, int]:
    """A shape that stays the same when axes of inputs are joined."""
    return array.size // array.shape[-1], array.shape[-1]


@contextmanager
def _rounded_inputs(shapes: _Shapes) -> Iterator[None]:
    """While a network is traced: rounds the inputs of products with matrices of these shapes to FP8."""

    def rounded(x: jax.Array, kernel: Any, *, out_dtype: Any = None) -> jax.Array:
        if _matrix(kernel) in shapes:
            (values,), scale = split_fp8(x, 1)
            x = values.astype(x.dtype) * scale
        return matmul(x, kernel, out_dtype=out_dtype)

    with patch.object(parameters, "matmul", rounded):
        yield


def _mean(
    target: Decoder, texts: list[_Text], cache_dtype: jnp.dtype | None, rounded: _Shapes = frozenset()
) -> float:
    losses = np.concatenate([_losses(target, *text, cache_dtype, rounded) for text in texts])
    return float(losses.astype(np.float64).mean())


def _losses(
    target: Decoder, prompt: list[int], answer: list[int], cache_dtype: jnp.dtype | None, rounded: _Shapes
) -> np.ndarray:
    """Negative log-likelihoods of an answer's tokens, in nats; without a prompt, the first token has none."""
    tokens = prompt + answer
    length = -(-len(tokens) // 128) * 128  # few lengths, so that few programs are compiled
    padded = jnp.asarray(tokens + [0] * (length - len(tokens)), jnp.int32)
    losses = np.asarray(_next_token_losses(target, padded, cache_dtype, rounded))
    return losses[max(len(prompt) - 1, 0) : len(tokens) - 1]


@nnx.jit(static_argnums=(2, 3))
def _next_token_losses(
    target: Decoder, tokens: jax.Array, cache_dtype: jnp.dtype | None, rounded: _Shapes
) -> jax.Array:
    positions = jnp.arange(tokens.size, dtype=jnp.int32)
    segments = jnp.ones((1, tokens.size), jnp.int32)
    memory = PackedMemory(target.kinds, positions[None], segments, cache_dtype=cache_dtype)
    with _rounded_inputs(rounded):
        hidden, _, _ = target(tokens, positions, memory)
    logs = jax.nn.log_softmax(target.logits(hidden))
    return -jnp.take_along_axis(logs, jnp.roll(tokens, -1)[:, None], axis=1)[:, 0]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("config", metavar="MODEL", help="a configuration (its target), or a checkpoint")
    parser.add_argument("--fp8", action="store_true", help="round activations to FP8, as on a GPU")
    parser.add_argument("--input", type=Path, help="JSONL of `prompt` and `answer`")
    parser.add_argument("--limit", type=int, default=200, help="answers to score")
    parser.add_argument("--bound", type=float, default=0.003, help="the largest relative change allowed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
