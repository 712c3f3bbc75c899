"""Answer prompts greedily with and without speculation, and report where answers differ.

    python scripts/compare_greedy.py smollm2-135m --input PROMPTS.jsonl [--limit 20] [--max-new-tokens 256]
        [--dtype float32] [--batch-size 1,4] [--json FILE]

Where two answers first differ, the script prints the margin between the target's two best logits. Speculation
adds the same numbers in a different order, so answers may differ only at a near-tie. The exit status is 1 if
a margin is above --tie.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench.script import new_parser, numbers, run_script

import jaxspec
from jaxspec.attention import PackedMemory
from jaxspec.commands.bench import read_prompts
from jaxspec.config import load_config
from jaxspec.files import open_checkpoint
from jaxspec.models.decoder import Decoder
from jaxspec.models.target import load_target


def main(arguments: list[str] | None = None) -> int:
    return run_script(__file__, _parse, _compare, arguments)


def _compare(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    prompts = read_prompts(args.input, args.limit)
    target = load(args.config, args.dtype)
    sizes = {"dtype": args.dtype, "sampling_modes": ("greedy",)}
    plain_engine = jaxspec.load(args.config, drafter={"kind": "none"}, batch_size=1, **sizes)
    plain = plain_engine.generate(prompts, max_new_tokens=args.max_new_tokens)
    rows, worst = [], 0.0
    for batch_size in args.batch_size:
        engine = jaxspec.load(args.config, batch_size=batch_size, **sizes)
        speculative = engine.generate(prompts, max_new_tokens=args.max_new_tokens)
        row = compare(target, plain, speculative)
        rows.append(row | {"batch_size": batch_size})
        worst = max([worst, *(part["margin"] for part in row["parts"])])
        print(
            f"batch {batch_size}: {row['identical']} of {len(prompts)} answers identical, "
            f"{row['tokens']} tokens, acceptance length {row['acceptance_length']:.2f}"
        )
        for part in row["parts"]:
            print(
                f"  prompt {part['prompt']} differs from token {part['token']}, "
                f"two best logits {part['margin']:.1e} apart"
            )
    return {"dtype": args.dtype, "rows": rows}, int(worst > args.tie)


def load(config: str, dtype: str) -> Decoder:
    """The target of a configuration, for its logits."""
    source = load_config(config).target
    checkpoint = open_checkpoint(source.source, file=source.file, sha256=source.sha256)
    return load_target(checkpoint, dtype=jnp.dtype(dtype))


def compare(target: Decoder, plain: Any, speculative: Any) -> dict[str, Any]:
    """Counts equal answers; for the others, where they first differ, and the target's margin there."""
    parts, stats = [], jaxspec.AcceptanceStats.total(speculative)
    for i, (one, two) in enumerate(zip(plain, speculative, strict=True)):
        if one.token_ids == two.token_ids:
            continue
        pairs = zip(one.token_ids, two.token_ids, strict=False)
        shorter = min(len(one.token_ids), len(two.token_ids))
        place = next((j for j, (a, b) in enumerate(pairs) if a != b), shorter)
        margin = _margin(target, one.prompt_token_ids + one.token_ids[:place])
        parts.append({"prompt": i, "token": place, "margin": margin})
    return {
        "identical": len(plain) - len(parts),
        "tokens": sum(len(answer.token_ids) for answer in speculative),
        "acceptance_length": stats.acceptance_length,
        "parts": parts,
    }


def _margin(target: Decoder, tokens: list[int]) -> float:
    """The difference of the target's two best logits after these tokens."""
    length = -(-len(tokens) // 64) * 64  # few lengths, so that few programs are compiled
    padded = jnp.asarray(tokens + [0] * (length - len(tokens)), jnp.int32)
    positions = jnp.arange(length, dtype=jnp.int32)
    memory = PackedMemory(target.kinds, positions[None], jnp.ones((1, length), jnp.int32))
    hidden, _, _ = target(padded, positions, memory)
    best = jax.lax.top_k(target.logits(hidden[len(tokens) - 1]), 2)[0]
    return float(np.asarray(best[0] - best[1]))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("config", help="configuration")
    parser.add_argument("--input", type=Path, required=True, help="JSONL prompts")
    parser.add_argument("--limit", type=int, default=20, help="prompts to run")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--batch-size", type=numbers(), default=[1], metavar="B,B,...", help="slots")
    parser.add_argument("--tie", type=float, default=1e-3, help="the largest margin that counts as a tie")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
