"""Tokens per second with and without speculation, prompt by prompt in one run.

Each prompt is answered by both engines in turn, so that a machine whose speed drifts slows both; the
ratio is the median over prompts. Loading and compiling are not counted.

    python scripts/bench_generate.py smollm2-135m --max-new-tokens 128 --output result.json
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jaxspec
from jaxspec.batch import RowError, read_rows
from jaxspec.command_line import drafts_option
from jaxspec.provenance import provenance

PROMPTS = (
    "Explain to a child why the sea is salty.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey? Think step by step.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Give me five tips for a first visit to Lisbon, with a sentence about each.",
    "Draft a polite e-mail that asks a colleague to review a report by Friday.",
    "What are the main differences between bacteria and viruses?",
    "Summarise the story of Romeo and Juliet in one paragraph.",
)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="smollm2-135m", help="configuration or checkpoint")
    parser.add_argument("--input", type=Path, help="JSONL prompts; eight of its own by default")
    parser.add_argument("--limit", type=int, default=8, help="prompts to run")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-speculative-tokens", type=drafts_option, help="drafts per step, or auto")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)
    try:
        prompts = read_prompts(args.input)[: args.limit] if args.input else list(PROMPTS[: args.limit])
        drafter = (
            {}
            if args.num_speculative_tokens is None
            else {"num_speculative_tokens": args.num_speculative_tokens}
        )
        engines = {
            "plain": jaxspec.load(args.config, drafter={"kind": "none"}, **_SIZES),
            "speculative": jaxspec.load(args.config, drafter=drafter, **_SIZES),
        }
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = measure(engines, prompts, args.max_new_tokens)
    result |= provenance(shlex.join([Path(sys.argv[0]).name, *(argv or sys.argv[1:])]), Path(__file__).parent)
    print(_table(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


_SIZES: dict[str, Any] = {"batch_size": 1, "sampling_modes": ("greedy",), "prefix_caching": False}


def measure(engines: dict[str, jaxspec.Engine], prompts: list, max_new_tokens: int) -> dict:
    """Times both engines on every prompt, greedy, ignoring end-of-sequence tokens."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    stats = jaxspec.AcceptanceStats()
    tokens, same = 0, 0
    for engine in engines.values():
        engine.generate(prompts[0], max_new_tokens=8)
    for prompt in prompts:
        answers = {}
        for name, engine in engines.items():
            started = time.perf_counter()
            answer = engine.generate(prompt, max_new_tokens=max_new_tokens, ignore_eos=True)
            seconds[name].append(time.perf_counter() - started)
            assert isinstance(answer, jaxspec.Generation)
            answers[name] = answer
        stats.add(answers["speculative"].stats)
        tokens += len(answers["plain"].token_ids)
        same += answers["plain"].token_ids == answers["speculative"].token_ids
    ratios = [plain / fast for plain, fast in zip(seconds["plain"], seconds["speculative"], strict=True)]
    return {
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "num_speculative_tokens": engines["speculative"].num_speculative_tokens,
        "tokens_per_second": {name: tokens / sum(times) for name, times in seconds.items()},
        "speedup_median": statistics.median(ratios),
        "speedup_per_prompt": ratios,
        "identical_answers": same,
        "acceptance_length": stats.acceptance_length,
        "acceptance_per_position": stats.acceptance_per_position,
    }


def read_prompts(path: Path) -> list:
    """The first turn, or the messages, of every row of a JSONL file."""
    prompts: list = []
    for row in read_rows(path):
        if isinstance(row, RowError):
            raise ValueError(str(row))
        prompts.append(row.turns[0] if row.turns else row.prompt)
    return prompts


def _table(result: dict) -> str:
    speeds = result["tokens_per_second"]
    rates = " ".join(f"{rate:.2f}" for rate in result["acceptance_per_position"])
    return "\n".join(
        [
            f"{result['prompts']} prompts x {result['max_new_tokens']} tokens, greedy, batch 1, "
            f"{result['device']}",
            f"  plain decoding   {speeds['plain']:7.1f} tokens/s",
            f"  speculative      {speeds['speculative']:7.1f} tokens/s, "
            f"K = {result['num_speculative_tokens']}",
            f"  speed-up         {result['speedup_median']:7.2f} x (median over prompts)",
            f"  acceptance       {result['acceptance_length']:7.2f} tokens a step; per position {rates}",
            f"  same answers     {result['identical_answers']:4d} of {result['prompts']}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
