"""Time a step with penalties and one without.

    python scripts/bench_penalties.py smollm2-135m [--batch-size 1 8] [--passes 60] [--device NAME]

Short passes without penalties and with them take turns, each of as many greedy answers as there are slots.
The penalties are too small to change a token, so both have the same steps. Printed are the median time of a
step each way, and what penalties add to it: the median over pairs of passes, and between the lower quartiles
of both ways, which other work on the machine changes less. The exit status is 1 if an answer
differs.
"""

import argparse
import sys
import time
from statistics import median, quantiles
from typing import Any

from bench.script import in_turns, new_parser, run_script

import jaxspec

PENALTIES = {"repetition_penalty": 1 + 1e-6, "presence_penalty": 1e-6, "frequency_penalty": 1e-6}
_THINGS = ("gravity", "rain", "bread", "a compass", "the moon", "a bridge", "salt", "a clock")


def main(arguments: list[str] | None = None) -> int:
    return run_script(__file__, _parse, _bench, arguments)


def _bench(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    rows = [compare(args, batch_size) for batch_size in args.batch_size]
    return {"rows": rows}, int(any(row["differ"] for row in rows))


def compare(args: argparse.Namespace, batch_size: int) -> dict[str, Any]:
    """Measures both ways with an engine of so many slots; prints and returns the result."""
    engine = jaxspec.load(args.config, batch_size=batch_size, device=args.device, sampling_modes=("greedy",))
    prompts = [
        f"Explain {_THINGS[i % len(_THINGS)]} to a child of {5 + i // len(_THINGS)}."
        for i in range(batch_size)
    ]
    ways: dict[str, dict[str, Any]] = {"without": {}, "with": PENALTIES}

    def answer(asked: dict[str, Any]) -> tuple[float, list[jaxspec.Generation]]:
        started = time.perf_counter()
        answers = engine.generate(
            prompts,
            max_new_tokens=args.new_tokens,
            ignore_eos=True,
            num_speculative_tokens=args.drafts,
            **asked,
        )
        seconds = time.perf_counter() - started
        return seconds / max(each.stats.steps for each in answers), answers

    for asked in ways.values():  # compiles what is missing, and reads the prompts
        answer(asked)
    engine.wait_prepared()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    differ = 0
    for index in range(args.passes):
        texts = []
        for way in in_turns(list(ways), index):
            step, answers = answer(ways[way])
            seconds[way].append(step)
            texts.append([each.token_ids for each in answers])
        differ += texts[0] != texts[1]
    engine.close()
    plain, penalised = seconds.values()
    more = median(b / a for a, b in zip(plain, penalised, strict=True)) - 1
    least = quantiles(penalised)[0] / quantiles(plain)[0] - 1
    print(
        f"batch {batch_size}: a step takes {median(plain) * 1e3:.2f} ms, with penalties "
        f"{median(penalised) * 1e3:.2f} ms; {more:+.1%}, {least:+.1%} "
        "between lower quartiles" + (f"; answers of {differ} passes differ" if differ else "")
    )
    return {"batch_size": batch_size, "more": more, "least": least, "differ": differ, "step_seconds": seconds}


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("config", help="configuration")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8], metavar="N", help="slots")
    parser.add_argument("--passes", type=int, default=60, help="times to answer in each way")
    parser.add_argument("--drafts", type=int, default=2, metavar="K", help="drafts per step")
    parser.add_argument("--new-tokens", type=int, default=24, metavar="N", help="tokens of each answer")
    parser.add_argument("--device", metavar="NAME", help='as for jaxspec.load, such as "cpu" or "gpu"')
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
