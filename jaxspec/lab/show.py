"""What notebooks show: answers, statistics and steps, as HTML that is readable on dark and light backgrounds,
and as data frames."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from jaxspec.installation import optional

if TYPE_CHECKING:  # optional, and slow to import
    import pandas

COLOURS = {
    "first": "#999999",
    "accepted": "#009E73",
    "recovered": "#D55E00",
    "bonus": "#56B4E9",
    "plain": "#999999",
}
"""The colour of every `TokenSource`, from Okabe and Ito's palette for colour-blind readers."""
FATES = {
    "accepted": COLOURS["accepted"],
    "rejected": COLOURS["recovered"],
    "bonus": COLOURS["bonus"],
    "not reached": COLOURS["plain"],
    "no draft": COLOURS["plain"],
}
"""The colour of every `Fate` of a draft (`jaxspec.inspect_steps`)."""
TITLES = {
    "first": "the pass that read the prompt",
    "accepted": "an accepted draft",
    "recovered": "the target's token in place of a rejected draft",
    "bonus": "the target's token after all drafts were accepted",
    "plain": "the target's token of a step without drafts",
}

_BREAKS = str.maketrans({"\n": "⏎\n", "\t": "⇥"})


def rates(line: str, accepted: Sequence[float], conditional: Sequence[float]) -> str:
    """The counts in one line, and a bar for each draft position: how often its draft was accepted."""
    bars = "".join(
        f"<tr><td>{position}</td><td>{rate:.2f}</td>"
        f"<td>{bar(rate, COLOURS['accepted'], width=120)}</td><td>{of_reached:.2f}</td></tr>"
        for position, (rate, of_reached) in enumerate(zip(accepted, conditional, strict=True))
    )
    head = "<tr><th>position</th><th>accepted</th><th></th><th>of those reached</th></tr>"
    return f"<div>{line}" + (f"<table>{head}{bars}</table></div>" if bars else "</div>")


def answer(line: str, texts: Sequence[str], sources: Sequence[str], steps: Sequence[int]) -> str:
    """An answer's tokens, coloured by source, and a line about it."""
    tokens = "".join(
        token(text, source, f"token {i}, step {step}: {TITLES[source]}")
        for i, (text, source, step) in enumerate(zip(texts, sources, steps, strict=True))
    )
    legend = " ".join(
        token(f"{source} {sources.count(source)}", source, TITLES[source])
        for source in COLOURS
        if source in sources
    )
    return (
        f'<div><div style="white-space:pre-wrap;line-height:1.7;font-family:monospace">{tokens}</div>'
        f'<div style="margin-top:0.6em">{line}<br>{legend}</div></div>'
    )


def step(
    last: str, position: int, fates: Sequence[str], candidates: Sequence[Sequence[Mapping[str, Any]]]
) -> str:
    """A step's likely tokens, for each draft and for the place after them.

    Args:
      last: the text of the token before the step.
      position: its position.
      fates: what happened at each place.
      candidates: of each place, as `Step.candidates` returns them.
    """
    titles = [*(f"draft {i}" for i in range(len(fates) - 1)), "after the drafts"]
    places = "".join(map(_place, titles, fates, candidates))
    return (
        f"<div>after {token(last, 'plain', 'the last token')} at position {position}"
        f'<div style="display:flex;flex-wrap:wrap;gap:1.5em">{places}</div></div>'
    )


def _place(title: str, fate: str, candidates: Sequence[Mapping[str, Any]]) -> str:
    colour = FATES[fate]
    rows = "".join(
        f'<tr><td style="text-align:left">{_candidate(row, fate)}</td>'
        f"<td>{bar(row['draft'] or 0.0, colour + '80')}</td>"
        f"<td>{bar(row['target'], colour)}</td><td>{row['target']:.2f}</td></tr>"
        for row in candidates
    )
    head = "<tr><th></th><th>draft</th><th>target</th><th></th></tr>"
    return f"<div><b>{title}</b>, {fate}<table>{head}{rows}</table></div>"


def _candidate(row: Mapping[str, Any], fate: str) -> str:
    if row["is_own"]:
        own = {"bonus": "bonus", "no draft": "plain"}.get(fate, "recovered")
        return token(row["text"], own, "the target's own")
    if row["is_draft"]:
        return token(row["text"], "accepted" if row["is_accepted"] else "plain", "the draft")
    return escape(row["text"])


def frame(values: Any) -> "pandas.DataFrame":
    """A data frame of rows, or of columns by name.

    Raises:
      ModuleNotFoundError: pandas is not installed.
    """
    return optional("pandas", extra="notebooks").DataFrame(values)


def token(text: str, source: str, title: str) -> str:
    """A token on a background of its source's colour, transparent enough for text of any colour."""
    colour = COLOURS[source]
    return (
        f'<span title="{escape(title)}" style="background:{colour}40;border-bottom:2px solid {colour};'
        f'margin-right:1px">{escape(text.translate(_BREAKS)) or "·"}</span>'
    )


def bar(share: float, colour: str, *, width: int = 80) -> str:
    """A bar of `share` of `width` pixels; `share` is from 0 to 1."""
    return f'<div style="width:{width * share:.0f}px;height:0.8em;background:{colour}"></div>'
