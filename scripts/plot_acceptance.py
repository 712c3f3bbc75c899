"""Plot how often drafts are accepted at each position, for configurations and results of benchmarks.

    python scripts/plot_acceptance.py smollm2-135m [MORE …] [--output acceptance.png] [--input PROMPTS.jsonl]
        [--limit 4] [--max-new-tokens 64] [--temperature 0] [--num-speculative-tokens 4]

A name ending in .json is a result, for example of `jaxspec bench --output`; any other name is
loaded and answers the prompts. Several names share one plot.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, cast

import jaxspec
from jaxspec import AcceptanceStats
from jaxspec.commands.bench import read_prompts
from jaxspec.commands.command_line import Parser, add_device_option, report
from jaxspec.lab import plots


def main(arguments: list[str] | None = None) -> int:
    """Plots; see the module docstring."""
    args = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        prompts = read_prompts(args.input, args.limit)
        tables: dict[str, plots.Table] = {}
        for name in args.names:
            tables[Path(name).stem if name.endswith(".json") else name] = _table(name, prompts, args)
        found = {name: plots.acceptance(table) for name, table in tables.items()}
        ax = plots.acceptance_per_position(tables)
        cast(Any, ax.figure).savefig(args.output, dpi=150)
    except (ValueError, OSError, ImportError) as error:
        return report(error)
    for name, values in found.items():
        rates = " ".join(f"{rate:.2f}" for rate in values["acceptance_per_position"])
        print(f"{name}: {values['acceptance_length']:.2f} tokens a step; per position {rates}")
    print(args.output)
    return 0


def _table(name: str, prompts: list, args: argparse.Namespace) -> plots.Table:
    if name.endswith(".json"):
        return json.loads(Path(name).read_text("utf-8"))
    drafts = args.num_speculative_tokens
    engine = jaxspec.load(
        name,
        drafter={} if drafts is None else {"num_speculative_tokens": drafts},
        device=args.device,
        sampling_modes=("sampled",) if args.temperature else ("greedy",),
        batch_size=len(prompts),
        slot_sizes=(),
    )
    sampling = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": 0}
    with engine:
        return AcceptanceStats.total(engine.generate(prompts, **sampling))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="configuration, checkpoint or .json")
    parser.add_argument("--output", type=Path, default=Path("acceptance.png"), help="image file to write")
    parser.add_argument("--input", type=Path, help="JSONL prompts; default: built-in prompts")
    parser.add_argument("--limit", type=int, default=4, help="prompts to answer")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    add_device_option(parser)
    parser.add_argument("--num-speculative-tokens", type=int, help="drafts per step")
    args = parser.parse_args(arguments)
    if all(name.endswith(".json") for name in args.names):
        asked = ["input", "limit", "max_new_tokens", "temperature", "num_speculative_tokens"]
        parser.refuse(args, asked, "on answers that were measured before")
    return args


if __name__ == "__main__":
    sys.exit(main())
