"""Compare the log-likelihood of texts with rounded activations and caches, as on a CPU, and in float32.

    python scripts/compare_activations.py smollm2-135m [--input ANSWERS.jsonl] [--json FILE]

Scores a fixed text, and the answers in a JSONL file of prompts and answers, each after its prompt in the
model's chat template. The exit status is 1 if one of them changes by more than --bound.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.attention import PackedMemory
from jaxspec.checkpoints import Checkpoint, Tokenizer, open_checkpoint
from jaxspec.commands.command_line import Parser
from jaxspec.config import load_config
from jaxspec.models.decoder import Decoder
from jaxspec.models.loading import plan_target
from jaxspec.models.packed_weights import Activations, resolve_activations
from jaxspec.provenance import provenance
from jaxspec.training.prompt_files import read_rows

_TEXT = Path(__file__).parents[1] / "tests" / "goldens" / "smollm2-135m.json"
_Text = tuple[list[int], list[int]]
"""Token ids of a prompt and of its answer."""
_FLOAT32 = jnp.dtype(jnp.float32)
_KINDS: dict[str, tuple[Activations, jnp.dtype | None]] = {
    "float32": ("float32", None),
    "int8": ("int8", None),
    "int8 and a float16 cache": ("int8", jnp.dtype(jnp.float16)),
}
"""Activations and the cache's dtype by name; the first is what others are compared with."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the comparison; see the module docstring."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args = _parse(arguments)
    try:
        if args.json:
            args.json.touch()  # rather fail before scoring than after
        resolve_activations("int8", _FLOAT32)
        source = load_config(args.config).target
        checkpoint = open_checkpoint(source.source, file=source.file, sha256=source.sha256)
        if checkpoint.tokenizer is None:
            raise ValueError(f"{checkpoint.name} has no tokenizer")
        text = json.loads(_TEXT.read_text("utf-8"))["text"]
        sets: dict[str, list[_Text]] = {"fixed text": [([], checkpoint.tokenizer.encode(text))]}
        if args.input:
            sets[args.input.name] = list(read_answers(checkpoint.tokenizer, args.input, args.limit))
        losses = {name: measure(checkpoint, sets, *kind) for name, kind in _KINDS.items()}
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows, changes = [], []
    for name, texts in sets.items():
        by_kind = {kind: loss[name] for kind, loss in losses.items()}
        rows.append({"texts": name, "count": len(texts), "nats_per_token": by_kind})
        print(f"{name}: {len(texts)} texts, -log p per token")
        for kind, loss in by_kind.items():
            changes.append(loss / by_kind["float32"] - 1)
            print(f"  {kind:<25}{loss:.5f}  {changes[-1]:+.3%}")
    if args.json:
        command = shlex.join(["scripts/compare_activations.py", *arguments])
        result = provenance(command, Path(__file__).parent) | {"rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(max(map(abs, changes)) > args.bound)


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


def _mean(target: Decoder, texts: list[_Text], cache_dtype: jnp.dtype | None) -> float:
    losses = np.concatenate([_losses(target, *text, cache_dtype) for text in texts])
    return float(losses.astype(np.float64).mean())


def _losses(
    target: Decoder, prompt: list[int], answer: list[int], cache_dtype: jnp.dtype | None
) -> np.ndarray:
    """Negative log-likelihoods of an answer's tokens, in nats; without a prompt, the first token has none."""
    tokens = prompt + answer
    length = -(-len(tokens) // 128) * 128  # few lengths, so that few programs are compiled
    padded = jnp.asarray(tokens + [0] * (length - len(tokens)), jnp.int32)
    losses = np.asarray(_next_token_losses(target, padded, cache_dtype))
    return losses[max(len(prompt) - 1, 0) : len(tokens) - 1]


@nnx.jit(static_argnums=2)
def _next_token_losses(target: Decoder, tokens: jax.Array, cache_dtype: jnp.dtype | None) -> jax.Array:
    positions = jnp.arange(tokens.size, dtype=jnp.int32)
    segments = jnp.ones((1, tokens.size), jnp.int32)
    memory = PackedMemory(target.kinds, positions[None], segments, cache_dtype=cache_dtype)
    hidden, _, _ = target(tokens, positions, memory)
    logs = jax.nn.log_softmax(target.logits(hidden))
    return -jnp.take_along_axis(logs, jnp.roll(tokens, -1)[:, None], axis=1)[:, 0]


def _parse(arguments: list[str]) -> Any:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="configuration")
    parser.add_argument("--input", type=Path, help="JSONL of `prompt` and `answer`")
    parser.add_argument("--limit", type=int, default=200, help="answers to score")
    parser.add_argument("--bound", type=float, default=0.003, help="the largest relative change allowed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
