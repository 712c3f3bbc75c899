"""Answer files of prompts.

    python scripts/generate_batch.py CONFIG --input IN.jsonl --output OUT.jsonl [--summary FILE.json]

CONFIG is a configuration's name, a TOML file, a checkpoint folder, a .gguf file or a Hugging Face Hub id.
Every row of IN.jsonl is {"prompt": ...}, {"messages": [...]} or {"turns": [...]}, perhaps with an "id".
Exit status: 0; 1 where rows failed and the others are done; 2 for bad input, or where something cannot be
written; 130 after Ctrl-C.
"""

import argparse
import dataclasses
import json
import os
import secrets
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxspec.batch import (
    MAX_FAILURES,
    STDIN,
    Answer,
    BatchRun,
    InputError,
    OutputError,
    OutputFile,
    Row,
    RowError,
    Summary,
    Unanswered,
    count_rows,
    read_rows,
    record_path,
    run_settings,
)
from jaxspec.checkpoints import CheckpointError
from jaxspec.command_line import (
    CommandError,
    Parser,
    add_sampling_options,
    add_speculation_options,
    drafter_options,
    report,
    sampling_params,
    write,
)
from jaxspec.config import Config, ConfigError
from jaxspec.engine import EngineError
from jaxspec.engine.load import load, resolve_config
from jaxspec.provenance import provenance
from jaxspec.sampling import SamplingParams, required_mode


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = _parse(arguments)
    try:
        return _generate(args, shlex.join(["scripts/generate_batch.py", *arguments]))
    except (ConfigError, CheckpointError, CommandError, EngineError, InputError, OutputError) as error:
        return report(error)
    except KeyboardInterrupt:
        print(f"interrupted: {args.output} holds what was finished; --resume goes on", file=sys.stderr)
        return 130


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG", help="what to load")
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="IN.jsonl",
        help="rows to answer: files or pipes, read one after the other, or - for stdin",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="OUT.jsonl", help="answers, in the order they end"
    )
    parser.add_argument(
        "--keep-order",
        action="store_true",
        help="answers in the order of the rows; one waits for those before",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        choices=["force"],
        metavar="force",
        help="skip the rows that OUT.jsonl answers; they must have been asked in the same way, unless forced",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="the first N rows only")
    parser.add_argument(
        "--batch-size", type=int, metavar="B", help="rows at once; default: the configuration's"
    )
    parser.add_argument("--summary", type=Path, metavar="FILE.json", help="speed and acceptance, as JSON")
    add_sampling_options(parser)
    add_speculation_options(parser)
    return parser.parse_args(arguments)


def _generate(args: argparse.Namespace, command: str) -> int:
    params = sampling_params(args)
    config = resolve_config(args.config)
    config = config.replace(drafter=drafter_options(args, config))
    _check_files(args)
    rows = read_rows(*args.input)
    force = args.resume == "force"
    with closing(OutputFile(args.output, resume=args.resume is not None)) as output:
        if params.seed is None:
            params = dataclasses.replace(params, seed=output.recorded.get("seed", secrets.randbits(64)))
        settings = run_settings(config, params, raw=args.raw, keep_order=args.keep_order)
        about = {"config": args.config, **provenance(command, Path(__file__).parent)}
        output.begin(settings, about, force=force)
        job = Job(args, config, params, Unanswered(islice(rows, args.limit), output, force=force))
        summary = job.run(output)
    if args.summary is not None:
        _write_json(args.summary, {**summary.to_dict(), **about})
    if _is_stdout(args.output):
        print(summary.table(), file=sys.stderr)
    else:
        write(summary.table() + "\n")
    return 1 if summary.failed else 0


def _check_files(args: argparse.Namespace) -> None:
    """Refuses files that cannot be used, before anything is written to one of them."""
    if args.limit is not None and args.limit < 1:
        raise CommandError(f"--limit must be at least 1, got {args.limit}")
    sources = ["/dev/stdin" if source == STDIN else source for source in args.input]
    written = [args.output, record_path(args.output), *([args.summary] if args.summary else [])]
    files = [Path(path).resolve() for path in (*sources, *written)]
    if len(set(files)) < len(files):
        raise CommandError("--input, --output and --summary must be different files")
    if args.summary is not None:
        _write_json(args.summary, None)


