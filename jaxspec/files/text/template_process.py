"""The process that renders chat templates: requests on stdin, replies on stdout, one line of JSON each.

A template is a program from an untrusted checkpoint. jinja2's sandbox denies it files and Python's internals,
but not endless loops or unlimited memory. Counting loops, calls or pieces of output would miss
`'x' * 10**10`, deeply nested lists turned into text, and what jinja2 computes while it compiles; limits of
the operating system cover them all. `chat_template.py` runs this file directly, since importing jaxspec takes
seconds.
"""

import json
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

CPU_SECONDS = 1.0
"""CPU time for one conversation; real templates take milliseconds."""

MEMORY = 200 * 10**6
"""Bytes of address space, including Python and jinja2, which take 25 MB, and the conversation."""


class UnreadError(ValueError):
    """A template was given an argument that it does not read."""


def main() -> None:
    _limit_memory()
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        _limit_time(CPU_SECONDS)
        try:
            request = json.loads(line.decode("utf-8", "surrogatepass"))
            reply = {"text": render(request["template"], request["variables"], request["arguments"])}
        except UnreadError as error:
            reply = {"unread": str(error)}
        except Exception as error:  # a template can raise anything
            reply = {"error": str(error) or type(error).__name__}
        encoded = json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
        _limit_time(0)
        sys.stdout.buffer.write(encoded + b"\n")
        sys.stdout.buffer.flush()


def render(template: str, variables: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Renders a template with its variables, and with arguments, each of which it must read."""
    environment = _environment()
    compiled, read, expected = _compile(environment, template)
    unread = [name for name in arguments if name not in read]
    if unread:
        set_here = {name for name, value in variables.items() if value is not None}
        known = ", ".join(sorted(expected - set_here - set(environment.globals))) or "none"
        raise UnreadError(f"does not read {unread[0]!r}; its arguments are: {known}")
    return compiled.render({**variables, **arguments})


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not Unix
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(seconds: float) -> None:
    """Ends this process after so many more seconds of CPU time; 0 removes the limit."""
    if hasattr(signal, "setitimer"):  # Unix
        signal.setitimer(signal.ITIMER_PROF, seconds)


class _GenerationTag(jinja2.ext.Extension):
    """Renders only the content of `{% generation %}`, which marks assistant text for training masks."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


@lru_cache(maxsize=4)
def _compile(environment: jinja2.Environment, template: str) -> tuple[jinja2.Template, set[str], set[str]]:
    """A template, the variables that it reads, and those of them that it expects from outside.

    jinja2 takes a variable that only a branch sets for one that is read from outside. It is expected if the
    template asks whether it is defined, or has a default for it.
    """
    tree = environment.parse(template)
    read = jinja2.meta.find_undeclared_variables(tree)
    names = tree.find_all(jinja2.nodes.Name)
    own = {name.name for name in names if name.ctx == "store"}
    asked: list[Any] = [
        test.node for test in tree.find_all(jinja2.nodes.Test) if test.name in ("defined", "undefined")
    ]
    asked += [each.node for each in tree.find_all(jinja2.nodes.Filter) if each.name in ("default", "d")]
    expected = {node.name for node in asked if isinstance(node, jinja2.nodes.Name)}
    return environment.from_string(template), read, read - (own - expected)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which templates do not expect.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
