"""Train an EAGLE-3 head: prompts, responses, draft vocabulary, training, evaluation, export.

    jaxspec train --target NAME --prompts FILE.jsonl --output DIR                  a new head
    jaxspec train --target NAME --adapt HEAD --prompts FILE.jsonl --output DIR     adapt an existing head
    jaxspec train CONFIG.toml --output DIR [--data DIR]                            a run described by a file

NAME is a configuration, a checkpoint folder, a .gguf file or a Hugging Face Hub id. A row of FILE has
"prompt" and optionally "response", or "messages"; the target answers prompts without an answer. HEAD is a
folder, a Hub id, or the name of a configuration with an EAGLE-3 head, whose target is then the default. Sizes
that are not given are derived from the target, the data and the device's memory. Options take precedence over
CONFIG. Exit status: 0; 2 for bad input; 130 after Ctrl-C, after which --resume continues the run.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from jaxspec.commands.command_line import CommandError, Parser, add_device_option, report
from jaxspec.config import EngineConfig, check_source, list_configs, load_config, resolve_config
from jaxspec.config.sections import replace_section
from jaxspec.errors import OneLineError
from jaxspec.lab.training.config import HeadConfig, PromptsConfig, TrainConfig, TrainingRun, load_training_run
from jaxspec.lab.training.stage_folder import STAGES, holds_a_run

_OPTIONS: dict[str, tuple[str, type, str]] = {
    "--held-out-share": ("prompts.held_out_share", float, "share of prompts to measure on; default: 0.05"),
    "--max-prompt-tokens": ("prompts.max_tokens", int, "longer prompts are left out; default: 2048"),
    "--max-new-tokens": ("responses.max_new_tokens", int, "the most tokens of an answer; default: 256"),
    "--vocabulary": ("vocabulary.size", int, "tokens that the head can draft"),
    "--steps": ("train.steps", int, "number of updates"),
    "--epochs": (
        "train.epochs",
        float,
        "how often every row is used, without --steps; default: 4, to adapt on a CPU 1",
    ),
    "--row-length": ("train.row_length", int, "tokens per row"),
    "--batch-tokens": (
        "train.batch_tokens",
        int,
        "the most tokens of an update; default: 16384, on a CPU 2048",
    ),
    "--learning-rate": ("train.learning_rate", float, "default: 5e-3, with --adapt 2e-3"),
    "--average-initial": (
        "average.initial",
        float,
        "weight of HEAD's own parameters in the adapted head, which keeps what HEAD drafts well; default: 0",
    ),
    "--num-speculative-tokens": ("evaluate.num_speculative_tokens", int, "K in the evaluation; default: 4"),
    "--slots": ("engine.batch_size", int, "answers generated at once; default: 8 on a CPU, else 128"),
    "--target-name": ("export.target_name", str, "the name by which speculators and vLLM find the target"),
    "--license": ("export.license", str, "the head's licence, for its card"),
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.config is None:
        parser.refuse(args, ["data"], "without CONFIG, whose files it is about")
    if args.steps is not None:
        parser.refuse(args, ["epochs"], "with --steps")
    try:
        return _train(args, sys.argv[1:] if arguments is None else arguments)
    except (OneLineError, OSError) as error:
        return report(error)
    except KeyboardInterrupt:
        print("interrupted; the same command with --resume continues", file=sys.stderr)
        return 130


def _parser() -> Parser:
    parser = Parser(
        prog="jaxspec train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", type=Path, help="a training TOML (see configs/training/)")
    parser.add_argument(
        "--output", type=Path, required=True, help="a new folder, or with --resume that of the run"
    )
    parser.add_argument("--target", metavar="NAME", help="the model that the head drafts for")
    parser.add_argument("--adapt", metavar="HEAD", help="the head to adapt")
    parser.add_argument("--prompts", nargs="+", type=Path, metavar="FILE", help="JSONL files of prompts")
    parser.add_argument(
        "--held-out",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="JSONL files of benchmark prompts; similar prompts are left out of the training",
    )
    parser.add_argument(
        "--data-license", nargs="+", metavar="TEXT", help="sources of prompts, with licences, for the card"
    )
    for option, (_, kind, text) in _OPTIONS.items():
        parser.add_argument(option, type=kind, metavar=kind.__name__.upper(), help=text)
    add_device_option(parser)
    parser.add_argument("--resume", action="store_true", help="continue the run in --output")
    parser.add_argument("--data", type=Path, help="folder of CONFIG's prompt files; default: that of CONFIG")
    parser.add_argument(
        "--stage", action="append", choices=STAGES, help="run this stage only; may be repeated"
    )
    return parser


def _train(args: argparse.Namespace, arguments: list[str]) -> int:
    run = with_options(_run(args), args)
    if not run.export.command:
        # A resumed run is the same run.
        command = ["jaxspec", "train", *(word for word in arguments if word != "--resume")]
        run = dataclasses.replace(run, export=dataclasses.replace(run.export, command=shlex.join(command)))
    if holds_a_run(args.output) and not args.resume and not args.stage:
        raise CommandError(f"{args.output}: already holds a run; --resume continues it")
    try:
        from jaxspec.lab.training.pipeline import Pipeline
    except ModuleNotFoundError as error:
        raise CommandError(error) from None
    data = args.data or (args.config.parent if args.config else Path())
    pipeline = Pipeline(run, args.output, data=data, device=args.device)
    if args.resume:
        for line in pipeline.begin_anew():
            print(line, flush=True)
    for stage in STAGES:
        if not args.stage or stage in args.stage:
            results = pipeline.run_stage(stage)
            print(f"{stage}: {json.dumps(results)}", flush=True)
            if stage == "evaluate":
                for line in before_and_after(results.get("compared", {}), bool(run.head.initial)):
                    print(line, flush=True)
            if stage == "export":
                print(f"try it: {command_to_try(args, run)}", flush=True)
    return 0


def before_and_after(compared: dict[str, dict[str, Any]], adapted: bool) -> list[str]:
    """A line for each of `evaluate.comparison`'s results, by name: lengths with intervals, and the gain."""
    from jaxspec.lab.training.evaluate import with_interval  # imports JAX

    label = "before" if adapted else "prompt lookup"
    lines = []
    for name, values in compared.items():
        gain, interval = values["gain"], values["gain_interval"]
        if interval is None:
            verdict = f"{gain:+.2f}, of too few prompts to say more"
        elif interval[0] <= 0 <= interval[1]:
            verdict = f"{gain:+.2f}, which may be chance ({interval[0]:+.2f} to {interval[1]:+.2f})"
        else:
            verdict = f"{gain:+.2f} ({interval[0]:+.2f} to {interval[1]:+.2f})"
        before = with_interval(values["before"], values["before_interval"])
        after = with_interval(values["after"], values["after_interval"])
        lines.append(
            f"acceptance length, {name}: {label} {before}, after {after}; {verdict}; "
            f"{values['prompts']} prompts, 95 % intervals"
        )
    return lines


