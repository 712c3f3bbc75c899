"""Compare the ways to run the draft loop: their tokens and acceptance must be equal, only times differ.

    python scripts/compare_modes.py smollm2-135m [--input PROMPTS.jsonl] [--limit 4] [--max-new-tokens 64]
        [--temperature 0] [--num-speculative-tokens 3] [--json FILE]

The modes are "host", where Python calls every draft step; "step", one compiled engine step per dispatch; and
"loop", several compiled steps per dispatch. All modes answer each prompt in turn, so that a drift in the
machine's speed affects all of them. The exit status is 1 if tokens or acceptance differ.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench_generate import read_prompts

import jaxspec
from jaxspec.command_line import Parser, write
from jaxspec.engine.oracle import Oracle
from jaxspec.provenance import provenance

MODES: dict[str, dict[str, Any]] = {
    "host": {"steps_per_dispatch": 1},
    "step": {"steps_per_dispatch": 1},
    "loop": {"steps_per_dispatch": 4},
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the comparison; see the module docstring."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args = _parse(arguments)
    drafts = args.num_speculative_tokens
    drafter = {} if drafts is None else {"num_speculative_tokens": drafts}
    sampling = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "ignore_eos": True}
    try:
        if args.json:
            args.json.touch()  # rather fail before answering than after
        prompts = read_prompts(args.input, args.limit)
        sizes: dict[str, Any] = {"batch_size": 1, "slot_sizes": (), "prefix_caching": False}
        modes = ("sampled",) if args.temperature else ("greedy",)
        engines = {
            name: jaxspec.load(args.config, drafter=drafter, sampling_modes=modes, **sizes, **mode)
            for name, mode in MODES.items()
        }
        Oracle(engines["host"].programs).take_over(engines["host"].programs)
        rows = compare(engines, prompts, sampling)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = provenance(shlex.join(["scripts/compare_modes.py", *arguments]), Path(__file__).parent)
    same = all(_outcome(row) == _outcome(rows["host"]) for row in rows.values())
    result |= {"prompts": len(prompts), "sampling": sampling, "same": same, "modes": rows}
    write(table(rows, same))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(not same)


def compare(
    engines: dict[str, jaxspec.Engine], prompts: list, sampling: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """For every mode, tokens and acceptance over all prompts, and the median time of a step."""
    tokens: dict[str, list[list[int]]] = {name: [] for name in engines}
    times: dict[str, list[float]] = {name: [] for name in engines}
    stats = {name: jaxspec.AcceptanceStats() for name in engines}
    for engine in engines.values():
        engine.generate(prompts[0], **{**sampling, "max_new_tokens": 8}, seed=0)
    for seed, prompt in enumerate(prompts):
        for name, engine in engines.items():
            started = time.perf_counter()
            answer = engine.generate(prompt, **sampling, seed=seed)
            assert isinstance(answer, jaxspec.Generation)
            times[name].append((time.perf_counter() - started) / answer.stats.steps)
            tokens[name].append(answer.token_ids)
            stats[name].add(answer.stats)
    return {
        name: {
            "tokens": tokens[name],
            "acceptance_length": stats[name].acceptance_length,
            "acceptance_per_position": stats[name].acceptance_per_position,
            "ms_per_step": 1e3 * statistics.median(times[name]),
        }
        for name in engines
    }


def table(rows: dict[str, dict[str, Any]], same: bool) -> str:
    """The rows as text, with all digits of the acceptance."""
    positions = len(rows["host"]["acceptance_per_position"])
    lines = ["mode  ms/step  tokens/step          " + "".join(f"position {i:<12}" for i in range(positions))]
    for name, row in rows.items():
        rates = "".join(f"{rate:<21.17f}" for rate in row["acceptance_per_position"])
        lines.append(
            f"{name:<5} {row['ms_per_step']:7.2f}  {row['acceptance_length']:<20.17f} {rates}".rstrip()
        )
    lines.append("the same tokens and acceptance" if same else "tokens or acceptance DIFFER")
    return "\n".join(lines) + "\n"


def _outcome(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["tokens"], row["acceptance_length"], row["acceptance_per_position"]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="configuration or checkpoint")
    parser.add_argument("--input", type=Path, help="JSONL prompts; default: built-in prompts")
    parser.add_argument("--limit", type=int, default=4, help="prompts to run")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--num-speculative-tokens", type=int, help="drafts per step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    args = parser.parse_args(arguments)
    if args.max_new_tokens < 2:  # the first token takes no step
        parser.error(f"--max-new-tokens must be at least 2, got {args.max_new_tokens}")
    return args


if __name__ == "__main__":
    sys.exit(main())
