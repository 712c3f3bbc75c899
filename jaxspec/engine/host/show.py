"""Renders answers and statistics for notebooks, as HTML that is readable on dark and light backgrounds."""

from collections.abc import Sequence
from html import escape

COLOURS = {
    "first": "#999999",
    "accepted": "#009E73",
    "recovered": "#D55E00",
    "bonus": "#56B4E9",
    "plain": "#999999",
}
"""The colour of every `TokenSource`, from Okabe and Ito's palette for colour-blind readers."""
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
