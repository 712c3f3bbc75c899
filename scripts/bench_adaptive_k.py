"""Time adaptive K against every fixed K: all of them take turns in one engine, with the same programs.

    python scripts/bench_adaptive_k.py --shape llama3-8b --slots 8 [--acceptance 1,1.5,2,3,4] [--json FILE]
    python scripts/bench_adaptive_k.py --shape smollm2-135m --layers 10 --lookup --slots 1,8
    python scripts/bench_adaptive_k.py CONFIG --slots 1,8
    python scripts/bench_adaptive_k.py CONFIG --slots 256 --samples 8 [--input FILE.jsonl] [--limit 64]

With --shape, weights are random, and drafts are accepted at random with a given mean number of tokens a step.
Two rows follow: in "mixed", half of the requests accept one token a step and half the most, and in "phases"
every answer changes between the two. CONFIG has its own weights and answers prompts, once as they are and
once with the order to repeat a text. With --samples, it draws samples of every prompt by `Engine.sample` at
temperature 1, all of the same length, as reinforcement learning does.

A run answers as many requests at once as there are slots. The table has tokens per second, medians of the
runs, and the rate of "auto" relative to plain decoding (K = 0) and to the best fixed K, medians over pairs of
runs. Before the runs of a row, acceptance is forgotten and one run warms up.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from bench.engines import load_engine
from bench.script import in_turns, new_parser, numbers, run_script
from bench.shapes import SHAPES

from jaxspec import SamplingParams
from jaxspec.commands.bench import PROMPTS, read_prompts
from jaxspec.drafters.kinds.ngram import NGramDrafter
from jaxspec.engine import Engine
from jaxspec.engine.host.scheduler import Choice, Running
from jaxspec.engine.rounds.adaptive_k import AdaptiveK
from jaxspec.sampling import synthetic

_REPEATED = "Repeat this text five times, word for word: "


@dataclass(frozen=True)
class Row:
    """The requests of a run: prompts and the parameters of each; or of all, with the number of samples."""

    name: str
    prompts: list[Any]
    params: list[SamplingParams]
    samples: int | None = None


def main(arguments: list[str] | None = None) -> int:
    return run_script(__file__, _parse, _bench, arguments)


def _bench(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    engine = _load(args)
    engine.wait_prepared()
    adaptive = engine.core.adaptive_k
    assert adaptive is not None
    choices: dict[str, AdaptiveK | int] = {f"K={k}": k for k in sorted(_values_of_k(engine))}
    choices["auto"] = adaptive
    print(f"{args.shape or args.config}, {jax.devices()[0].device_kind}; tokens per second, auto's rate")
    print(f"{'slots':>5} {'row':<12}" + "".join(f"{name:>8}" for name in choices), " / plain  / best")
    rows = []
    for slots in args.slots:
        for row in _rows(args, slots, engine.vocab_size):
            rates = _measure(engine, row, choices, repeats=args.repeats)
            fixed = {name: rates[name] for name in rates if name.startswith("K=")}
            best = max(fixed, key=lambda name: statistics.median(fixed[name]))
            result = {"slots": slots, "row": row.name, "rates": rates, "best": best}
            for name in rates.keys() - fixed.keys():
                to_plain, to_best = (_ratio(rates[name], rates[other]) for other in ("K=0", best))
                result[name] = {"to_plain": to_plain, "to_best": to_best}
            rows.append(result)
            print(_line(result, [name for name in choices if name not in fixed]), flush=True)
    for name in choices.keys() - fixed.keys():
        worst = {of: min(row[name][of] for row in rows) for of in ("to_plain", "to_best")}
        print(f"worst of {name}: {worst['to_plain']:.3f} of plain, {worst['to_best']:.3f} of the best K")
    return {"rows": rows}, 0


def _load(args: argparse.Namespace) -> Engine:
    sizes: dict[str, Any] = {"batch_size": max(args.slots), "max_model_len": 256 + 2 * args.new_tokens}
    sizes |= {"slot_sizes": args.slots, "mixed_prefill_tokens": args.mixed}
    if args.samples is None:
        sizes["prefill_batch_size"] = 4
    modes: dict[str, Any] = {"sampling_modes": ("sampled" if args.samples else "greedy",)}
    if args.shape is None:
        return load_engine(args.config, sizes, {"num_speculative_tokens": "auto"}, **modes)
    # In place of one number for the engine, so that all rows share its programs.
    synthetic._accepts_by_rate = _accepts_by_request
    shape = SHAPES[args.shape]
    if args.layers:
        shape = replace(shape, target={**shape.target, "num_hidden_layers": args.layers})
    drafter = {"drafter": NGramDrafter(args.k)} if args.lookup else {"num_drafts": args.k}
    sizes["synthetic_acceptance_length"] = 1.0
    return load_engine(shape, sizes, drafter, is_adaptive=True, **modes)


_by_rate = synthetic._accepts_by_rate


def _accepts_by_request(rates: Sequence, sampling: Any, positions: jax.Array) -> jax.Array:
    """Whether drafts are accepted, by what greedy decoding does not read: 1 / top_p is the mean number of
    tokens a step, and of every second run of top_k positions, if it is not 0, no draft is accepted."""
    drafts = jnp.arange(len(rates), dtype=jnp.float32)
    wanted = jnp.clip(1 / sampling.top_p[:, None] - 1 - drafts, 0, 1)
    period = sampling.top_k[:, None]
    is_off = (period > 0) & (positions[:, :-1] // jnp.maximum(period, 1) % 2 == 1)
    return _by_rate(jnp.where(is_off, 0, wanted), sampling, positions)  # type: ignore[arg-type]


def _values_of_k(engine: Engine) -> set[int]:
    return {size.drafts for size in engine.programs.compiled if size.width}


def _rows(args: argparse.Namespace, slots: int, vocab_size: int) -> list[Row]:
    if args.samples:
        asked = SamplingParams(max_new_tokens=args.new_tokens, temperature=1.0, ignore_eos=True)
        return [Row("samples", read_prompts(args.input, args.limit), [asked], args.samples)]
    rng = random.Random(slots)
    # Answers end one after another.
    lengths = [round(args.new_tokens * rng.uniform(0.75, 1.25)) for _ in range(slots)]
    if args.shape is None:
        texts = [PROMPTS[i % len(PROMPTS)] for i in range(slots)]
        params = [SamplingParams(max_new_tokens=length, ignore_eos=True) for length in lengths]
        return [Row("prompts", texts, params), Row("repeated", [_REPEATED + text for text in texts], params)]
    # Prompts that repeat themselves, so that lookup finds drafts.
    prompts = [[rng.randrange(vocab_size) for _ in range(8)] * 4 for _ in range(slots)]

    def row(name: str, acceptances: Sequence[float], period: int = 0) -> Row:
        params = [
            SamplingParams(max_new_tokens=length, top_p=1 / acceptances[i % len(acceptances)], top_k=period)
            for i, length in enumerate(lengths)
        ]
        return Row(name, prompts, params)

    most = max(args.acceptance)
    return [
        *(row(f"{acceptance:g}", [acceptance]) for acceptance in args.acceptance),
        *([row("mixed", [1.0, most])] if slots > 1 else []),
        row("phases", [most], max(args.new_tokens // 4, 1)),
    ]


def _measure(
    engine: Engine, row: Row, choices: dict[str, AdaptiveK | int], *, repeats: int
) -> dict[str, list[float]]:
    """Tokens per second of every run, by the choice of K."""
    for choice in choices.values():
        if not isinstance(choice, int):
            choice.choice.forget_acceptance()
            _run(engine, row, choice)
    engine.wait_prepared()  # the first samples ask for programs that report log-probabilities
    rates: dict[str, list[float]] = {name: [] for name in choices}
    for repeat in range(repeats):
        for name in in_turns(list(choices), repeat):
            rates[name].append(_run(engine, row, choices[name]))
    return rates


def _run(engine: Engine, row: Row, choice: AdaptiveK | int) -> float:
    """Tokens per second, with K chosen so."""
    engine.forget_prefixes()
    engine.wait_idle()
    if isinstance(choice, int):
        engine.core.adaptive_k, engine.core.scheduler.choose = None, partial(_always, Choice(choice))
    else:
        engine.core.adaptive_k, engine.core.scheduler.choose = choice, choice.choose
    begin = time.perf_counter()
    if row.samples is None:
        answers = engine.generate(row.prompts, row.params)
    else:
        answers = engine.sample(row.prompts, row.params[0], n=row.samples).generations
    return sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - begin)


def _always(choice: Choice, decoding: Sequence[Running]) -> Choice:
    return choice


def _ratio(rates: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(rate / other for rate, other in zip(rates, others, strict=True))


def _line(row: dict[str, Any], names: Sequence[str]) -> str:
    rates = "".join(f"{statistics.median(rates):8.0f}" for rates in row["rates"].values())
    ratios = "".join(f"{row[name]['to_plain']:9.3f}{row[name]['to_best']:8.3f}" for name in names)
    return f"{row['slots']:>5} {row['row']:<12}{rates} {ratios}  ({row['best']})"


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("config", nargs="?", help="configuration or checkpoint")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--layers", type=int, help="layers of the shape's target")
    parser.add_argument("--lookup", action="store_true", help="prompt lookup in place of the shape's head")
    parser.add_argument("--k", type=int, default=4, help="the largest K of a shape")
    parser.add_argument("--slots", type=numbers(), default=[1, 8], metavar="N,N,...")
    parser.add_argument("--acceptance", type=numbers(float), default=[1, 1.5, 2, 3, 4], metavar="A,A,...")
    parser.add_argument("--samples", type=int, metavar="N", help="samples of every prompt of a configuration")
    parser.add_argument(
        "--input", type=Path, metavar="FILE", help="prompts to sample; by default built-in ones"
    )
    parser.add_argument("--limit", type=int, default=64, help="sample this many of them")
    parser.add_argument("--mixed", type=int, metavar="TOKENS", help="engine.mixed_prefill_tokens")
    parser.add_argument("--new-tokens", type=int, default=256, help="mean length of an answer")
    parser.add_argument("--repeats", type=int, default=5, help="runs of every choice")
    args = parser.parse_args(arguments)
    if (args.config is None) == (args.shape is None):
        parser.error("give either a configuration or --shape")
    if args.shape is None:
        parser.refuse(args, ["layers", "lookup", "k", "acceptance"], "without --shape")
    else:
        parser.refuse(args, ["samples"], "with --shape")
    if args.samples is None:
        parser.refuse(args, ["input", "limit"], "without --samples")
    elif len(args.slots) > 1:
        parser.error("--samples needs one number of --slots")
    return args


if __name__ == "__main__":
    sys.exit(main())
