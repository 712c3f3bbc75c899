"""Answers the rows of a command line, with one engine or several."""

import argparse
import dataclasses
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxspec.commands.command_line import (
    CommandError,
    model_defaults,
    prompt_options,
    report,
    sampling_params,
    write,
)
from jaxspec.config import Config, list_configs
from jaxspec.engine import EngineError
from jaxspec.engine.api.load import load
from jaxspec.jax_settings import choose_devices
from jaxspec.provenance import device, provenance
from jaxspec.sampling import SamplingMode, SamplingParams, required_mode
from jaxspec.service.batch import (
    MAX_FAILURES,
    STDIN,
    Answer,
    BatchRun,
    Engines,
    HostDevices,
    InputError,
    Output,
    OutputError,
    OutputFile,
    ProcessReplica,
    ReplicaError,
    ReplicaRun,
    Row,
    RowError,
    Summary,
    Unanswered,
    count_rows,
    read_rows,
    record_path,
    run_settings,
)
from jaxspec.service.batch.replica import Replica, Work
from jaxspec.service.openai import DEFAULTS
from jaxspec.service.rows import Form, input_files, is_parquet, may_sample, parquet_columns

_OTHER_FORMATS = (".arrow", ".bz2", ".csv", ".feather", ".gz", ".tsv", ".xz", ".zip", ".zst")


def answer_rows(args: argparse.Namespace, config: Config, changes: dict[str, Any], command: str) -> int:
    """Answers the rows of a command line; returns the exit status.

    Args:
      args: the options of `jaxspec batch`.
      config: the configuration with their changes.
      changes: these, as keywords of `load`.
      command: the command line, for the record and the summary.
    """
    try:
        return _answer_rows(args, config, changes, command)
    except (EngineError, InputError, OutputError, ReplicaError) as error:
        return report(error)


def _answer_rows(args: argparse.Namespace, config: Config, changes: dict[str, Any], command: str) -> int:
    args.input = input_files(*args.input)
    args.output = Path(args.output)
    _check_files(args)
    rows_sample = may_sample(*args.input)
    params = sampling_params(args, args.config, may_sample=rows_sample)
    engines = _engines(args, config)
    rows = read_rows(*args.input, form=_form(args))
    force = args.resume == "force"
    with closing(_open_output(args)) as output:
        if params.seed is None:
            params = dataclasses.replace(params, seed=output.recorded.get("seed", secrets.randbits(64)))
        settings = run_settings(
            config,
            params,
            raw=args.raw,
            keep_order=args.keep_order,
            backend=engines.backend,
            imports=args.imports,
        )
        about = {
            "config": args.config,
            **provenance(command, Path(__file__).parent, devices=engines.description),
        }
        output.begin(settings, about, force=force)
        unanswered = Unanswered(islice(rows, args.limit), output, force=force)
        job = Job(args, config, changes, params, _modes(params, rows_sample), unanswered, engines.start)
        summary = job.run(output)
    return _conclude(args, summary, about)


def _engines(args: argparse.Namespace, config: Config) -> Engines:
    """Where the engines are: here, in other processes of this machine, or on a Ray cluster."""
    devices_each = config.engine.tensor_parallel
    if args.ray is None and args.replicas in (None, 1):
        own = choose_devices(args.device, devices_each)
        return Engines(own[0].platform, device(own))
    if args.device is not None:
        option = "--replicas" if args.ray is None else "--ray"
        raise CommandError(
            f"--device: {option} gives every engine devices of its own; CUDA_VISIBLE_DEVICES and "
            "JAX_PLATFORMS choose among all"
        )
    if args.ray is None:
        devices = HostDevices.find()
        shares = devices.share(args.replicas, devices_each)
        return Engines(
            devices.backend, devices.description, [partial(ProcessReplica, share) for share in shares]
        )
    try:
        from jaxspec.service.batch import ray
    except ModuleNotFoundError as error:
        raise CommandError(f"--ray: {error}") from None
    ray.connect(args.ray or None)
    return ray.share_cluster(args.replicas, devices_each)