def command_to_try(args: argparse.Namespace, run: TrainingRun) -> str:
    """The command line that drafts with the exported head."""
    named = [name for name in list_configs() if load_config(name).target == run.target]
    local = str(Path(run.target.source) / run.target.file) if run.target.file else run.target.source
    model = args.target or next(iter(named), local)
    head = args.output / "export" / "shared"
    return shlex.join(["jaxspec", "Why is the sky blue?", "--model", model, "--drafter", str(head)])


def _run(args: argparse.Namespace) -> TrainingRun:
    """The run of CONFIG, or a default one for --target or --adapt."""
    target = None if args.target is None else resolve_config(args.target).target
    initial = args.adapt
    if initial is not None and (initial in list_configs() or initial.endswith(".toml")):
        pair = load_config(initial)
        if pair.drafter.kind != "eagle3":
            raise CommandError(f"--adapt {initial}: drafts by {pair.drafter.kind}, not by an EAGLE-3 head")
        initial, target = pair.drafter.source, target or pair.target
    elif initial is not None:
        check_source(initial)
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
    from jaxspec.jax_settings import training_devices  # imports JAX

    on_cpu = training_devices(args.device)[0].platform == "cpu"
    if on_cpu:
        recipe |= {"batch_tokens": 2048, **({"epochs": 1.0} if initial else {})}
    return TrainingRun(
        target=target,
        prompts=PromptsConfig(held_out_share=0.05),
        head=head,
        train=TrainConfig(optimizer="muon", clip_norm=1.0, **recipe),
        engine=EngineConfig(batch_size=8 if on_cpu else 128),
    )


def with_options(run: TrainingRun, args: argparse.Namespace) -> TrainingRun:
    """The run with the changes of the command line's options."""
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
    # Options take precedence over CONFIG, also where its keys go before theirs.
    if args.epochs is not None:
        change("train.steps", 0)
    if args.batch_tokens is not None:
        change("train.batch_size", 0)
    if args.data_license:
        change("export.data", tuple(args.data_license))
    for option, (key, _, _) in _OPTIONS.items():
        value = getattr(args, option[2:].replace("-", "_"))
        if value is not None:
            change(key, value)
    sections = {name: replace_section(getattr(run, name), name, values) for name, values in changes.items()}
    return dataclasses.replace(run, **sections)
