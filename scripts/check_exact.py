"""Compare whole answers bit by bit across drafts, batches, chunks and company.

    python scripts/check_exact.py smollm2-135m --input PROMPTS.jsonl --limit 100 --max-new-tokens 256
    python scripts/check_exact.py --shape llama3-8b --limit 20 --max-new-tokens 128

Every prompt is answered greedily without drafts at batch 1 (CONFIG with its own weights, --shape with random
ones). Every other way to answer must give the same tokens, and the same log-probabilities of each token and
of the 20 most likely ones in its place, to the last bit: other batches, 1, 4 and 7 drafts, prompts from the
prefix cache, few pages (so that requests are put back), other chunks, strangers beside; `Engine.score` must
report the same. Sampled answers with 4 drafts are compared between batches. Engines are loaded with
`engine.exact`; --fast shows how many answers differ without it. The exit status is 1 if any does.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from bench.engines import add_engine_option, load_engine
from bench.shapes import SHAPES

from jaxspec.commands.bench import read_prompts
from jaxspec.commands.command_line import Parser
from jaxspec.drafters.kinds.ngram import NGramDrafter
from jaxspec.engine import Engine, Generation

_TOP = 20
_LONGEST = 1024


@dataclass(frozen=True)
class Way:
    """A way to answer the prompts.

    Attributes:
      drafts: K.
      batch: slots.
      sizes: further fields of `EngineConfig`.
      strangers: other requests between those of the prompts.
      again: whether the prompts were answered before, so that their pages are found.
      temperature: of the answers; those above 0 are compared with each other.
    """

    name: str
    drafts: int = 0
    batch: int = 1
    sizes: dict[str, Any] = field(default_factory=dict)
    strangers: int = 0
    again: bool = False
    temperature: float = 0.0


FIRST = Way("plain, batch 1")
WAYS = (
    Way("plain, batch 64", batch=64),
    *(Way(f"K = {k}, batch {batch}", k, batch) for batch in (1, 8, 64) for k in (1, 4, 7)),
    Way("K = 4, batch 8, again", 4, 8, again=True),
    Way("K = 4, batch 8, few pages", 4, 8, {"num_pages": 160, "prefix_caching": False}),
    Way("K = 4, batch 8, chunks of 16", 4, 8, {"prefill_chunk": 16, "mixed_prefill_tokens": 48}),
    Way("K = 4, batch 48, 32 strangers", 4, 48, strangers=32),
)
SAMPLED = (
    Way("T = 1, K = 4, batch 1", 4, 1, temperature=1.0),
    Way("T = 1, K = 4, batch 64", 4, 64, temperature=1.0),
)


def main(arguments: list[str] | None = None) -> int:
    args = _parse(sys.argv[1:] if arguments is None else arguments)
    load, prompts = _source(args)
    ways = (FIRST, *WAYS, *SAMPLED)
    chosen = [way for way in ways if way is FIRST or any(text in way.name for text in args.only)]
    first: dict[float, list[Generation]] = {}
    failed = False
    for way in chosen:
        begin = time.perf_counter()
        sizes = {"batch_size": way.batch, "slot_sizes": (way.batch,), "max_model_len": _LONGEST, **way.sizes}
        sizes |= {"exact": not args.fast, "sampling_modes": ("sampled" if way.temperature else "greedy",)}
        sizes |= dict(args.engine)
        with load(way.drafts, sizes) as engine:
            answers = _answer(engine, way, prompts, args)
            notes = [f"{sum(answer.cached_tokens for answer in answers)} cached"] if way.again else []
            if way is FIRST:
                notes.append(f"{_num_scored_alike(engine, answers)} of {len(prompts)} scored alike")
                failed |= not notes[-1].startswith(f"{len(prompts)} of")
        reference = first.setdefault(way.temperature, answers)
        tokens = sum(one.token_ids == two.token_ids for one, two in zip(answers, reference, strict=True))
        bits = sum(_bits(one) == _bits(two) for one, two in zip(answers, reference, strict=True))
        failed |= bits < len(prompts)
        steps = sum(len(answer.verified) for answer in answers) or 1
        per_step = sum(len(answer.token_ids) for answer in answers) / steps
        print(
            f"{way.name:32} tokens {tokens:3} of {len(prompts)}  bits {bits:3} of {len(prompts)}  "
            f"{per_step:.2f} a step  {time.perf_counter() - begin:5.0f} s  {', '.join(notes)}",
            flush=True,
        )
    return int(failed)


def _answer(engine: Engine, way: Way, prompts: Sequence[Any], args: argparse.Namespace) -> list[Generation]:
    rng = np.random.default_rng(1)
    strangers = [rng.integers(10, 200, 20 + 9 * i).tolist() for i in range(way.strangers)]
    every = [*prompts]
    for i, stranger in enumerate(strangers):
        every.insert(2 * i, stranger)
    kept = [i for i, prompt in enumerate(every) if not any(prompt is other for other in strangers)]
    asked = {"max_new_tokens": args.max_new_tokens, "logprobs": _TOP, "temperature": way.temperature}
    seeds = {"seed": list(range(len(every)))} if way.temperature else {}
    generate: Any = engine.generate  # too many keywords for its overloads
    for _ in range(1 + way.again):
        answers = generate(every, ignore_eos=bool(args.shape), **asked, **seeds)
    return [answers[i] for i in kept]


def _bits(answer: Generation) -> Any:
    """All that was reported of an answer; floats are equal only if all of their bits are."""
    assert answer.error is None, answer.error
    return answer.token_ids, answer.logprobs, answer.top_logprobs


def _num_scored_alike(engine: Engine, answers: Sequence[Generation]) -> int:
    """How many answers `score` gives the log-probabilities with which they were generated."""
    texts = [answer.prompt_token_ids + answer.token_ids for answer in answers]
    scores = engine.score(texts)
    alike = 0
    for i, answer in enumerate(answers):
        start = len(answer.prompt_token_ids)
        scored = np.asarray(scores.logprobs)[i, start : len(texts[i])]
        alike += bool((scored == np.asarray(answer.logprobs, np.float32)).all())
    return alike


def _source(args: argparse.Namespace) -> tuple[Callable[[int, dict[str, Any]], Engine], list[Any]]:
    def load(drafts: int, sizes: dict[str, Any]) -> Engine:
        modes = {"sampling_modes": sizes.pop("sampling_modes")}
        if args.shape is None:
            drafter = {"num_speculative_tokens": drafts} if drafts else {"kind": "none"}
            return load_engine(args.config, sizes, drafter, **modes)
        # Random networks end in cycles, which n-grams continue. No draft of a random head would be accepted.
        lookup = {"drafter": NGramDrafter(drafts)} if drafts else {}
        return load_engine(SHAPES[args.shape], sizes, lookup, **modes)

    if args.shape is None:
        return load, [prompt for path in args.input or [None] for prompt in read_prompts(path, args.limit)]
    rng = np.random.default_rng(0)
    vocabulary = SHAPES[args.shape].target["vocab_size"]
    return load, [rng.integers(10, vocabulary, 20 + 11 * i).tolist() for i in range(args.limit)]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="smollm2-135m", help="a configuration or a checkpoint")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights instead")
    parser.add_argument("--input", type=Path, nargs="+", metavar="FILE", help="of prompts")
    parser.add_argument("--limit", type=int, default=20, help="prompts, of each file")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="only ways whose name contains one of these"
    )
    parser.add_argument("--fast", action="store_true", help="without `engine.exact`")
    add_engine_option(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
