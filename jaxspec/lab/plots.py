"""Plots of speculation with matplotlib (extra `plots`).

Every function draws into `ax`, or into a new figure, and returns the `Axes`; save it with
`ax.figure.savefig(path)`. Series have the colours of Okabe and Ito, which colour-blind readers can tell
apart; text and background follow matplotlib's current style, such as `plt.style.use("dark_background")`.

Acceptance comes as tables by name: `answer.stats`, `AcceptanceStats.total(answers)`, or what a benchmark
wrote.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from jaxspec.engine import AcceptanceStats, Generation
from jaxspec.engine.host.statistics import Interval
from jaxspec.installation import optional
from jaxspec.lab.inspection import Step
from jaxspec.lab.show import COLOURS, FATES

if TYPE_CHECKING:  # optional, and slow to import
    from matplotlib.axes import Axes

Table = AcceptanceStats | Mapping[str, Any]
"""Acceptance by draft position: statistics, or a benchmark's JSON as `json.load` reads it, with
"acceptance_per_position" at least."""
Times = float | Sequence[float]
"""A time, or several measurements of it."""

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
"""The colours of series, in order; they repeat after the last."""
_MARKERS = "osD^vPX"


def acceptance_per_position(
    tables: AcceptanceStats | Mapping[str, Table], ax: "Axes | None" = None, *, conditional: bool = False
) -> "Axes":
    """How often the drafts up to each position were all accepted, with 95 % intervals if there are counts.

    The intervals are as if steps were independent; acceptance differs more from text to text.

    Args:
      tables: tables by name, or one without a name.
      ax: the axes to draw into; None makes a figure.
      conditional: draw instead how often a draft was accepted where all drafts before it were.

    Raises:
      ValueError: a table has no acceptance.
      ModuleNotFoundError: matplotlib is not installed.
    """
    ax = _axes(ax)
    name = "conditional_acceptance" if conditional else "acceptance_per_position"
    named = {"": tables} if isinstance(tables, AcceptanceStats) else tables
    found = {label: acceptance(table) for label, table in named.items()}
    series = {label: values[name] for label, values in found.items()}
    for i, (label, rates) in enumerate(series.items()):
        ax.plot(range(len(rates)), rates, label=label, **_style(i))
        if (counts := _counts(found[label])) is not None:
            _draw_intervals(ax, range(len(rates)), counts.intervals(conditional=conditional), i)
        if len(series) == 1:
            for position, rate in enumerate(rates):
                ax.annotate(f"{rate:.2f}", (position, rate), (0, 7), textcoords="offset points", ha="center")
    _whole_numbers(ax, max(map(len, series.values()), default=0))
    ax.set_ylim(0, 1.08)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    ax.set_xlabel("position of the draft")
    ax.set_ylabel("accepted, of those reached" if conditional else "accepted up to here")
    _finish(ax, legend=any(named))
    return ax


def length_against_drafts(
    tables: Mapping[int, Table] | Mapping[str, Mapping[int, Table]], ax: "Axes | None" = None
) -> "Axes":
    """Mean tokens per step against the number of drafts K, with the maximum K + 1 as a dotted line.

    Tables with counts have 95 % intervals, as if steps were independent.

    Args:
      tables: tables by K, or several such mappings by name.
      ax: the axes to draw into; None makes a figure.

    Raises:
      ValueError: a table has no acceptance.
      ModuleNotFoundError: matplotlib is not installed.
    """
    ax = _axes(ax)
    has_names = all(isinstance(key, str) for key in tables)
    named = cast(Mapping[str, Mapping[int, Table]], tables if has_names else {"": tables})
    drafts = sorted({k for by_k in named.values() for k in by_k})
    ax.plot(drafts, [k + 1 for k in drafts], color="0.6", linestyle=":", linewidth=1.5, zorder=1)
    longest = 1.0
    for i, (label, by_k) in enumerate(named.items()):
        found = {k: acceptance(by_k[k]) for k in sorted(by_k)}
        lengths: list[float] = [values["acceptance_length"] for values in found.values()]
        longest = max(longest, *lengths)
        ax.plot(sorted(by_k), lengths, label=label, **_style(i))
        counted = {k: counts for k, values in found.items() if (counts := _counts(values)) is not None}
        several = {k: counts.length_interval for k, counts in counted.items() if counts.draft_steps > 1}
        _draw_intervals(ax, several.keys(), several.values(), i)
        if len(named) == 1:
            for k, length in zip(sorted(by_k), lengths, strict=True):
                ax.annotate(f"{length:.2f}", (k, length), (0, -15), textcoords="offset points", ha="center")
    top = min(max(drafts, default=0) + 1.4, 1.6 * longest + 0.6)
    ax.set_ylim(0.8, top)
    ceiling = [k for k in drafts if k + 1 <= top - 0.2]
    if ceiling:
        ax.annotate(
            "all accepted",
            (ceiling[-1], ceiling[-1] + 1),
            (-6, 2),
            textcoords="offset points",
            ha="right",
            color="0.5",
            fontsize="small",
        )
    ax.set_xticks(drafts)
    ax.set_xlabel("drafts a step, K")
    ax.set_ylabel("tokens a step")
    _finish(ax, legend=has_names)
    return ax


def speed_against_batch(
    results: Mapping[str, Any], plain: Mapping[str, Any] | Mapping[int, float], ax: "Axes | None" = None
) -> "Axes":
    """The speed relative to plain decoding, against the batch size.

    Args:
      results: by name, the JSON of `scripts/bench_step.py --json` or tokens per second by batch size.
      plain: the same without speculation, on the same machine.
      ax: the axes to draw into; None makes a figure.

    Raises:
      ValueError: a result has no speeds, or no batch size that `plain` has too.
      ModuleNotFoundError: matplotlib is not installed.
    """
    ax = _axes(ax)
    base = speeds(plain)
    sizes: set[int] = set()
    most = 1.0
    for i, (label, result) in enumerate(results.items()):
        fast = speeds(result)
        common = sorted(fast.keys() & base.keys())
        if not common:
            raise ValueError(f"{label}: no batch size was also measured without speculation")
        ratios = [fast[size] / base[size] for size in common]
        ax.plot(common, ratios, label=label, **_style(i))
        most = max(most, *ratios)
        sizes.update(common)
    ax.axhline(1.0, color="0.6", linestyle=":", linewidth=1.5, zorder=1)
    ax.annotate(
        "plain decoding",
        (0.0, 1.0),
        (4, -4),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="top",
        color="0.5",
        fontsize="small",
    )
    ax.set_xscale("log", base=2)
    ax.set_xticks(sorted(sizes), [str(size) for size in sorted(sizes)], minor=False)
    ax.set_ylim(0, 1.15 * most)
    ax.set_xlabel("requests at once")
    ax.set_ylabel("times plain decoding's speed")
    _finish(ax, legend=len(results) > 1)
    return ax


def time_by_phase(
    phases: Mapping[str, Times] | Mapping[str, Mapping[str, Times]],
    ax: "Axes | None" = None,
    *,
    unit: str = "ms",
) -> "Axes":
    """The time of each phase: a stacked bar for each name.

    Bars show medians. A thin line below the end of a bar spans the quartiles of the sum of all its phases.

    Args:
      phases: time by phase, or several such mappings by name. A time is a number, or the numbers of several
        measurements; phases under one name are of the same measurements.
      ax: the axes to draw into; None makes a figure.
      unit: the unit of the times.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
    """
    has_names = any(isinstance(value, Mapping) for value in phases.values())
    given = cast(Mapping[str, Mapping[str, Times]], phases if has_names else {"": phases})
    measured = {
        name: {phase: _several(time) for phase, time in times.items()} for name, times in given.items()
    }
    named = {
        name: {phase: statistics.median(time) for phase, time in times.items()}
        for name, times in measured.items()
    }
    ax = _axes(ax, height=1.5 + 0.5 * len(named))
    kinds = list(dict.fromkeys(phase for times in named.values() for phase in times))
    labelled: set[str] = set()
    widest = max((sum(times.values()) for times in named.values()), default=0.0)
    for row, (name, times) in enumerate(named.items()):
        totals = [sum(parts) for parts in zip(*measured[name].values(), strict=True)]
        if len(totals) > 1:
            low, _, high = statistics.quantiles(totals, method="inclusive")
            ax.hlines(row + 0.37, low, high, color="0.5", linewidth=1.5)
        left = 0.0
        for phase, time in times.items():
            colour = PALETTE[kinds.index(phase) % len(PALETTE)]
            bar = ax.barh(row, time, left=left, height=0.6, color=colour, edgecolor=ax.get_facecolor())
            if phase not in labelled:
                bar.set_label(phase)
                labelled.add(phase)
            if time > 0.08 * widest:
                ax.annotate(
                    f"{time:.3g}",
                    (left + time / 2, row),
                    ha="center",
                    va="center",
                    color=_on(colour),
                    fontsize="small",
                )
            left += time
    ax.set_yticks(range(len(named)), list(named))
    ax.tick_params(axis="y", length=0)
    ax.invert_yaxis()
    ax.set_xlabel(unit)
    ax.grid(axis="x", alpha=0.25)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=min(len(kinds), 5),
        frameon=False,
        fontsize="small",
        handlelength=1.0,
        columnspacing=1.2,
    )
    return ax


def token_strip(answer: Generation, ax: "Axes | None" = None, *, width: int = 84, most: int = 400) -> "Axes":
    """An answer's tokens in order, each on the colour of its source, with a gap between steps.

    Args:
      answer: the answer of an engine.
      ax: the axes to draw into; None makes a figure as high as the text.
      width: characters per line.
      most: the most tokens to draw.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
    """
    cells = _lay_out(answer, width, most)
    lines = 1 + max((row for row, *_ in cells), default=0)
    ax = _axes(ax, width=9.0, height=0.34 * lines + 0.7)
    patches = optional("matplotlib.patches", extra="plots")
    drawn: dict[str, Any] = {}
    for row, column, text, source in cells:
        size = len(text)
        box = patches.Rectangle(
            (column + 0.06, row + 0.1), size - 0.12, 0.8, facecolor=COLOURS[source], edgecolor="none"
        )
        ax.add_patch(box)
        drawn.setdefault(source, box)
        ax.text(
            column + size / 2,
            row + 0.52,
            text,
            ha="center",
            va="center",
            family="monospace",
            fontsize=9.5,
            color=_on(COLOURS[source]),
            parse_math=False,
        )
    ax.set_xlim(0, width)
    ax.set_ylim(lines, 0)
    ax.axis("off")
    order = [source for source in COLOURS if source in drawn]
    count = [cell[3] for cell in cells]
    ax.legend(
        [drawn[source] for source in order],
        [f"{source} {count.count(source)}" for source in order],
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(order) or 1,
        frameon=False,
        handlelength=1.0,
        handleheight=1.0,
    )
    return ax


def step_probabilities(step: Step, *, most: int = 5) -> "list[Axes]":
    """The most likely tokens of the drafter and of the target at each place of a step, side by side.

    The colour shows what happened to the draft. An accepted draft has a tick, a rejected one a cross, one
    that was not reached dots, and the target's token an arrow.

    Args:
      step: a step of `jaxspec.inspect_steps`.
      most: the number of tokens from each side.

    Returns:
      The axes of a new figure, one for each of the K' drafts and one for the place after them.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
    """
    pyplot = optional("matplotlib.pyplot", extra="plots")
    places = len(step.draft_tokens) + 1
    longest = max(len(step.candidates(place, most)) for place in range(places))
    size = (2.5 * places, 0.9 + 0.34 * longest)
    figure, grid = pyplot.subplots(1, places, figsize=size, layout="constrained", squeeze=False)
    figure.set_facecolor(pyplot.rcParams["axes.facecolor"])
    for place, (ax, fate) in enumerate(zip(grid[0], step.fates, strict=True)):
        rows = step.candidates(place, most)
        colour = FATES[fate]
        for row, found in enumerate(rows):
            ax.barh(row - 0.16, found["target"], height=0.42, color=colour, label="target")
            if found["draft"] is not None:
                ax.barh(row + 0.22, found["draft"], height=0.22, color=colour, alpha=0.45, label="drafter")
        labels = [_printable(found["text"]) + _mark(found, fate) for found in rows]
        ax.set_yticks(range(len(rows)), labels, family="monospace", parse_math=False)
        for label, found in zip(ax.get_yticklabels(), rows, strict=True):
            label.set_fontweight("bold" if found["is_draft"] or found["is_own"] else "normal")
        title = f"draft {place}" if place < places - 1 else "after the drafts"
        ax.set_title(f"{title}, {fate}", loc="left", fontsize="medium")
        ax.set_xlim(0, 1)
        ax.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        ax.set_ylim(longest - 0.4, -0.6)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="x", alpha=0.25)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    handles = dict(zip(*reversed(grid[0][0].get_legend_handles_labels()), strict=True))
    grid[0][0].legend(handles.values(), handles.keys(), loc="lower right", frameon=False, fontsize="small")
    return list(grid[0])


def acceptance(table: Table) -> dict[str, Any]:
    """`acceptance_length`, `acceptance_per_position` and `conditional_acceptance` of a table, and its counts
    if it has them for every position.

    Raises:
      ValueError: the table has no acceptance.
    """
    if isinstance(table, AcceptanceStats):
        return table.to_dict()
    if not isinstance(table, Mapping) or "acceptance_per_position" not in table:
        raise ValueError(f"no acceptance in {type(table).__name__}; give statistics or a benchmark's JSON")
    if "drafted_at" in table:
        return AcceptanceStats.from_dict(table).to_dict()
    rates = list(table["acceptance_per_position"])
    return {
        "acceptance_length": table.get("acceptance_length", 1.0 + sum(rates)),
        "acceptance_per_position": rates,
        "conditional_acceptance": [
            rate / before if before else 0.0 for before, rate in zip([1.0, *rates], rates, strict=False)
        ],
    }


def speeds(result: Mapping[Any, Any]) -> dict[int, float]:
    """Tokens per second by batch size, from a benchmark's JSON or a mapping of that form.

    Raises:
      ValueError: the result has no speeds.
    """
    rows = result.get("rows")
    if rows is None and result and all(isinstance(size, int) for size in result):
        return dict(result)
    if not rows or any("batch" not in row or "tokens_per_second" not in row for row in rows):
        raise ValueError("no speed by batch size; give the JSON of bench_step.py, or tokens/s by batch size")
    return {row["batch"]: row["tokens_per_second"] for row in rows}


def _lay_out(answer: Generation, width: int, most: int) -> list[tuple[int, int, str, str]]:
    """(line, column, text, source) of each token; tokens of one step are adjacent."""
    cells: list[tuple[int, int, str, str]] = []
    row = column = last = 0
    parts = zip(answer.token_texts[:most], answer.token_sources, answer.token_steps, strict=False)
    for text, source, step in parts:
        shown = _printable(text)[: width - 1]
        column += step != last and column > 0
        if column + len(shown) > width:
            row, column = row + 1, 0
        cells.append((row, column, shown, source))
        column, last = column + len(shown), step
        if text.endswith("\n"):
            row, column = row + 1, 0
    return cells


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "⏎" if c == "\n" else "·" for c in text) or "·"


def _mark(candidate: Mapping[str, Any], fate: str) -> str:
    draft = {"accepted": " ✓", "rejected": " ✗"}.get(fate, " …") if candidate["is_draft"] else ""
    return draft + (" ←" if candidate["is_own"] else "")


def _counts(found: Mapping[str, Any]) -> AcceptanceStats | None:
    """The counts behind what `acceptance` returned; None for the rates of a file without counts."""
    return AcceptanceStats.from_dict(found) if "drafted_at" in found else None


def _draw_intervals(ax: "Axes", places: Iterable[int], intervals: Iterable[Interval], i: int) -> None:
    """A thin vertical line for every interval of series i."""
    ends = list(intervals)
    low, high = [end for end, _ in ends], [end for _, end in ends]
    ax.vlines(list(places), low, high, color=_style(i)["color"], linewidth=1.2, alpha=0.6, zorder=2)


def _several(time: Times) -> list[float]:
    return [time] if isinstance(time, int | float) else list(time)


def _axes(ax: "Axes | None", *, width: float = 6.0, height: float = 3.6) -> "Axes":
    pyplot = optional("matplotlib.pyplot", extra="plots")
    if ax is None:
        figure, ax = pyplot.subplots(figsize=(width, height), layout="constrained")
        # Notebooks may make the figure's background transparent: black text is unreadable on a dark page.
        figure.set_facecolor(pyplot.rcParams["axes.facecolor"])
    return cast("Axes", ax)


def _style(i: int) -> dict[str, Any]:
    return {
        "color": PALETTE[i % len(PALETTE)],
        "marker": _MARKERS[i % len(_MARKERS)],
        "linewidth": 2,
        "markersize": 6,
        "clip_on": False,
        "zorder": 3,
    }


def _whole_numbers(ax: "Axes", most: int) -> None:
    step = max(1, -(-most // 12))
    ax.set_xticks(range(0, most, step))
    ax.set_xlim(-0.4, max(most, 1) - 0.6)


def _finish(ax: "Axes", *, legend: bool) -> None:
    ax.grid(axis="y", alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    if legend:
        ax.legend(frameon=False)


def _on(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.45 else "white"
