"""Tokens per step of one or more drafters, by set of prompts and temperature.

    python scripts/bench_acceptance.py smollm2-135m --prompts mt_bench.jsonl gsm8k.jsonl
        [--head HEAD …] [--temperatures 0 1] [--seeds 0 1 2 3 4] [--limit N] [--max-new-tokens 256]
        [--num-speculative-tokens 4] [--batch-size 8] [--output FILE.json]

A row of a prompt file is a "prompt", "turns", of which the first is used, or "messages". Each HEAD takes the
place of the configuration's drafter; without any, the configuration's own is measured. Greedy answers need no
seed; at other temperatures every prompt is answered with each seed, and the table shows the mean with the
least and the most. All drafters answer the same prompts: those that leave room for an answer.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from bench.script import new_parser, run_script

import jaxspec
from jaxspec.commands.command_line import drafter_from
from jaxspec.config import resolve_config
from jaxspec.files import open_checkpoint
from jaxspec.lab.training.config import EvaluateConfig
from jaxspec.lab.training.evaluate import length_text, measure
from jaxspec.lab.training.prompt_files import encode_fitting
from jaxspec.models.target import target_config


def main(arguments: list[str] | None = None) -> int:
    return run_script(__file__, _parse, _bench, arguments)


def _bench(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    results: dict[str, Any] = {}
    asked = EvaluateConfig(
        temperatures=tuple(args.temperatures),
        seeds=tuple(args.seeds),
        num_speculative_tokens=args.num_speculative_tokens,
        max_new_tokens=args.max_new_tokens,
    )
    sets, positions = _read(args)
    for head in args.head or [None]:
        drafter: dict[str, Any] = {"num_speculative_tokens": args.num_speculative_tokens}
        if head is not None:
            drafter |= drafter_from(head, option="--head")
        sizes = {"batch_size": args.batch_size, "max_model_len": positions, "slot_sizes": ()}
        with jaxspec.load(args.config, drafter=drafter, **sizes) as engine:
            results[head or args.config] = measure(engine, sets, asked, label=head or args.config)
    print(_table(results, asked))
    return {"acceptance": results}, 0


def _read(args: argparse.Namespace) -> tuple[dict[str, list[list[int]]], int]:
    """Token ids of the prompts by set, and the positions that the longest needs with its answer."""
    source = resolve_config(args.config).target
    checkpoint = open_checkpoint(source.source, file=source.file, sha256=source.sha256)
    if checkpoint.tokenizer is None:
        raise ValueError(f"{source.source}: has no tokenizer")
    positions = target_config(checkpoint).max_position_embeddings
    sets: dict[str, list[list[int]]] = {}
    for path in args.prompts:
        if path.stem in sets:
            raise ValueError(f"--prompts: two files are called {path.stem}")
        sets[path.stem] = encode_fitting(
            checkpoint.tokenizer,
            path,
            positions=positions,
            max_new_tokens=args.max_new_tokens,
            limit=args.limit,
        )
    return sets, max(len(ids) for encoded in sets.values() for ids in encoded) + args.max_new_tokens


def _table(results: dict[str, Any], asked: EvaluateConfig) -> str:
    """A table in Markdown, with a row for each set and temperature and a column for each drafter."""
    names = list(results)
    lines = [
        f"Tokens per step, with 95 % intervals over prompts; K = {asked.num_speculative_tokens}, at most "
        f"{asked.max_new_tokens} new tokens.",
        "",
        f"| prompts | temperature | {' | '.join(names)} |",
        "|---" * (2 + len(names)) + "|",
    ]
    for key, first in results[names[0]].items():
        label, _, temperature = key.rpartition(" temperature ")
        lengths = " | ".join(length_text(results[name][key]) for name in names)
        lines.append(f"| {label}, {first['prompts']} | {temperature} | {lengths} |")
    return "\n".join(lines)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = new_parser(__doc__, "--output")
    parser.add_argument("config", metavar="NAME", help="configuration or checkpoint")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True, metavar="FILE", help="JSONL files")
    parser.add_argument("--head", action="append", help="a checkpoint in place of the drafter's; repeatable")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--limit", type=int, help="prompts of each file; default: all")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--num-speculative-tokens", type=int, default=4, help="drafts per step")
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args(arguments)
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit must be at least 1, got {args.limit}")
    return args


if __name__ == "__main__":
    sys.exit(main())
