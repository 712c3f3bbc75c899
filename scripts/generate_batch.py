"""Answer a file of prompts.

    python scripts/generate_batch.py CONFIG --input IN.jsonl --output OUT.jsonl [--summary FILE.json]

CONFIG is a configuration's name, a TOML file, a checkpoint folder, a .gguf file or a Hugging Face Hub id.
Every row of IN.jsonl is {"prompt": ...}, {"messages": [...]} or {"turns": [...]}, perhaps with an "id".
Exit status: 0; 1 where rows failed and the others are done; 2 for bad input; 130 after Ctrl-C.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from jaxspec.batch import BatchRun, OutputError, OutputFile, Row, RowError, Summary, read_rows
from jaxspec.checkpoints import CheckpointError
from jaxspec.command_line import (
    CommandError,
    Parser,
    add_sampling_options,
    add_speculation_options,
    drafter_options,
    report,
    sampling_params,
)
from jaxspec.config import ConfigError
from jaxspec.engine.load import load, resolve_config
from jaxspec.provenance import provenance
from jaxspec.sampling import required_mode


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = _parse(arguments)
    try:
        return _generate(args, shlex.join(["scripts/generate_batch.py", *arguments]))
    except (ConfigError, CheckpointError, CommandError, OutputError) as error:
        return report(error)
    except KeyboardInterrupt:
        print(f"interrupted: {args.output} holds what was finished; --resume goes on", file=sys.stderr)
        return 130


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG", help="what to load")
    parser.add_argument("--input", type=Path, required=True, metavar="IN.jsonl", help="rows to answer")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="OUT.jsonl", help="answers, in the order they end"
    )
    parser.add_argument("--resume", action="store_true", help="skip the ids that OUT.jsonl holds")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N rows only")
    parser.add_argument(
        "--batch-size", type=int, metavar="B", help="rows at once; default: the configuration's"
    )
    parser.add_argument("--summary", type=Path, metavar="FILE.json", help="speed and acceptance, as JSON")
    add_sampling_options(parser, seed=0)
    add_speculation_options(parser)
    return parser.parse_args(arguments)


def _check_files(args: argparse.Namespace) -> None:
    """Refuses files that cannot be used, before anything is written to one of them."""
    if args.limit is not None and args.limit < 1:
        raise CommandError(f"--limit must be at least 1, got {args.limit}")
    files = [path.resolve() for path in (args.input, args.output, args.summary) if path is not None]
    if len(set(files)) < len(files):
        raise CommandError("--input, --output and --summary must be different files")
    try:
        args.input.open("rb").close()
    except OSError as error:
        raise CommandError(f"cannot read {args.input}: {error.strerror}") from None
    try:
        if args.summary is not None:
            args.summary.open("ab").close()
    except OSError as error:
        raise CommandError(f"cannot write {args.summary}: {error.strerror}") from None


def _generate(args: argparse.Namespace, command: str) -> int:
    params = sampling_params(args)
    config = resolve_config(args.config)
    drafter = drafter_options(args, config)
    _check_files(args)
    with closing(OutputFile(args.output, resume=args.resume)) as output:
        plan = _scan(args, output)
        if not plan.rows:
            print(f"nothing to do: {args.output} holds {plan.skipped} rows", file=sys.stderr)
            return 1 if plan.failed else 0
        batch_size = min(config.engine.batch_size, plan.rows) if args.batch_size is None else args.batch_size
        start = time.perf_counter()
        engine = load(
            args.config, drafter=drafter, sampling_modes=(required_mode(params),), batch_size=batch_size
        )
        load_seconds = time.perf_counter() - start
        run = BatchRun(engine, _rows(args, output), params, raw=args.raw)
        summary = _run(run, args, output, plan, load_seconds)
    if args.summary is not None:
        about = {"config": args.config, **summary.as_dict(), **provenance(command, Path(__file__).parent)}
        args.summary.write_text(json.dumps(about, indent=2) + "\n", "utf-8")
    print(summary.table())
    return 1 if summary.rows_failed else 0


@dataclass(frozen=True)
class Plan:
    """How many rows to answer, how many an earlier run answered, and how many are malformed."""

    rows: int
    skipped: int
    failed: int


def _scan(args: argparse.Namespace, output: OutputFile) -> Plan:
    """Reads the whole input once and reports its malformed rows, while nothing has been loaded yet."""
    rows = skipped = failed = 0
    for row in islice(read_rows(args.input), args.limit):
        if isinstance(row, RowError):
            failed += 1
            print(f"error: {args.input} {row}", file=sys.stderr)
        elif row.id in output.finished:
            skipped += 1
        else:
            rows += 1
    if not rows + skipped + failed:
        raise CommandError(f"{args.input} holds no rows")
    return Plan(rows, skipped, failed)


def _rows(args: argparse.Namespace, output: OutputFile) -> Iterator[Row]:
    for row in islice(read_rows(args.input), args.limit):
        if isinstance(row, Row) and row.id not in output.finished:
            yield row


def _run(
    run: BatchRun, args: argparse.Namespace, output: OutputFile, plan: Plan, load_seconds: float
) -> Summary:
    """Answers the rows, writing each as it ends."""
    failed = 0
    start = time.perf_counter()
    with tqdm(
        total=plan.rows + plan.skipped,
        initial=plan.skipped,
        unit="row",
        miniters=0,
        mininterval=0.5,
        smoothing=0,
    ) as bar:
        for done in run:
            for answer in done:
                if isinstance(answer, RowError):
                    failed += 1
                    bar.write(f"error: {args.input} {answer}", file=sys.stderr)
                else:
                    output.append(answer.as_dict())
            speed = run.num_tokens / (time.perf_counter() - start)
            bar.set_postfix_str(
                f"{speed:.1f} tokens/s, acceptance length {run.stats.acceptance_length:.2f}", refresh=False
            )
            bar.update(len(done))
    return Summary(
        rows=plan.rows - failed,
        rows_failed=plan.failed + failed,
        rows_skipped=plan.skipped,
        prompt_tokens=run.num_prompt_tokens,
        tokens=run.num_tokens,
        load_seconds=load_seconds,
        seconds=time.perf_counter() - start,
        stats=run.stats,
    )


if __name__ == "__main__":
    sys.exit(main())
