"""Time 50 extractions with a JSON schema and without one.

    python scripts/bench_extraction.py smollm2-135m [--batch-size 1 8] [--passes 3] [--device NAME]

Each prompt asks for the facts of a sentence as JSON. Passes with the schema and without take turns. Printed
are the median time of each way, its tokens per second, how many answers are JSON with the names and types of
these facts, and how many tokens a step gives; then the median over passes of how much faster the schema makes
an answer and a token. The exit status is 1 if an answer with the schema that its length has not cut does not
follow it.
"""

import argparse
import json
import sys
import time
from statistics import median
from typing import Any

from bench.script import new_parser, run_script

import jaxspec

_NAMES = ("Anna Schmidt", "John Miller", "Wei Chen", "Maria Rossi", "Omar Haddad")
_JOBS = [
    "carpenter",
    "teacher",
    "programmer",
    "chef",
    "doctor",
    "pilot",
    "florist",
    "judge",
    "baker",
    "nurse",
]
_CITIES = ("Berlin", "Boston", "Shanghai", "Rome", "Cairo", "Lima", "Oslo")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "occupation": {"type": "string"},
        "city": {"type": "string"},
    },
    "required": ["name", "age", "occupation", "city"],
}


def main(arguments: list[str] | None = None) -> int:
    return run_script(__file__, _parse, _bench, arguments)


def _bench(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    rows = [row for batch_size in args.batch_size for row in compare(args, batch_size)]
    return {"rows": rows}, int(any(row["valid"] + row["cut"] < len(prompts()) for row in rows[1::2]))


def compare(args: argparse.Namespace, batch_size: int) -> list[dict[str, Any]]:
    """Measures both ways with an engine of so many slots, prints and returns a row for each."""
    engine = jaxspec.load(args.config, batch_size=batch_size, device=args.device, sampling_modes=("greedy",))
    ways: dict[str, dict[str, Any]] = {"without a schema": {}, "with a schema": {"json_schema": SCHEMA}}
    for asked in ways.values():  # compiles what is missing
        engine.generate(prompts()[:2], max_new_tokens=8, **asked)
    engine.wait_prepared()
    passes: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(args.passes):
        for way, asked in ways.items():
            passes[way].append(measure(engine, asked))
    engine.close()
    rows = [{"batch_size": batch_size, "way": way, **_middle(of_way)} for way, of_way in passes.items()]
    print(f"{len(prompts())} extractions, greedy, batch {batch_size}")
    for row in rows:
        print(
            f"  {row['way']:<17}{row['seconds']:7.2f} s  {row['tokens'] / row['seconds']:7.1f} tokens/s  "
            f"{row['tokens']:5} tokens  {row['valid']:3} valid, {row['cut']} cut  "
            f"{row['acceptance_length']:.2f} tokens a step"
        )
    free, held = rows
    faster = median(a / b for a, b in zip(free["all_seconds"], held["all_seconds"], strict=True))
    by_token = faster * held["tokens"] / free["tokens"]
    print(f"  with the schema an answer is {faster:.2f} x as fast, a token {by_token:.2f} x")
    return rows


def prompts() -> list[str]:
    """The prompts, of which no two are about the same person."""
    people = [(name, job) for name in _NAMES for job in _JOBS]
    return [
        "Extract the name, age, occupation and city as a JSON object with the keys name, age, occupation and "
        f"city. {name}, {23 + 7 * i % 50} years old, works as a {job} in {_CITIES[i % len(_CITIES)]}."
        for i, (name, job) in enumerate(people)
    ]


def measure(engine: jaxspec.Engine, asked: dict[str, Any]) -> dict[str, Any]:
    """Answers all prompts once; returns the seconds, and counts of the answers."""
    engine.forget_prefixes()
    started = time.perf_counter()
    answers = engine.generate(prompts(), max_new_tokens=96, **asked)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "valid": sum(is_valid(answer.text) for answer in answers),
        "cut": sum(answer.finish_reason == "length" for answer in answers),
        "acceptance_length": jaxspec.AcceptanceStats.total(answers).acceptance_length,
    }


def is_valid(text: str) -> bool:
    """Whether an answer is a JSON object with the schema's names, and an integer for the age."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    named = isinstance(value, dict) and value.keys() == SCHEMA["properties"].keys()
    return named and isinstance(value["age"], int)


def _middle(passes: list[dict[str, Any]]) -> dict[str, Any]:
    """The counts of a pass, which are all the same, with the seconds of all and their median."""
    seconds = [each["seconds"] for each in passes]
    return passes[0] | {"seconds": median(seconds), "all_seconds": seconds}


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("config", help="configuration")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1], metavar="N", help="slots")
    parser.add_argument("--passes", type=int, default=3, help="times to answer all prompts in each way")
    parser.add_argument("--device", metavar="NAME", help='as for jaxspec.load, such as "cpu" or "gpu"')
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
