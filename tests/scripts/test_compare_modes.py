import json

import compare_modes
import pytest

import jaxspec


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
    assert step["times_step"] == 1.0
    for row in (host, step, loop):
        low, high = row["ms_per_step_quartiles"]
        assert 0 < low <= row["ms_per_step"] <= high
    assert capsys.readouterr().out.endswith("the same tokens and acceptance\n")


def test_a_mode_that_drafts_otherwise_is_found_out(ask, monkeypatch, capsys):
    monkeypatch.setitem(compare_modes.MODES, "loop", {"synthetic_acceptance_length": 2.0})
    with pytest.warns(UserWarning, match="worthless"):
        assert compare_modes.main(ask) == 1
    assert "DIFFER" in capsys.readouterr().out


def test_modes_take_turns_so_that_load_turns_nothing_around(monkeypatch):
    """The machine becomes ten times slower, and later fast again; one run in nine is slower yet."""
    clock, runs = [0.0], []

    class Fake:
        def __init__(self, name, ms):
            self.name, self.ms = name, ms

        def generate(self, prompt, *, seed, **sampling):
            runs.append(self.name)
            load = 10 if 20 < len(runs) < 50 else 1
            clock[0] += 1e-3 * self.ms * load * (5 if len(runs) % 9 == 0 else 1)
            stats = jaxspec.AcceptanceStats.of([(2, 1)])
            return jaxspec.Generation("", [1, 2, 3], "length", [1], stats)

    monkeypatch.setattr(compare_modes.time, "perf_counter", lambda: clock[0])
    engines = {"host": Fake("host", 3.0), "step": Fake("step", 2.0), "loop": Fake("loop", 1.6)}
    rows = compare_modes.compare(engines, ["a", "b", "c", "d"], {"max_new_tokens": 8}, repeats=5)
    assert rows["host"]["ms_per_step"] > rows["step"]["ms_per_step"] > rows["loop"]["ms_per_step"]
    assert [row["times_step"] for row in rows.values()] == pytest.approx([1.5, 1.0, 0.8])
    # Each mode is the first of its turn as often as the others.
    firsts = runs[3::3]
    assert all(6 <= firsts.count(name) <= 7 for name in engines)
    assert all(len(row["tokens"]) == 4 for row in rows.values())


def test_what_cannot_be_loaded_is_one_line(capsys):
    assert compare_modes.main(["no-such-thing"]) == 2
    assert capsys.readouterr().err.startswith("error: 'no-such-thing' is not a configuration")
