import json

import compare_modes
import pytest


@pytest.fixture
def ask(tiny_config, tmp_path):
    rows = ["w6 w7 w8 w6 w7 w8 w6", "w10 w11 w10 w11 w10"]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows), "utf-8")
    return [str(tiny_config), "--input", str(path), "--max-new-tokens", "16"]


def test_all_modes_draft_and_accept_the_same(ask, tmp_path, capsys):
    file = tmp_path / "modes.json"
    assert compare_modes.main([*ask, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    host, step, loop = (result["modes"][name] for name in ("host", "step", "loop"))
    assert host["tokens"] == step["tokens"] == loop["tokens"]
    assert [len(tokens) for tokens in host["tokens"]] == [16, 16]
    assert (
        host["acceptance_per_position"] == step["acceptance_per_position"] == loop["acceptance_per_position"]
    )
    assert host["acceptance_length"] > 1
    assert capsys.readouterr().out.endswith("the same tokens and acceptance\n")


def test_a_mode_that_drafts_otherwise_is_found_out(ask, monkeypatch, capsys):
    monkeypatch.setitem(compare_modes.MODES, "loop", {"synthetic_acceptance_length": 2.0})
    with pytest.warns(UserWarning, match="worthless"):
        assert compare_modes.main(ask) == 1
    assert "DIFFER" in capsys.readouterr().out


def test_what_cannot_be_loaded_is_one_line(capsys):
    assert compare_modes.main(["no-such-thing"]) == 2
    assert capsys.readouterr().err.startswith("error: 'no-such-thing' is not a configuration")