def _open_output(args: argparse.Namespace) -> Output:
    parquet = [path for path in args.input if is_parquet(path)]
    if parquet and (args.keep_columns is not None or is_parquet(args.output)):
        columns = parquet_columns(parquet, _form(args), is_json=not is_parquet(args.output))
    if not is_parquet(args.output):
        return OutputFile(args.output, resume=args.resume is not None)
    from jaxspec.service.batch.parquet import ParquetFile  # needs pyarrow, with which the input was read

    return ParquetFile(args.output, columns)


def _form(args: argparse.Namespace) -> Form:
    """How rows are read."""
    kept = args.keep_columns
    kept = () if kept is None else kept or True
    asked = {name: getattr(args, name) for name in ("n", "continue_final_message")}
    defaults = prompt_options(args) | {name: value for name, value in asked.items() if value}
    told = args.temperature is not None or (
        args.sampling_defaults and "temperature" in model_defaults(args.config)
    )
    hosted = {} if told else DEFAULTS
    return Form(prompt_key=args.prompt_key, kept=kept, defaults=defaults, openai=True, hosted=hosted)


def _absolute(name: str) -> str:
    """A path as processes in other folders may read it; the name of a configuration or on the Hub is none."""
    path = Path(name).expanduser()
    return name if name in list_configs() or not path.exists() else str(path.resolve())


def _conclude(args: argparse.Namespace, summary: Summary, about: dict[str, Any]) -> int:
    """Writes the summary; returns the exit status."""
    if args.summary is not None:
        _write_json(args.summary, {**summary.to_dict(), **about})
    if _is_stdout(args.output):
        print(summary.table(), file=sys.stderr)
    else:
        write(summary.table() + "\n")
    return 1 if summary.failed else 0


def _modes(params: SamplingParams, rows_sample: bool) -> tuple[str | SamplingMode, ...]:
    """The programs to compile: the one that serves `params`, or all if rows may set how they are sampled."""
    return ("greedy", "sampled") if rows_sample else (required_mode(params),)


def _check_files(args: argparse.Namespace) -> None:
    """Checks the files, before anything is written."""
    for option, paths in (("--input", args.input), ("--output", [args.output])):
        for path in map(Path, paths):
            if path.suffix.lower() in _OTHER_FORMATS:
                raise CommandError(f"{option} {path}: rows are JSON lines or Parquet")
    if is_parquet(args.output) and args.resume is not None:
        raise CommandError(f"--resume: {args.output} is finished as a whole; only JSON lines are continued")
    if is_parquet(args.output) and not all(map(is_parquet, args.input)):
        raise CommandError(f"--output {args.output}: needs Parquet as input, whose columns it has")
    sources = ["/dev/stdin" if source == STDIN else source for source in args.input]
    written = [args.output, record_path(args.output), *([args.summary] if args.summary else [])]
    files = [Path(path).resolve() for path in (*sources, *written)]
    # A terminal may be read and written.
    files = [path for path in files if not path.is_char_device()]
    if len(set(files)) < len(files):
        raise CommandError("--input, --output and --summary must be different files")
    if args.summary is not None:
        _write_json(args.summary, None)


def _is_stdout(path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(sys.stdout.fileno()))
    except (OSError, AttributeError):  # closed, or replaced by an object without a descriptor
        return False


