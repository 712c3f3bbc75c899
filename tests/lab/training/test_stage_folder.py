"""Which stages of a run are begun anew, and that nothing of theirs is lost."""

import pytest

from jaxspec.config import ConfigError
from jaxspec.lab.training.stage_folder import StageFolder, set_aside

SETTINGS = {"vocabulary": {"size": 8}, "train": {"size": 8, "steps": 3}, "export": {"size": 8, "steps": 3}}


def begin(output, settings):
    for stage, values in settings.items():
        folder = StageFolder(output, stage, values)
        (folder.path / "data").write_text(str(values))
        folder.finish()


def test_stages_with_other_settings_and_those_after_them_are_set_aside(tmp_path):
    begin(tmp_path, SETTINGS)
    assert set_aside(tmp_path, SETTINGS) == []
    for number, steps in ((1, 4), (2, 5)):
        before = (tmp_path / "train" / "data").read_text()
        changed = {**SETTINGS, "train": {"size": 8, "steps": steps}}
        lines = set_aside(tmp_path, changed)
        there = 3 if number == 1 else 4
        assert lines == [
            f"train: begins anew, as steps is {there} there and {steps} here; what was there is kept in "
            f"{tmp_path / 'train'}.{number}",
            "export: begins anew, as it follows from that; what was there is kept in "
            f"{tmp_path / 'export'}.{number}",
        ]
        assert (tmp_path / f"train.{number}" / "data").read_text() == before
        assert not (tmp_path / "train").exists()
        begin(tmp_path, changed)
    assert StageFolder(tmp_path, "vocabulary", SETTINGS["vocabulary"]).is_done


def test_what_is_no_manifest_is_not_moved(tmp_path):
    begin(tmp_path, SETTINGS)
    (tmp_path / "train" / "stage.json").write_text("x")
    with pytest.raises(ConfigError, match="not a stage's manifest"):
        set_aside(tmp_path, SETTINGS)
    assert (tmp_path / "train" / "data").exists()