def _is_stdout(path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(sys.stdout.fileno()))
    except (OSError, AttributeError):  # closed, or no file of the system's
        return False


def _write_json(path: Path, values: dict[str, Any] | None) -> None:
    """Writes a file; None only tries whether it can be opened."""
    try:
        with path.open("a" if values is None else "w", encoding="utf-8") as file:
            if values is not None:
                file.write(json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None


class Job:
    """The rows of one command, from the input to the output."""

    def __init__(self, args: argparse.Namespace, config: Config, params: SamplingParams, rows: Unanswered):
        self._args = args
        self._config = config
        self._params = params
        self._rows = rows
        self._answered = 0
        self._failures: list[str] = []

    def run(self, output: OutputFile) -> Summary:
        """Answers the rows, writing each as it ends; loads nothing where there is nothing to answer."""
        args, total = self._args, count_rows(*self._args.input)
        if total is not None and args.limit is not None:
            total = min(total, args.limit)
        batch_size = self._config.engine.batch_size if args.batch_size is None else args.batch_size
        # No more slots than rows, where that can be known without waiting for a pipe.
        fits = args.batch_size is None and total is not None
        rows = iter(self._rows)
        first = self._first_rows(rows, batch_size if fits else 1)
        if not first:
            return self._nothing_to_answer()
        start = time.perf_counter()
        engine = load(
            args.config,
            drafter=drafter_options(args, self._config),
            sampling_modes=(required_mode(self._params),),
            batch_size=len(first) if fits else batch_size,
        )
        loaded = time.perf_counter()
        run = BatchRun(engine, chain(first, rows), self._params, raw=args.raw, keep_order=args.keep_order)
        self._answer(run, output, total)
        return dataclasses.replace(
            self._summary(),
            prompt_tokens=run.num_prompt_tokens,
            tokens=run.num_tokens,
            load_seconds=loaded - start,
            seconds=time.perf_counter() - loaded,
            stats=run.stats,
        )

    def _first_rows(self, rows: Iterator[Row | RowError], count: int) -> list[Row]:
        """The first rows to answer, at most so many; reports what fails before them."""
        first: list[Row] = []
        while len(first) < count and (row := next(rows, None)) is not None:
            if isinstance(row, Row):
                first.append(row)
            else:
                self._fail(row)
        return first

    def _nothing_to_answer(self) -> Summary:
        if not self._rows.num_rows:
            raise CommandError(f"{', '.join(self._args.input)}: no rows")
        if self._rows.num_skipped:
            print(f"nothing to do: {self._args.output} holds what can be answered", file=sys.stderr)
        return self._summary()

    def _answer(self, run: BatchRun, output: OutputFile, total: int | None) -> None:
        start, skipped = time.perf_counter(), self._rows.num_skipped
        with (
            tqdm(
                total=total,
                initial=skipped + len(self._failures),
                unit="row",
                miniters=0,
                mininterval=0.5,
                smoothing=0,
            ) as bar,
            closing(iter(run)) as ended,
        ):
            for answer in ended:
                if isinstance(answer, Answer):
                    output.append(answer.to_dict())
                    self._answered += 1
                else:
                    self._fail(answer, bar)
                speed = run.num_tokens / (time.perf_counter() - start)
                bar.set_postfix_str(
                    f"{speed:.1f} tokens/s, acceptance length {run.stats.acceptance_length:.2f}",
                    refresh=False,
                )
                before, skipped = skipped, self._rows.num_skipped
                bar.update(1 + skipped - before)
            bar.update(self._rows.num_skipped - skipped)

    def _fail(self, error: RowError, bar: tqdm | None = None) -> None:
        if len(self._failures) < MAX_FAILURES:
            self._failures.append(str(error))
        if bar is None:
            print(f"error: {error}", file=sys.stderr)
        else:
            bar.write(f"error: {error}", file=sys.stderr)

    def _summary(self) -> Summary:
        assert self._params.seed is not None
        return Summary(
            rows=self._rows.num_rows,
            answered=self._answered,
            skipped=self._rows.num_skipped,
            failures=tuple(self._failures),
            seed=self._params.seed,
        )


if __name__ == "__main__":
    sys.exit(main())
