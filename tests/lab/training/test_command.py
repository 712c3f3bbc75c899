"""`jaxspec train` without a TOML: a new head, one adapted to a user's own rows, and refusals."""

import argparse
import json
import re
import shlex
import shutil
from contextlib import redirect_stdout
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_run import write_run, write_target

from jaxspec.__main__ import main as ask
from jaxspec.commands import train as train_command
from jaxspec.commands.train import before_and_after, main
from jaxspec.config import SourceConfig
from jaxspec.files import open_checkpoint
from jaxspec.lab.training import pipeline, train
from jaxspec.lab.training.config import HeadConfig, TrainingRun, load_training_run
from jaxspec.lab.training.evaluate import measure
from jaxspec.lab.training.prompts import HELD_OUT
from jaxspec.lab.training.token_rows import TokenRows

WORDS = ["red", "green", "blue", "one", "two", "three", "sun", "moon"]
SMALL = [
    "--max-new-tokens",
    "24",
    "--row-length",
    "96",
    "--batch-tokens",
    "768",
    "--num-speculative-tokens",
    "3",
]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def prompts(path, count, seed=0):
    rng = np.random.default_rng(seed)
    return write_rows(path, [{"prompt": " ".join(rng.choice(WORDS, 4)) + f" {i}"} for i in range(count)])


