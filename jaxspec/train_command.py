"""Train an EAGLE-3 head: prompts, responses, draft vocabulary, training, evaluation, export.

    jaxspec-train --target NAME --prompts FILE.jsonl --output DIR                  a new head
    jaxspec-train --target NAME --adapt HEAD --prompts FILE.jsonl --output DIR     one that goes on from HEAD
    jaxspec-train CONFIG.toml --output DIR [--data DIR]                            what the file says

NAME is a configuration, a checkpoint folder, a .gguf file or a Hugging Face Hub id. A row of FILE has
"prompt", perhaps with "response", or "messages"; prompts without an answer are answered by the target. HEAD
is a folder, a Hub id, or the name of a configuration that drafts by an EAGLE-3 head, whose target is then the
default. Sizes that are not given follow from the target, the data and the device's memory. Options win over
CONFIG. Exit status: 0; 2 for bad input; 130 after Ctrl-C, after which --resume goes on.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import jax

from jaxspec.checkpoints import CheckpointError
from jaxspec.command_line import CommandError, Parser, report
from jaxspec.config import ConfigError, EngineConfig, list_configs, load_config
from jaxspec.config.sections import replace_section
from jaxspec.engine.load import resolve_config
from jaxspec.training.config import (
    HeadConfig,
    PromptsConfig,
    TrainConfig,
    TrainingRun,
    load_training_run,
)
from jaxspec.training.stage_folder import STAGES, holds_a_run

_OPTIONS: dict[str, tuple[str, type, str]] = {
    "--held-out-share": ("prompts.held_out_share", float, "of the prompts, to measure on; default: 0.05"),
    "--max-prompt-tokens": ("prompts.max_tokens", int, "longer prompts are left out; default: 2048"),
    "--max-new-tokens": ("responses.max_new_tokens", int, "of an answer; default: 256"),
    "--vocabulary": ("vocabulary.size", int, "tokens that the head can draft"),
    "--steps": ("train.steps", int, "updates"),
    "--epochs": ("train.epochs", float, "how often every row is seen, without --steps; default: 4"),
    "--row-length": ("train.row_length", int, "tokens in a row"),
    "--batch-tokens": ("train.batch_tokens", int, "tokens in an update, at most; default: 16384"),
    "--learning-rate": ("train.learning_rate", float, "default: 5e-3, with --adapt 2e-3"),
    "--num-speculative-tokens": ("evaluate.num_speculative_tokens", int, "K in the evaluation; default: 4"),
    "--slots": ("engine.batch_size", int, "answers that are written at once; default: 8 on a CPU, else 128"),
    "--target-name": ("export.target_name", str, "what speculators and vLLM find the target by"),
    "--license": ("export.license", str, "of the head, for its card"),
}


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        prog="jaxspec-train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", type=Path, help="a training TOML (see configs/training/)")
    parser.add_argument(
        "--output", type=Path, required=True, help="a new folder, or with --resume this run's"
    )
    parser.add_argument("--target", metavar="NAME", help="the model that the head drafts for")
    parser.add_argument("--adapt", metavar="HEAD", help="the head to go on from")
    parser.add_argument("--prompts", nargs="+", type=Path, metavar="FILE", help="JSONL files of prompts")
    parser.add_argument(
        "--held-out",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="JSONL files of benchmark prompts, to which no prompt of the training may be alike",
    )
    parser.add_argument(
        "--data-license", nargs="+", metavar="TEXT", help="for the card: a source of the prompts, its licence"
    )
    for option, (_, kind, text) in _OPTIONS.items():
        parser.add_argument(option, type=kind, metavar=kind.__name__.upper(), help=text)
    parser.add_argument("--resume", action="store_true", help="go on with the run that --output holds")
    parser.add_argument("--data", type=Path, help="where CONFIG's prompt files are; default: beside CONFIG")
    parser.add_argument("--stage", action="append", choices=STAGES, help="run this one only; may be repeated")
    args = parser.parse_args(arguments)
    try:
        return _train(args, sys.argv[1:] if arguments is None else arguments)
    except (ConfigError, CheckpointError, CommandError) as error:
        return report(error)
    except KeyboardInterrupt:
        print("interrupted; the same command with --resume goes on", file=sys.stderr)
        return 130


def _train(args: argparse.Namespace, arguments: list[str]) -> int:
    run = with_options(_run(args), args)
    if not run.export.command:
        # How often it was resumed does not make it another run.
        command = ["jaxspec-train", *(word for word in arguments if word != "--resume")]
        run = dataclasses.replace(run, export=dataclasses.replace(run.export, command=shlex.join(command)))
    if holds_a_run(args.output) and not args.resume and not args.stage:
        raise CommandError(f"{args.output}: holds a run already; --resume goes on with it")
    try:
        from jaxspec.training.pipeline import Pipeline
    except ModuleNotFoundError as error:
        raise CommandError(f"training needs {error.name}: pip install 'jaxspec[train]'") from None
    data = args.data or (args.config.parent if args.config else Path())
    pipeline = Pipeline(run, args.output, data=data)
    for stage in STAGES:
        if not args.stage or stage in args.stage:
            results = pipeline.run_stage(stage)
            print(f"{stage}: {json.dumps(results)}", flush=True)
            if stage == "evaluate":
                for line in before_and_after(results["acceptance_length"], bool(run.head.initial)):
                    print(line, flush=True)
    return 0


def before_and_after(lengths: dict[str, float], adapted: bool) -> list[str]:
    """One line for every acceptance length that has one before it."""
    before = "before" if adapted else "prompt lookup"
    lines = []
    for name, length in lengths.items():
        old = lengths.get(f"before, {name}")
        if old is not None:
            lines.append(
                f"acceptance length, {name}: {before} {old:.2f}, after {length:.2f} ({length / old - 1:+.1%})"
            )
    return lines


def _run(args: argparse.Namespace) -> TrainingRun:
    """The run of CONFIG, or one for the target with nothing but the prompts given."""
    target = None if args.target is None else resolve_config(args.target).target
    initial = args.adapt
    if initial is not None and (initial in list_configs() or initial.endswith(".toml")):
        pair = load_config(initial)
        if pair.drafter.kind != "eagle3":
            raise CommandError(f"--adapt {initial}: drafts by {pair.drafter.kind}, not by an EAGLE-3 head")
        initial, target = pair.drafter.source, target or pair.target
    if args.config is not None:
        run = load_training_run(args.config)
        head = run.head if initial is None else dataclasses.replace(run.head, initial=initial)
        return dataclasses.replace(run, head=head, target=target if args.target and target else run.target)
    if target is None:
        raise CommandError("--target: name the model that the head is for, or give a training TOML")
    if not args.prompts:
        raise CommandError("--prompts: name at least one JSONL file, or give a training TOML")
    if initial:
        head = HeadConfig(initial=initial)
        recipe: dict[str, Any] = {
            "learning_rate": 2e-3,
            "warmup_steps": 50,
            "objective": "total_variation",
            "num_unroll_steps": 4,
        }
    else:
        head = HeadConfig(norm_before_residual=True, fc_norm=True)
        recipe = {"learning_rate": 5e-3, "warmup_steps": 200, "num_unroll_steps": 5}
    on_cpu = jax.default_backend() == "cpu"
    return TrainingRun(
        target=target,
        prompts=PromptsConfig(held_out_share=0.05),
        head=head,
        train=TrainConfig(optimizer="muon", clip_norm=1.0, **recipe),
        engine=EngineConfig(batch_size=8 if on_cpu else 128),
    )


def with_options(run: TrainingRun, args: argparse.Namespace) -> TrainingRun:
    """The run as the command line's options change it."""
    changes: dict[str, dict[str, Any]] = {}

    def change(key: str, value: Any) -> None:
        section, _, name = key.partition(".")
        changes.setdefault(section, {})[name] = value

    for key, paths in (("prompts.files", args.prompts), ("prompts.held_out", args.held_out)):
        if paths:
            change(key, tuple(str(path.absolute()) for path in paths))
    if args.max_new_tokens is not None:
        change("evaluate.max_new_tokens", args.max_new_tokens)
    if args.steps:
        change("train.warmup_steps", min(run.train.warmup_steps, args.steps // 5))
    if args.data_license:
        change("export.data", tuple(args.data_license))
    for option, (key, _, _) in _OPTIONS.items():
        value = getattr(args, option[2:].replace("-", "_"))
        if value is not None:
            change(key, value)
    sections = {name: replace_section(getattr(run, name), name, values) for name, values in changes.items()}
    return dataclasses.replace(run, **sections)
