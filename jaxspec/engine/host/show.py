"""Renders answers and statistics for notebooks, as HTML that is readable on dark and light backgrounds."""

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxspec.engine.host.request import AcceptanceStats, Generation

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


def stats(stats: "AcceptanceStats") -> str:
    """The counts in one line, and a bar for each draft position."""
    rows = zip(stats.acceptance_per_position, stats.conditional_acceptance, strict=True)
    bars = "".join(
        f"<tr><td>{position}</td><td>{rate:.2f}</td>"
        f"<td>{bar(rate, COLOURS['accepted'], width=120)}</td><td>{conditional:.2f}</td></tr>"
        for position, (rate, conditional) in enumerate(rows)
    )
    head = "<tr><th>position</th><th>accepted</th><th></th><th>of those reached</th></tr>"
    return (
        f"<div><b>{stats.acceptance_length:.2f} tokens a step</b> · {stats.steps} steps, "
        f"{stats.draft_steps} with drafts · {stats.accepted} of {stats.drafted} drafts accepted"
        + (f"<table>{head}{bars}</table></div>" if bars else "</div>")
    )


def generation(answer: "Generation") -> str:
    """The tokens, coloured by source, and a line about the answer."""
    sources = answer.token_sources
    tokens = "".join(
        token(text, source, f"token {i}, step {step}: {TITLES[source]}")
        for i, (text, source, step) in enumerate(
            zip(answer.token_texts, sources, answer.token_steps, strict=True)
        )
    )
    legend = " ".join(
        token(f"{source} {sources.count(source)}", source, TITLES[source])
        for source in COLOURS
        if source in sources
    )
    error = f" · {escape(answer.error)}" if answer.error else ""
    return (
        f'<div><div style="white-space:pre-wrap;line-height:1.7;font-family:monospace">{tokens}</div>'
        f'<div style="margin-top:0.6em">{len(answer.token_ids)} tokens in {answer.stats.steps} steps, '
        f"{answer.stats.acceptance_length:.2f} a step with drafts · {escape(answer.finish_reason)}{error}"
        f"<br>{legend}</div></div>"
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
