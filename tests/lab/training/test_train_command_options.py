"""Every option of `jaxspec train` reaches the run."""

import pytest
from options import arguments, assert_complete

from jaxspec.commands import train as train_command
from jaxspec.config import SourceConfig
from jaxspec.lab.training import pipeline
from jaxspec.lab.training.stage_folder import STAGES, StageFolder


@pytest.fixture
def commanded(files, monkeypatch, tmp_path):
    """Runs the command up to its pipeline; returns what that is given and the stages that are run."""

    class Recorder:
        def __init__(self, run, output, *, data, device):
            self.run, self.output, self.data, self.device, self.stages = run, output, data, device, []
            made.append(self)

        def begin_anew(self):
            return []

        def run_stage(self, stage):
            self.stages.append(stage)
            return {"acceptance_length": {}}

    made = []
    monkeypatch.setattr(pipeline, "Pipeline", Recorder)

    def run(*words):
        assert train_command.main([*map(str, words), "--output", str(tmp_path / "out")]) == 0
        return made.pop()

    run.new = ["--target", files / "target", "--prompts", files / "a.jsonl"]
    return run


# Options with a value, and where it is to be found in the run.
NUMBERS = {
    "held_out_share": (0.2, "prompts.held_out_share"),
    "max_prompt_tokens": (99, "prompts.max_tokens"),
    "max_new_tokens": (33, "responses.max_new_tokens"),
    "vocabulary": (77, "vocabulary.size"),
    "steps": (66, "train.steps"),
    "epochs": (2.5, "train.epochs"),
    "row_length": (55, "train.row_length"),
    "batch_tokens": (4444, "train.batch_tokens"),
    "learning_rate": (0.125, "train.learning_rate"),
    "average_initial": (0.25, "average.initial"),
    "num_speculative_tokens": (3, "evaluate.num_speculative_tokens"),
    "slots": (22, "engine.batch_size"),
    "target_name": ("my/target", "export.target_name"),
    "license": ("MIT", "export.license"),
}


def test_every_option_of_the_command_reaches_the_run(files, commanded, tmp_path):
    tried = {"config", "output", "target", "adapt", "prompts", "held_out", "data_license", "data"}
    more = {"resume", "stage", "device", "imports"}
    assert_complete("jaxspec train", arguments(train_command.main), NUMBERS, tried, more)
    adapting = [*commanded.new, "--adapt", files / "head"]
    default = commanded(*adapting)
    for name, (value, place) in NUMBERS.items():
        section, _, key = place.partition(".")
        run = commanded(*adapting, f"--{name.replace('_', '-')}", value).run
        assert getattr(getattr(run, section), key) == value, name
        assert getattr(getattr(default.run, section), key) != value, name
    assert commanded(*adapting, "--max-new-tokens", 33).run.evaluate.max_new_tokens == 33
    assert default.device is None
    assert commanded(*adapting, "--device", "cpu:0").device == "cpu:0"
    assert default.run.target == SourceConfig(str(files / "target"))
    assert default.run.prompts.files == (str(files / "a.jsonl"),)
    assert default.run.head.initial == str(files / "head")
    assert commanded(*commanded.new).run.head.initial == ""
    assert (default.output, default.stages) == (tmp_path / "out", list(STAGES))
    found = commanded(*adapting, "--held-out", files / "apart.jsonl", "--data-license", "a, MIT", "b, CC0")
    assert found.run.prompts.held_out == (str(files / "apart.jsonl"),)
    assert found.run.export.data == ("a, MIT", "b, CC0")
    assert "--data-license 'a, MIT' 'b, CC0'" in found.run.export.command
    stages = ["--stage", "train", "--stage", "prompts"]
    assert commanded(*adapting, *stages).stages == ["prompts", "train"]


def test_options_change_the_run_of_a_file(files, commanded, tmp_path):
    path = tmp_path / "runs" / "run.toml"
    path.parent.mkdir()
    path.write_text('[target]\nsource = "there"\n[train]\nsteps = 50\nwarmup_steps = 9\n', "utf-8")
    found = commanded(path)
    assert (found.run.target.source, found.run.train.steps, found.data) == ("there", 50, path.parent)
    assert commanded(path, "--data", files).data == files
    assert commanded(path, "--target", files / "target").run.target.source == str(files / "target")
    assert commanded(path, "--adapt", files / "head").run.head.initial == str(files / "head")
    assert commanded(path, "--prompts", files / "b.jsonl").run.prompts.files == (str(files / "b.jsonl"),)
    mine = tmp_path / "mine.py"
    mine.write_text("raise ImportError('it was run')\n")
    with pytest.raises(SystemExit):
        commanded(path, "--import", mine)
    # A run that was begun goes on only if that is asked for.
    StageFolder(tmp_path / "out", "prompts", {}).finish()
    with pytest.raises(AssertionError):
        commanded(path)
    assert commanded(path, "--resume").stages
    assert "--resume" not in commanded(path, "--resume").run.export.command
