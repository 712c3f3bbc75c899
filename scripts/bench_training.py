"""The throughput of training an EAGLE-3 head, and on a GPU where the time of an update goes.

    python scripts/bench_training.py configs/training/smollm2-135m-eagle3-more-answers.toml
        [--prompt-tokens 190] [--answer-tokens 168] [--updates 40] [--profile ROWS] [--json FILE]

Trains a new head with the sizes of a configuration on random tokens. Only the lengths of prompts and answers
matter, which are drawn from exponential distributions with the given means. Compilation is not counted.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench.script import new_parser, run_script
from bench.timeline import kernel_table, read_kernels

from jaxspec.config import ConfigError
from jaxspec.files import open_checkpoint
from jaxspec.lab.training.config import TrainingRun, load_training_run
from jaxspec.lab.training.head import head_config, new_head
from jaxspec.lab.training.packing import Conversations, PackedSource, pack, training_batches
from jaxspec.lab.training.sizes import draft_vocabulary_size
from jaxspec.lab.training.trainer import Trainer
from jaxspec.models.target import load_target, target_config

_WARM_UP, _PROFILED = 4, 3


def main(arguments: list[str] | None = None) -> int:
    return run_script(__file__, _parse, _bench, arguments)


def _bench(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    run = load_training_run(args.config)
    for name in ("steps", "batch_size", "row_length"):
        if not getattr(run.train, name):
            raise ConfigError(f"{args.config}: the benchmark needs train.{name}")
    trainer, vocabulary = _trainer(run)
    config = run.train
    conversations = _conversations(args, config.row_length, config.batch_size, vocabulary)
    rows = pack(np.diff(conversations.start), config.row_length, 0)
    batches = training_batches(
        PackedSource(conversations, rows, config.row_length), batch_size=config.batch_size, seed=0
    )
    state, times = trainer.initial_state(), []
    given = [trainer.put(next(batches)) for _ in range(4)]
    filled = float(np.mean([np.asarray(batch.segments) > 0 for batch in given]))
    for update in range(_WARM_UP + args.updates):
        begin = time.perf_counter()
        state, sums = trainer.update(state, given[update % len(given)])
        jax.block_until_ready(sums)
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times[_WARM_UP:])
    tokens = config.batch_size * config.row_length
    print(
        f"{tokens / seconds:,.0f} tokens/s; an update of {config.batch_size} rows of {config.row_length} "
        f"tokens takes {seconds * 1e3:.1f} ms (median of {args.updates}); {filled:.0%} of the rows are filled"
    )
    if args.profile:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for batch in given[:_PROFILED]:
                    state, sums = trainer.update(state, batch)
                jax.block_until_ready(sums)
            print(kernel_table(read_kernels(Path(folder)), args.profile, steps=_PROFILED))
    return {"tokens_per_second": tokens / seconds, "update_ms": seconds * 1e3, "filled": filled}, 0


def _trainer(run: TrainingRun) -> tuple[Trainer, int]:
    source = run.target
    checkpoint = open_checkpoint(source.source, file=source.file, sha256=source.sha256)
    shape = target_config(checkpoint)
    target = load_target(checkpoint, dtype=jnp.dtype(run.engine.dtype_on(jax.default_backend())))
    size = run.vocabulary.size or draft_vocabulary_size(shape)
    head = new_head(
        head_config(run.head, shape, size),
        target,
        np.arange(size, dtype=np.int32),
        num_speculative_tokens=run.train.num_unroll_steps,
        seed=0,
    )
    return Trainer(head, target, run.train), shape.vocab_size


def _conversations(
    args: argparse.Namespace, row_length: int, batch_size: int, vocabulary: int
) -> Conversations:
    rng = np.random.default_rng(0)
    count = 8 * row_length * batch_size // (args.prompt_tokens + args.answer_tokens)
    prompts = np.clip(rng.exponential(args.prompt_tokens, count), 8, 0.8 * row_length).astype(np.int32)
    answers = np.clip(rng.exponential(args.answer_tokens, count), 4, 0.2 * row_length).astype(np.int32)
    start = np.concatenate([[0], np.cumsum(prompts + answers, dtype=np.int64)])
    return Conversations(rng.integers(0, vocabulary, start[-1], dtype=np.int32), start, prompts)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument(
        "config", type=Path, help="a training configuration with the sizes of rows and batches"
    )
    parser.add_argument("--prompt-tokens", type=int, default=190, help="mean length of a prompt")
    parser.add_argument("--answer-tokens", type=int, default=168, help="mean length of an answer")
    parser.add_argument("--updates", type=int, default=40, help="updates to time")
    parser.add_argument("--profile", type=int, default=0, metavar="ROWS", help="kernels to print, on a GPU")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
