"""Time what training and evaluation ask of an engine: log-probabilities, new weights and scores.

    python scripts/bench_logprobs.py --shape llama3-8b [--k 3] [--batch 1,8,32] [--acceptance 3.0]
        [--texts 16] [--length 2048] [--dtype bfloat16] [--json FILE]

Weights are random. Times are medians of several runs, after one that warms up:

- a step that reports nothing, the log-probability of every token, and the 20 most likely tokens;
- an update of all weights of the target from arrays on the device;
- reading texts as prompts, and scoring them.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench.engines import build_engine
from bench.program import start
from bench.script import median_seconds, new_parser, numbers, run_script
from bench.shapes import SHAPES, build_models

from jaxspec.config import EngineConfig
from jaxspec.sampling import SamplingParams

STEPS_PER_DISPATCH = 8


def main(arguments: list[str] | None = None) -> int:
    return run_script(__file__, _parse, _bench, arguments)


def _bench(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    return {"shape": args.shape, "steps": _steps(args), **_engine(args)}, 0


def _steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a step by batch size and by what it reports."""
    models = build_models(SHAPES[args.shape], num_drafts=args.k, dtype=jnp.dtype(args.dtype))
    rows = []
    print(f"{'batch':>6} {'logprobs':>9} {'ms/step':>9} {'more':>7}")
    for batch_size in args.batch:
        plain = 0.0
        for logprobs in (None, 0, 20):
            dispatches = max(1, round(args.new_tokens / args.acceptance / STEPS_PER_DISPATCH))
            running = start(
                models,
                batch_size=batch_size,
                context=args.context,
                new_tokens=2 * args.new_tokens + 8 * STEPS_PER_DISPATCH,
                max_model_len=args.context + 4 * args.new_tokens + 1024,
                page_size=16,
                steps_per_dispatch=STEPS_PER_DISPATCH,
                acceptance=args.acceptance,
                dtype=jnp.dtype(args.dtype),
                params=SamplingParams(temperature=args.temperature, logprobs=logprobs),
            )

            def run(running: Any = running, dispatches: int = dispatches) -> None:
                running.rewind()
                jax.block_until_ready([running.enqueue().words for _ in range(dispatches)])

            step = median_seconds(run, args.runs) / (dispatches * STEPS_PER_DISPATCH)
            plain = step if logprobs is None else plain
            rows.append({"batch": batch_size, "logprobs": logprobs, "step_ms": step * 1e3})
            print(f"{batch_size:6} {logprobs!s:>9} {step * 1e3:9.3f} {step / plain - 1:7.1%}", flush=True)
            del running
    return rows


def _engine(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of an update, of reading prompts and of scoring them."""
    config = EngineConfig(
        batch_size=args.texts, max_model_len=args.length + 8, dtype=args.dtype, prefix_caching=False
    )
    with build_engine(SHAPES[args.shape], config, num_drafts=args.k) as engine:
        rng = np.random.default_rng(0)
        texts = [rng.integers(engine.vocab_size, size=args.length).tolist() for _ in range(args.texts)]

        def read() -> None:
            engine.generate(texts, max_new_tokens=1)

        found = {}
        ways: dict[str, Callable[[], object]] = {
            "read": read,
            "score": lambda: engine.score(texts),
            "score_top_20": lambda: engine.score(texts, top=20),
        }
        for name, way in ways.items():
            way()
            engine.wait_prepared()
            found[name] = median_seconds(way, args.runs)
            ratio = found[name] / found["read"]
            print(f"{name:>16} {args.texts} x {args.length}: {found[name] * 1e3:9.1f} ms, {ratio:.3f} x")
        weights = jax.tree.map(jnp.copy, engine.weights)
        found["update"] = median_seconds(lambda: _update(engine, weights), args.runs)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        print(f"{'update':>16} {size / 1e9:.2f} GB: {found['update'] * 1e3:.1f} ms")
        return {name + "_ms": seconds * 1e3 for name, seconds in found.items()}


def _update(engine: Any, weights: Any) -> None:
    engine.update_weights(weights)
    jax.block_until_ready(engine.programs.leaves)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--k", type=int, default=3, help="drafts per step")
    parser.add_argument("--batch", type=numbers(), default=[1, 8, 32], metavar="B,B,...", help="slots")
    parser.add_argument("--acceptance", type=float, default=3.0, help="tokens per step")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--context", type=int, default=128, help="tokens of the prompt, for a step")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens of the answer, for a step")
    parser.add_argument("--texts", type=int, default=16, help="texts to read and to score")
    parser.add_argument("--length", type=int, default=2048, help="tokens of each")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--runs", type=int, default=5, help="timed runs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
