"""Plots, checked by the objects in them, not by pixels."""

import json
import sys
from pathlib import Path

import matplotlib
import pytest

from jaxspec import AcceptanceStats
from jaxspec.engine import Generation
from jaxspec.lab import plots
from jaxspec.lab.show import COLOURS

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = Path(__file__).parents[2] / "results" / "gpu"


@pytest.fixture(autouse=True)
def figures():
    yield
    pyplot.close("all")


def answer(*verified, tokens=None):
    """An answer with these numbers of drafts verified and accepted per step."""
    stats = AcceptanceStats()
    for step in verified:
        stats.add_step(*step)
    count = 1 + sum(accepted + 1 for _, accepted in verified) if tokens is None else tokens
    return Generation("", list(range(count)), "length", [1], stats, verified=list(verified))


@pytest.fixture
def good():
    return answer((3, 3), (3, 1), (3, 0), (0, 0))


def points(line):
    """The points of a line: y by x."""
    return dict(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_acceptance_per_position(good):
    ax = plots.acceptance_per_position(good.stats)
    assert points(ax.lines[0]) == pytest.approx({0: 2 / 3, 1: 1 / 3, 2: 1 / 3})
    assert [text.get_text() for text in ax.texts] == ["0.67", "0.33", "0.33"]
    assert ax.get_legend() is None
    ax = plots.acceptance_per_position(
        {"one": good.stats, "two": AcceptanceStats.total([good, answer((1, 0))])}
    )
    # The second answer drafted nothing past position 0.
    assert points(ax.lines[1]) == pytest.approx({0: 2 / 4, 1: 1 / 3, 2: 1 / 3})
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["one", "two"]


def test_acceptance_has_its_intervals(good):
    """Where there are counts: not for rates from a file that has none."""
    rates = {"acceptance_length": 2.0, "acceptance_per_position": [0.5, 0.25]}
    results = {"good": good.stats, "written": good.stats.to_dict(), "rates": rates}
    for conditional in (False, True):
        ax = plots.acceptance_per_position(results, conditional=conditional)
        first, second = (ends_of(lines) for lines in ax.collections)
        assert first == second == good.stats.intervals(conditional=conditional)
    ax = plots.length_against_drafts({3: good.stats, 4: rates, 5: answer((2, 1)).stats})
    assert [ends_of(lines) for lines in ax.collections] == [[good.stats.length_interval]]


def ends_of(lines):
    """The lower and upper ends of vertical lines."""
    return [tuple(segment[:, 1].tolist()) for segment in lines.get_segments()]


def test_conditional_acceptance(good):
    ax = plots.acceptance_per_position(good.stats, conditional=True)
    assert points(ax.lines[0]) == pytest.approx({0: 2 / 3, 1: 1 / 2, 2: 1})
    assert "of those reached" in ax.get_ylabel()


def test_what_benchmarks_write_is_drawn(good):
    """JSON of benchmarks and of statistics."""
    written = json.loads(json.dumps(good.to_dict()))["stats"]
    bench = {"acceptance_length": 2.0, "acceptance_per_position": [0.5, 0.25]}
    ax = plots.acceptance_per_position({"row": written, "bench": bench, "stats": good.stats})
    assert points(ax.lines[0]) == points(ax.lines[2])
    assert points(ax.lines[1]) == {0: 0.5, 1: 0.25}
    assert plots.acceptance(bench)["conditional_acceptance"] == [0.5, 0.5]


@pytest.mark.parametrize("result", [3, {}, [], [1], "text", {"rows": []}])
def test_what_has_no_acceptance_is_refused(result):
    with pytest.raises(ValueError, match="no acceptance in"):
        plots.acceptance(result)


def test_length_against_drafts(good):
    ax = plots.length_against_drafts({1: answer((1, 1), (1, 0)).stats, 3: good.stats})
    ceiling, line = ax.lines
    assert points(ceiling) == {1: 2, 3: 4}
    assert points(line) == pytest.approx({1: 1.5, 3: 1 + 4 / 3})
    ax = plots.length_against_drafts({"a": {2: good.stats}, "b": {4: good.stats, 2: good.stats}})
    assert [list(line.get_xdata()) for line in ax.lines] == [[2, 4], [2], [2, 4]]
    assert ax.get_legend() is not None


def test_speed_against_batch():
    plain = json.loads((RESULTS / "h100" / "llama3-8b-plain.json").read_text("utf-8"))
    ax = plots.speed_against_batch({"twice": {1: 2 * 178.494, 8: 3 * 1393.851, 64: 9.0}}, plain)
    assert points(ax.lines[0]) == pytest.approx({1: 2, 8: 3}, rel=1e-4)
    assert list(ax.lines[1].get_ydata()) == [1, 1]
    fast = json.loads((RESULTS / "h200" / "llama3-8b-k3.json").read_text("utf-8"))
    assert list(plots.speeds(fast)) == [1, 8, 32, 64]
    with pytest.raises(ValueError, match="other: no batch size was also measured without"):
        plots.speed_against_batch({"other": {2: 1.0}}, plain)
    with pytest.raises(ValueError, match="no speed by batch size"):
        plots.speeds({"rows": [{"batch": 1}]})


def test_time_by_phase():
    ax = plots.time_by_phase({"host": {"draft": 2.0, "verify": 3.0}, "loop": {"verify": 1.0, "rest": 0.01}})
    assert [round(bar.get_y() + 0.3) for bar in ax.patches] == [0, 0, 1, 1]
    assert [bar.get_x() for bar in ax.patches] == [0, 2, 0, 1]
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([2, 3, 1, 0.01])
    assert ax.patches[1].get_facecolor() == ax.patches[2].get_facecolor()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["host", "loop"]
    assert [text.get_text() for text in ax.texts] == ["2", "3", "1"]  # narrow parts have no label
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["draft", "verify", "rest"]
    assert len(plots.time_by_phase({"draft": 1.0}).patches) == 1
    assert not ax.collections


def test_times_of_several_measurements_are_medians_with_their_spread():
    ax = plots.time_by_phase(
        {"host": {"draft": [1.0, 9.0, 2.0], "verify": [3.0, 4.0, 3.5]}, "loop": {"all": 1.0}}
    )
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([2, 3.5, 1])
    (spread,) = ax.collections
    # The sums are 4, 13 and 5.5.
    assert spread.get_segments()[0][:, 0].tolist() == [4.75, 9.25]


def test_the_strip_shows_every_token_on_its_colour(good):
    ax = plots.token_strip(good)
    assert [text.get_text() for text in ax.texts] == [str(i) for i in range(9)]
    sources = ["first", *["accepted"] * 3, "bonus", "accepted", "recovered", "recovered", "plain"]
    assert good.token_sources == sources
    assert [matplotlib.colors.to_hex(box.get_facecolor()) for box in ax.patches] == [
        COLOURS[source].lower() for source in sources
    ]
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["first 1", "accepted 4", "recovered 2", "bonus 1", "plain 1"]


def test_the_strip_breaks_lines_and_stops(good):
    rows = [box.get_y() for box in plots.token_strip(good, width=5).patches]
    assert rows == sorted(rows)
    assert len(set(rows)) > 1
    assert len(plots.token_strip(good, most=3).patches) == 3
    assert not plots.token_strip(answer(tokens=0)).patches


@pytest.mark.parametrize(
    "plot",
    [
        lambda good, ax: plots.acceptance_per_position(good.stats, ax),
        lambda good, ax: plots.length_against_drafts({3: good.stats}, ax),
        lambda good, ax: plots.speed_against_batch({"x": {1: 1.0}}, {1: 1.0}, ax),
        lambda good, ax: plots.time_by_phase({"draft": 1.0}, ax),
        lambda good, ax: plots.token_strip(good, ax),
    ],
)
def test_an_axes_that_is_given_is_drawn_into(good, plot):
    _, ax = pyplot.subplots()
    assert plot(good, ax) is ax
    assert len(pyplot.get_fignums()) == 1


def test_a_figure_has_a_ground(good):
    """Without a background, black text is unreadable in notebooks with a dark theme."""
    with matplotlib.rc_context({"figure.facecolor": "none"}):
        figure = plots.acceptance_per_position(good.stats).figure
        assert figure.get_facecolor() == matplotlib.colors.to_rgba("white")
    with pyplot.style.context("dark_background"):
        assert plots.acceptance_per_position(good.stats).figure.get_facecolor() == (0, 0, 0, 1)


def test_without_matplotlib_the_extra_is_named(good, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs matplotlib.*: pip install .*\[plots\]\"$"):
        plots.acceptance_per_position(good.stats)