def fails(capsys, *arguments):
    assert main(list(map(str, arguments))) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    return error


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A target, a head trained for it, and that head adapted to rows that bring their answers."""
    folder = tmp_path_factory.mktemp("command")
    write_target(folder / "target")
    prompts(folder / "asked.jsonl", 48)
    with (folder / "said").open("w") as said, redirect_stdout(said):
        assert main(first(folder)) == 0
    rng = np.random.default_rng(1)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {i}"},
                {"role": "assistant", "content": " ".join(rng.choice(["abc", "cab"], 4))},
            ]
        }
        for i in range(20)
    ] + [{"prompt": f"again {i}", "response": "abc cab"} for i in range(4)]
    write_rows(folder / "own.jsonl", [*rows, {"prompt": "what comes next?"}])
    stages = ["prompts", "responses", "vocabulary", "train"]
    assert main([*adapting(folder), *flags("--stage", stages), "--output", str(folder / "second")]) == 0
    return folder


def adapting(folder):
    """The arguments that adapt the first head."""
    head = folder / "first" / "export" / "speculators"
    arguments = ["--target", folder / "target", "--prompts", folder / "own.jsonl", "--adapt", head]
    return [*map(str, arguments), *SMALL, "--steps", "8"]


def opened(output, monkeypatch):
    """The pipeline of a finished run, as its own command makes it."""
    made = []

    class Recorded(pipeline.Pipeline):
        def __init__(self, *told, **options):
            super().__init__(*told, **options)
            made.append(self)

    monkeypatch.setattr(pipeline, "Pipeline", Recorded)
    assert main([*first(output.parent), "--resume"]) == 0
    return made[0]


def first(folder):
    """The arguments that train the first head."""
    arguments = [
        "--target",
        folder / "target",
        "--prompts",
        folder / "asked.jsonl",
        *SMALL,
        "--steps",
        "40",
        "--learning-rate",
        "4e-2",
    ]
    return [*map(str, arguments), "--output", str(folder / "first"), "--license", "MIT"]


def flags(name, values):
    return [word for value in values for word in (name, value)]


def results(folder, stage):
    return json.loads((folder / stage / "stage.json").read_text())["results"]


def test_a_head_without_a_toml_is_accepted_more_than_an_untrained_one(runs, monkeypatch):
    """Greedily: at temperature 1 the target is so undecided that random drafts are accepted, too."""
    measured = json.loads((runs / "first" / "evaluate" / "acceptance.json").read_text())
    assert all(result["tokens"] <= 8 * 24 for result in measured.values())
    run = opened(runs / "first", monkeypatch)
    prompts = {"": [ids.tolist() for ids in run._read(HELD_OUT).sequences()]}

    def length(head):
        results = measure(run._engine(128, head), prompts, replace(run.run.evaluate, temperatures=(0.0,)))
        return results[" temperature 0"]["acceptance_length"]

    lengths = results(runs / "first", "evaluate")["acceptance_length"]
    trainer, state = run._trained()
    assert lengths["held-out temperature 0"] == length(trainer.head(state)) > length(run._new_head()) + 0.2
    picture = runs / "first" / "train" / "progress.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_part_is_held_out_and_the_same_wherever_the_rows_stand(runs, tmp_path):
    trained, apart = (
        {tuple(ids) for ids in TokenRows.load(runs / "first" / "prompts" / f"{name}.npz").sequences()}
        for name in ("prompts", "held_out")
    )
    assert (len(trained), len(apart)) == (40, 8)
    assert not trained & apart
    rows = (runs / "asked.jsonl").read_text().splitlines()
    (tmp_path / "asked.jsonl").write_text("\n".join(reversed(rows)))
    arguments = ["--target", runs / "target", "--prompts", tmp_path / "asked.jsonl", "--stage", "prompts"]
    assert main(list(map(str, [*arguments, *SMALL, "--output", tmp_path / "out"]))) == 0
    again = TokenRows.load(tmp_path / "out" / "prompts" / "held_out.npz").sequences()
    assert {tuple(ids) for ids in again} == apart


def test_given_answers_are_learnt_and_the_others_are_the_targets(runs):
    answers = TokenRows.load(runs / "second" / "prompts" / "answers.npz")
    tokenizer = open_checkpoint(runs / "target").tokenizer
    texts = [tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in answers.sequences()]
    assert all(set(text.removesuffix("</s>")) <= set("abc ") for text in texts)
    assert all(text.endswith("</s>") for text in texts)
    assert results(runs / "second", "prompts")["answered"] == len(texts)
    total = results(runs / "second", "prompts")["prompts"]
    assert results(runs / "second", "responses")["answers"] == total
    assert results(runs / "second", "train")["updates"] == 8


def test_resuming_with_other_steps_keeps_the_answers(runs, tmp_path, capsys):
    """And what was trained before, too, under another name; other answers are another run."""
    shutil.copytree(runs / "second", tmp_path / "out")
    stages = flags("--stage", ["prompts", "responses", "vocabulary", "train"])
    again = [*adapting(runs)[:-1], "9", "--output", str(tmp_path / "out"), *stages]
    assert "train.steps is 8 there and 9 here; give another --output" in fails(capsys, *again)
    before = (tmp_path / "out" / "responses" / "stage.json").stat().st_mtime_ns
    assert main([*again, "--resume"]) == 0
    assert "train: begins anew, as train.steps is 8 there and 9 here; what" in capsys.readouterr().out
    assert results(tmp_path / "out", "train")["updates"] == 9
    assert results(tmp_path / "out", "train.1")["updates"] == 8
    assert (tmp_path / "out" / "responses" / "stage.json").stat().st_mtime_ns == before
    assert not (tmp_path / "out" / "vocabulary.1").exists()
    assert main([*again, "--resume"]) == 0
    assert "anew" not in capsys.readouterr().out
    other = [*again, "--max-new-tokens", "23", "--resume"]
    assert "responses.max_new_tokens is 24 there and 23 here" in fails(capsys, *other)
    assert results(tmp_path / "out", "train")["updates"] == 9


def test_it_ends_with_a_command_that_drafts_with_the_new_head(runs, capsys):
    said = (runs / "said").read_text().splitlines()
    assert said[-1].startswith("try it: jaxspec 'Why is the sky blue?' --model ")
    command = shlex.split(said[-1].removeprefix("try it: "))
    assert ask([*command[1:], "--max-new-tokens", "8", "--ignore-eos"]) == 0
    assert re.search(r"[1-9]\d* of \d+ drafts|acceptance", capsys.readouterr().err)
    (line,) = [line for line in said if line.startswith("acceptance length, held-out temperature 1: ")]
    number = r"\d\.\d\d \(\d\.\d\d to \d\.\d\d\)"
    assert re.search(rf": prompt lookup {number}, after {number}; .* 8 prompts, 95 % intervals$", line)


def test_a_gain_is_told_only_where_it_is_no_chance():
    few = {"prompts": 3, "before": 1.5, "after": 1.75, "before_interval": None, "after_interval": (1.5, 2.0)}
    sure = {**few, "gain": 0.25, "gain_interval": (0.125, 0.375)}
    chance = {**few, "gain": 0.25, "gain_interval": (-0.125, 0.625)}
    alone = {**few, "gain": 0.25, "gain_interval": None}
    lines = before_and_after({"a": sure, "b": chance, "c": alone}, adapted=True)
    ends = "; 3 prompts, 95 % intervals"
    assert lines == [
        f"acceptance length, a: before 1.50, after 1.75 (1.50 to 2.00); +0.25 (+0.12 to +0.38){ends}",
        "acceptance length, b: before 1.50, after 1.75 (1.50 to 2.00); +0.25, which may be chance "
        f"(-0.12 to +0.62){ends}",
        "acceptance length, c: before 1.50, after 1.75 (1.50 to 2.00); +0.25, of too few prompts to say "
        f"more{ends}",
    ]


def test_a_cpu_adapts_with_fewer_and_smaller_updates(runs, tmp_path):
    arguments = ["--target", str(runs / "target"), "--prompts", str(runs / "own.jsonl")]
    head = ["--adapt", str(runs / "first" / "export" / "speculators")]
    parsed = [
        train_command._parser().parse_args([*arguments, *more, "--output", "out"]) for more in ([], head)
    ]
    new, adapted = (train_command.with_options(train_command._run(args), args) for args in parsed)
    assert (new.train.batch_tokens, new.train.epochs) == (2048, 4.0)
    assert (adapted.train.batch_tokens, adapted.train.epochs) == (2048, 1.0)
    fewest = [pipeline.Pipeline(run, tmp_path / "out", data=runs)._fewest_steps for run in (new, adapted)]
    assert fewest == [300, 20]


def test_before_is_the_head_that_is_adapted(runs):
    settings = json.loads((runs / "second" / "train" / "stage.json").read_text())["settings"]
    initial = settings["head"]["initial"]
    run = TrainingRun(target=SourceConfig(str(runs / "target")), head=HeadConfig(initial=initial))
    adapted = pipeline.Pipeline(run, runs / "third", data=runs)
    before = adapted._baseline()
    exported = load_file(runs / "first" / "export" / "speculators" / "model.safetensors")["norm.weight"]
    np.testing.assert_array_equal(before.norm.scale[...], exported.astype(np.float32))
    # Over the draft vocabulary of the same size, and of the same shape.
    assert adapted.head_config.draft_vocab_size == before.config.draft_vocab_size
    assert adapted.head_config.fc_norm


def test_the_average_with_the_head_that_is_adapted_is_exported(runs, tmp_path):
    def exported(folder, *options):
        shutil.copytree(runs / "second", folder)
        arguments = [*adapting(runs), *options, "--stage", "export", "--output", str(folder)]
        assert main(arguments) == 0
        return load_file(folder / "export" / "shared" / "model.safetensors")

    trained = exported(tmp_path / "trained")
    averaged = exported(tmp_path / "averaged", "--average-initial", "0.25")
    initial = load_file(runs / "first" / "export" / "shared" / "model.safetensors")
    for name, value in averaged.items():
        if name in ("d2t", "t2d"):
            np.testing.assert_array_equal(value, trained[name])
        else:
            wide = [tensors[name].astype(np.float32) for tensors in (averaged, trained, initial)]
            np.testing.assert_allclose(wide[0], 0.75 * wide[1] + 0.25 * wide[2], rtol=2**-7, atol=1e-4)
            assert not np.array_equal(wide[1], wide[2])
    card = (tmp_path / "averaged" / "export" / "shared" / "README.md").read_text()
    assert "0.75 of the trained ones and 0.25 of the initial ones" in card


def test_every_export_has_a_card(runs):
    for form in results(runs / "first", "export")["formats"]:
        card = (runs / "first" / "export" / form / "README.md").read_text()
        assert "# An EAGLE-3 head for target" in card
        assert "| licence | MIT |" in card
        assert "| held-out" not in card.split("## Acceptance")[0]
        assert "| held-out, 8 | 0 |" in card
        assert "48 prompts from files" in card
        assert "jaxspec train --target" in card


def test_refusals(runs, tmp_path, capsys):
    target, asked = runs / "target", runs / "asked.jsonl"
    known = ["--target", target, "--output", tmp_path / "out"]
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "--prompts: name at least one JSONL file" in fails(capsys, *known)
    assert "prompts: none in" in fails(capsys, *known, "--prompts", tmp_path / "empty.jsonl")
    assert "--target: name the model" in fails(capsys, "--output", tmp_path / "out", "--prompts", asked)
    assert "'nowhere' is not a configuration" in fails(
        capsys, "--target", "nowhere", "--output", tmp_path / "out", "--prompts", asked
    )
    average = [*known, "--prompts", asked, "--average-initial"]
    assert "average.initial needs head.initial" in fails(capsys, *average, "0.5")
    assert "average.initial must be from 0 to below 1" in fails(capsys, *average, "1.5")
    assert "--resume continues it" in fails(
        capsys, "--target", target, "--prompts", asked, "--output", runs / "first"
    )
    asked_of = [*known, "--prompts", asked, "--adapt"]
    assert "not by an EAGLE-3 head" in fails(capsys, *asked_of, "smollm2-135m-ngram")
    assert "the head reads the target's layer 15" in fails(capsys, *asked_of, "smollm2-135m-eagle3")


def test_without_matplotlib_there_is_no_picture_and_a_line_says_so(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "can_plot", lambda: False)
    monkeypatch.setattr(train.Trainer, "update", _stop)
    for stage in ("prompts", "responses", "vocabulary"):
        shutil.copytree(runs / "first" / stage, tmp_path / "out" / stage)
    arguments = ["--target", runs / "target", "--prompts", runs / "asked.jsonl", *SMALL, "--steps", "30"]
    assert main(list(map(str, [*arguments, "--resume", "--output", tmp_path / "out"]))) == 130
    assert "matplotlib is not installed" in capsys.readouterr().err
    assert not (tmp_path / "out" / "train" / "progress.png").exists()


def _stop(*_):
    raise KeyboardInterrupt


def test_options_go_before_what_would_go_before_them(tmp_path):
    """`steps` of a file would go before epochs, and `batch_size` before batch tokens."""
    run = load_training_run(write_run(tmp_path))
    assert run.train.steps
    assert run.train.batch_size
    args = argparse.Namespace(**dict.fromkeys(["prompts", "held_out", "data_license"]))
    for option in train_command._OPTIONS:
        setattr(args, option[2:].replace("-", "_"), None)
    args.epochs, args.batch_tokens = 2.0, 512
    train = train_command.with_options(run, args).train
    assert (train.epochs, train.steps, train.batch_tokens, train.batch_size) == (2.0, 0, 512, 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_model_len", 64), ("cpu_activations", "int8"), ("packed", False), ("tensor_parallel", 2)],
)
def test_sizes_of_an_engine_that_no_run_has_are_refused(tmp_path, capsys, key, value):
    config = write_run(tmp_path, engine={key: value})
    assert f"engine.{key}" in fails(capsys, config, "--output", tmp_path / "out")
