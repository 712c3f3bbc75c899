"""Compare the ways to run the draft loop: their tokens and acceptance must be equal, only times differ.

    python scripts/compare_modes.py smollm2-135m [--input PROMPTS.jsonl] [--limit 4] [--max-new-tokens 64]
        [--temperature 0] [--num-speculative-tokens 3] [--repeats 5] [--json FILE]

The modes are "host", where Python calls every draft step; "step", one compiled engine step per dispatch; and
"loop", several compiled steps per dispatch. All modes answer each prompt in turn, several times and each time
in another order, so that other work on the machine slows down all of them. Times are medians, with quartiles;
"times step" is the median of the ratios of neighbouring runs, which load affects least. The exit
status is 1 if tokens or acceptance differ.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.script import in_turns, new_parser, run_script

import jaxspec
from jaxspec.commands.bench import read_prompts
from jaxspec.commands.command_line import write
from jaxspec.engine.device.oracle import Oracle

MODES: dict[str, dict[str, Any]] = {
    "host": {"steps_per_dispatch": 1},
    "step": {"steps_per_dispatch": 1},
    "loop": {"steps_per_dispatch": 4},
}


def main(arguments: list[str] | None = None) -> int:
    return run_script(__file__, _parse, _compare, arguments)


def _compare(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    drafts = args.num_speculative_tokens
    drafter = {} if drafts is None else {"num_speculative_tokens": drafts}
    sampling = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "ignore_eos": True}
    prompts = read_prompts(args.input, args.limit)
    sizes: dict[str, Any] = {"batch_size": 1, "slot_sizes": (), "prefix_caching": False}
    modes = ("sampled",) if args.temperature else ("greedy",)
    engines = {
        name: jaxspec.load(args.config, drafter=drafter, sampling_modes=modes, **sizes, **mode)
        for name, mode in MODES.items()
    }
    Oracle(engines["host"].programs).take_over(engines["host"].programs)
    rows = compare(engines, prompts, sampling, repeats=args.repeats)
    same = all(_outcome(row) == _outcome(rows["host"]) for row in rows.values())
    write(table(rows, same))
    return {"prompts": len(prompts), "sampling": sampling, "same": same, "modes": rows}, int(not same)


def compare(
    engines: dict[str, jaxspec.Engine], prompts: list, sampling: dict[str, Any], *, repeats: int
) -> dict[str, dict[str, Any]]:
    """For every mode, tokens and acceptance over all prompts, and the times of a step over all repeats."""
    tokens: dict[str, list[list[int]]] = {name: [] for name in engines}
    times: dict[str, list[float]] = {name: [] for name in engines}
    stats = {name: jaxspec.AcceptanceStats() for name in engines}
    for engine in engines.values():
        engine.generate(prompts[0], **{**sampling, "max_new_tokens": 8}, seed=0)
    names = list(engines)
    for repeat in range(repeats):
        for seed, prompt in enumerate(prompts):
            for name in in_turns(names, repeat + seed):
                started = time.perf_counter()
                answer = engines[name].generate(prompt, **sampling, seed=seed)
                times[name].append(1e3 * (time.perf_counter() - started) / answer.stats.steps)
                if not repeat:
                    tokens[name].append(answer.token_ids)
                    stats[name].add(answer.stats)
    return {
        name: {
            "tokens": tokens[name],
            **stats[name].to_dict(),
            "ms_per_step": statistics.median(times[name]),
            "ms_per_step_quartiles": quartiles(times[name]),
            "times_step": statistics.median(
                own / step for own, step in zip(times[name], times["step"], strict=True)
            ),
        }
        for name in engines
    }


def quartiles(values: list[float]) -> list[float]:
    """The first and the third quartile."""
    first, _, third = statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
    return [first, third]


def table(rows: dict[str, dict[str, Any]], same: bool) -> str:
    """The rows as text, with all digits of the acceptance."""
    positions = len(rows["host"]["acceptance_per_position"])
    lines = [
        "mode  ms/step (quartiles)     times step  tokens/step          "
        + "".join(f"position {i:<12}" for i in range(positions))
    ]
    for name, row in rows.items():
        rates = "".join(f"{rate:<21.17f}" for rate in row["acceptance_per_position"])
        low, high = row["ms_per_step_quartiles"]
        spread = f"{row['ms_per_step']:.2f} ({low:.2f} to {high:.2f})"
        lines.append(
            f"{name:<5} {spread:<23} {row['times_step']:<11.2f} {row['acceptance_length']:<20.17f} {rates}"
        )
    lines.append("the same tokens and acceptance" if same else "tokens or acceptance DIFFER")
    return "\n".join(lines) + "\n"


def _outcome(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["tokens"], row["acceptance_length"], row["acceptance_per_position"]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("config", help="configuration or checkpoint")
    parser.add_argument("--input", type=Path, help="JSONL prompts; default: built-in prompts")
    parser.add_argument("--limit", type=int, default=4, help="prompts to run")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--num-speculative-tokens", type=int, help="drafts per step")
    parser.add_argument("--repeats", type=int, default=5, help="how often each mode answers each prompt")
    args = parser.parse_args(arguments)
    if args.max_new_tokens < 2:  # the first token takes no step
        parser.error(f"--max-new-tokens must be at least 2, got {args.max_new_tokens}")
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    return args


if __name__ == "__main__":
    sys.exit(main())
