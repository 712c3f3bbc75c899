"""Tokens per second with and without speculation, compared prompt by prompt.

Both engines answer each prompt in turn, so that a drift in the machine's speed affects both; the ratio is the
median over prompts. Loading and compiling are not counted.

    jaxspec bench smollm2-135m --max-new-tokens 128 --output result.json

With `--peer llamacpp` llama.cpp answers each prompt, too: llama-cpp-python if it is installed, which is built
on the machine, else xllamacpp (extra `bench`). `--first-token 512` times the first token of a prompt of 512
tokens, and `--batch-size 8` also answers prompts eight at a time, with K chosen by the engine unless given.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxspec
from jaxspec.commands.command_line import Parser, drafts_option
from jaxspec.config import SourceConfig, resolve_config

if TYPE_CHECKING:
    from jaxspec import Engine
    from jaxspec.commands.llamacpp import Peer
    from jaxspec.engine.api.prompts import Prompt

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


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = Parser(
        prog="jaxspec bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="smollm2-135m", help="configuration or checkpoint")
    parser.add_argument("--input", type=Path, help="JSONL prompts; default: eight built-in prompts")
    parser.add_argument("--limit", type=int, default=8, help="prompts to run")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-speculative-tokens", type=drafts_option, help="drafts per step, or auto")
    parser.add_argument("--peer", choices=("llamacpp",), help="another program to compare with")
    parser.add_argument(
        "--first-token", type=int, metavar="TOKENS", help="time the first token of a prompt of this length"
    )
    parser.add_argument("--batch-size", type=int, help="also answer so many prompts at once")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    args = parser.parse_args(arguments)
    try:
        if args.output:
            args.output.touch()  # rather fail before measuring than after
        prompts = read_prompts(args.input, args.limit)
        drafter = (
            {}
            if args.num_speculative_tokens is None
            else {"num_speculative_tokens": args.num_speculative_tokens}
        )
        engines = {
            "plain": jaxspec.load(args.config, drafter={"kind": "none"}, **_SIZES),
            "speculative": jaxspec.load(args.config, drafter=drafter, **_SIZES),
        }
        source = resolve_config(args.config).target
        peer = _load_peer(source) if args.peer else None
        sizes = _SIZES | {"batch_size": args.batch_size}
        # The best K depends on the batch size, so the engine chooses it if none is given.
        drafter = {"num_speculative_tokens": "auto"} | drafter
        batch = jaxspec.load(args.config, drafter=drafter, **sizes) if args.batch_size else None
        # An engine that still compiles or times its programs would take a core from the others.
        for engine in (*engines.values(), *([batch] if batch else [])):
            engine.wait_prepared()
        result = measure(engines, prompts, args.max_new_tokens, peer)
        if args.first_token:
            result["first_token_ms"] = time_first_token(engines, args.first_token, peer)
        if batch:
            result["batch_size"] = args.batch_size
            result["batch_speculative_tokens"] = drafter["num_speculative_tokens"]
            result["batch_tokens_per_second"] = measure_batch(batch, prompts, args.max_new_tokens)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from jaxspec.provenance import provenance  # imports JAX

    words = sys.argv[1:] if arguments is None else arguments
    result |= provenance(shlex.join(["jaxspec", "bench", *words]), Path(__file__).parent)
    print(_table(result))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


_SIZES: dict[str, Any] = {"batch_size": 1, "sampling_modes": ("greedy",), "prefix_caching": False}


def measure(
    engines: dict[str, "Engine"], prompts: list, max_new_tokens: int, peer: "Peer | None" = None
) -> dict:
    """Times the engines, and the peer if given, on every prompt: greedy, ignoring end-of-sequence tokens."""
    seconds: dict[str, list[float]] = {name: [] for name in (*engines, *(["llamacpp"] if peer else []))}
    stats = jaxspec.AcceptanceStats()
    tokens, same = 0, 0
    for engine in engines.values():
        warm = engine.generate(prompts[0], max_new_tokens=8)
    if peer:
        peer.generate(warm.prompt_token_ids, 8)
    for prompt in prompts:
        answers = {}
        for name, engine in engines.items():
            started = time.perf_counter()
            answer = engine.generate(prompt, max_new_tokens=max_new_tokens, ignore_eos=True)
            seconds[name].append(time.perf_counter() - started)
            answers[name] = answer
        if peer:
            started = time.perf_counter()
            peer.generate(answers["plain"].prompt_token_ids, max_new_tokens)
            seconds["llamacpp"].append(time.perf_counter() - started)
        stats.add(answers["speculative"].stats)
        tokens += len(answers["plain"].token_ids)
        same += answers["plain"].token_ids == answers["speculative"].token_ids
    ratios = {
        name: [slow / fast for slow, fast in zip(times, seconds["speculative"], strict=True)]
        for name, times in seconds.items()
    }
    compared: dict[str, Any] = {}
    if peer:
        compared = {
            "peer": peer.name,
            "plain_over_peer": _median_ratio(seconds["llamacpp"], seconds["plain"]),
        }
    return compared | {
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "num_speculative_tokens": engines["speculative"].num_speculative_tokens,
        "tokens_per_second": {name: tokens / sum(times) for name, times in seconds.items()},
        "speedup_median": statistics.median(ratios["plain"]),
        "speedup_per_prompt": ratios["plain"],
        "speedup_over_peer": statistics.median(ratios["llamacpp"]) if peer else None,
        "seconds": seconds,
        "identical_answers": same,
        **stats.to_dict(),
    }


def _load_peer(source: SourceConfig) -> "Peer":
    """llama.cpp over the file of a target."""
    from jaxspec.commands.llamacpp import gguf_of, load_peer
    from jaxspec.files import open_checkpoint

    return load_peer(gguf_of(open_checkpoint(source.source, file=source.file, sha256=source.sha256)))


def _median_ratio(slow: list[float], fast: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(slow, fast, strict=True))


def time_first_token(
    engines: dict[str, "Engine"], length: int, peer: "Peer | None", *, repeats: int = 9
) -> dict[str, float]:
    """Milliseconds to the first token of a prompt of `length` tokens: medians, taking turns."""
    prompt = [1000 + i for i in range(length)]
    runs: dict[str, Callable[[], Any]] = {
        name: lambda engine=engine: engine.generate(prompt, max_new_tokens=1)  # type: ignore[misc]
        for name, engine in engines.items()
    }
    if peer:
        runs["llamacpp"] = lambda: peer.generate(prompt, 1)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in times.items()}


def measure_batch(engine: "Engine", prompts: "list[Prompt]", max_new_tokens: int) -> float:
    """Tokens per second of all prompts together: the better of two runs."""
    speeds = []
    for _ in range(2):
        started = time.perf_counter()
        answers = engine.generate(prompts, max_new_tokens=max_new_tokens, ignore_eos=True)
        tokens = sum(len(answer.token_ids) for answer in answers)
        speeds.append(tokens / (time.perf_counter() - started))
    return max(speeds)


def read_prompts(path: Path | None, limit: int) -> list:
    """The prompt, the messages or the first turn of the first `limit` rows of a JSONL file; without a file,
    built-in prompts.

    Raises:
      ValueError: a malformed row or one that asks for more, no row at all, or a limit below 1.
    """
    if limit < 1:
        raise ValueError(f"--limit must be at least 1, got {limit}")
    if path is None:
        return list(PROMPTS[:limit])
    from jaxspec.service.rows import RowError, read_rows  # imports JAX

    prompts: list = []
    for row in read_rows(path):
        if isinstance(row, RowError):
            raise ValueError(str(row))
        prompts.append(row.first_prompt)
    if not prompts:
        raise ValueError(f"{path} holds no rows")
    return prompts[:limit]


def _table(result: dict) -> str:
    speeds = result["tokens_per_second"]
    peer = []
    if "llamacpp" in speeds:
        peer = [
            f"  llama.cpp        {speeds['llamacpp']:7.1f} tokens/s ({result['peer']}); plain decoding "
            f"{result['plain_over_peer']:.2f} x, speculative {result['speedup_over_peer']:.2f} x (medians)"
        ]
    first = ", ".join(f"{name} {ms:.0f} ms" for name, ms in result.get("first_token_ms", {}).items())
    batch = result.get("batch_tokens_per_second")
    rates = " ".join(f"{rate:.2f}" for rate in result["acceptance_per_position"])
    return "\n".join(
        [
            f"{result['prompts']} prompts x {result['max_new_tokens']} tokens, greedy, batch 1, "
            f"{result['device']}",
            f"  plain decoding   {speeds['plain']:7.1f} tokens/s",
            f"  speculative      {speeds['speculative']:7.1f} tokens/s, "
            f"K = {result['num_speculative_tokens']}",
            f"  speed-up         {result['speedup_median']:7.2f} x (median over prompts)",
            *peer,
            *([f"  first token      {first}"] if first else []),
            *(
                [
                    f"  batch {result['batch_size']:<2}         {batch:7.1f} tokens/s, "
                    f"K = {result['batch_speculative_tokens']}"
                ]
                if batch
                else []
            ),
            f"  acceptance       {result['acceptance_length']:7.2f} tokens a step; per position {rates}",
            f"  same answers     {result['identical_answers']:4d} of {result['prompts']}",
        ]
    )
