"""What every refusal of foreign input is: one line."""

_LONGEST = 1000


class OneLineError(ValueError):
    """A refusal whose message is one line of at most 1,000 printable characters, whatever was put into it."""

    def __init__(self, message: object):
        super().__init__(one_line(message))


def one_line(message: object) -> str:
    """A message without line breaks and unprintable characters, cut where it is long."""
    text = str(message)
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 2]} …"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(text.split()))[:_LONGEST]