def _write_json(path: Path, values: dict[str, Any] | None) -> None:
    """Writes a file; with None, only checks that it can be opened."""
    try:
        with path.open("a" if values is None else "w", encoding="utf-8") as file:
            if values is not None:
                file.write(json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None


@dataclass
class Job:
    """Answers the rows of one command, from input to output."""

    args: argparse.Namespace
    config: Config
    changes: dict[str, Any]
    params: SamplingParams
    modes: tuple[str | SamplingMode, ...]
    rows: Unanswered
    starts: list[Callable[[Work], Replica]]
    answered: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)

    def run(self, output: Output) -> Summary:
        """Answers the rows, writing each when it is finished; loads no engine if there are none to answer."""
        args, total = self.args, count_rows(*self.args.input)
        if total is not None and args.limit is not None:
            total = min(total, args.limit)
        batch_size = self.config.engine.batch_size
        # No more slots or engines than rows, if their number is known without waiting for a pipe. Each engine
        # has as many slots as a single one would have, because with int8 activations answers depend on the
        # number.
        fits = args.batch_size is None and total is not None
        rows = iter(self.rows)
        first = self._first_rows(rows, max(batch_size, len(self.starts)) if fits else 1, output)
        if not first:
            return self._nothing_to_answer()
        if fits:
            batch_size = min(batch_size, len(first))
            del self.starts[len(first) :]
        start = time.perf_counter()
        with ExitStack() as stack:
            run = self._load(chain(first, rows), batch_size, stack)
            loaded = time.perf_counter()
            self._answer(run, output, total)
            ended = time.perf_counter()
        return dataclasses.replace(
            self._summary(),
            prompt_tokens=run.num_prompt_tokens,
            tokens=run.num_tokens,
            load_seconds=loaded - start,
            seconds=ended - loaded,
            stats=run.stats,
        )

    def _load(
        self, rows: Iterator[Row | RowError], batch_size: int, stack: ExitStack
    ) -> BatchRun | ReplicaRun:
        """Loads one engine, or several, which `stack` closes."""
        args = self.args
        load_engine = partial(
            load,
            _absolute(args.config) if self.starts else args.config,
            device=args.device,
            sampling_modes=self.modes,
            **{**self.changes, "batch_size": batch_size},
        )
        if not self.starts:
            return BatchRun(load_engine(), rows, self.params, raw=args.raw, keep_order=args.keep_order)
        run = ReplicaRun(
            partial(load_engine, progress=False),
            self.starts,
            rows,
            self.params,
            imports=[*map(_absolute, args.imports)],
            raw=args.raw,
            keep_order=args.keep_order,
            note=lambda text: tqdm.write(f"note: {text}", file=sys.stderr),
        )
        stack.enter_context(closing(run))
        with tqdm(total=len(self.starts), desc="loading", unit="replica", leave=False) as bar:
            run.start(bar.update)
        return run

    def _first_rows(self, rows: Iterator[Row | RowError], count: int, output: Output) -> list[Row]:
        """The first rows to answer, at most `count`; reports failed rows before them."""
        first: list[Row] = []
        while len(first) < count and (row := next(rows, None)) is not None:
            if isinstance(row, Row):
                first.append(row)
            else:
                self._fail(row, output)
        return first

    def _nothing_to_answer(self) -> Summary:
        if not self.rows.num_rows:
            raise CommandError(f"{', '.join(self.args.input)}: no rows")
        if self.rows.num_skipped:
            print(f"nothing to do: {self.args.output} holds what can be answered", file=sys.stderr)
        return self._summary()

    def _answer(self, run: BatchRun | ReplicaRun, output: Output, total: int | None) -> None:
        start, skipped = time.perf_counter(), self.rows.num_skipped
        with (
            tqdm(
                total=total,
                initial=skipped + self.failed,
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
                    self.answered += 1
                else:
                    self._fail(answer, output, bar)
                speed = run.num_tokens / (time.perf_counter() - start)
                bar.set_postfix_str(
                    f"{speed:.1f} tokens/s, acceptance length {run.stats.acceptance_length:.2f}",
                    refresh=False,
                )
                before, skipped = skipped, self.rows.num_skipped
                bar.update(1 + skipped - before)
            bar.update(self.rows.num_skipped - skipped)

    def _fail(self, error: RowError, output: Output, bar: tqdm | None = None) -> None:
        self.failed += 1
        if error.record is not None:
            output.append(error.record)
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(str(error))
        if bar is None:
            print(f"error: {error}", file=sys.stderr)
        else:
            bar.write(f"error: {error}", file=sys.stderr)

    def _summary(self) -> Summary:
        assert self.params.seed is not None
        return Summary(
            rows=self.rows.num_rows,
            answered=self.answered,
            skipped=self.rows.num_skipped,
            failures=tuple(self.failures),
            seed=self.params.seed,
        )
