"""Chat templates: jinja2 in a sandbox, with the names that Hugging Face templates rely on."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxspec.checkpoints.errors import CheckpointError


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, str]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool,
) -> str:
    """The text of a conversation.

    Args:
      template: jinja2 source, as in `tokenizer_config.json`; never run outside the sandbox.
      messages: at least one {"role": ..., "content": ...}, both strings.
      special_tokens: "bos_token", "eos_token", … as the template sees them.
      add_generation_prompt: whether the text ends where the assistant's answer begins.

    Raises:
      CheckpointError: messages of another form, or the template fails or refuses them.
    """
    check_messages(messages)
    try:
        return _compile(template).render(
            **special_tokens,
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
        )
    except Exception as error:  # whatever the model's own program raises
        raise CheckpointError(f"the chat template failed: {error}") from None


def check_messages(messages: Any) -> None:
    """Refuses what is not a list of {"role": string, "content": string}, naming the message.

    Raises:
      CheckpointError: another form, or an empty list.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise CheckpointError(f"messages must be a list of role and content, got {type(messages).__name__}")
    if not messages:
        raise CheckpointError("messages is empty")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise CheckpointError(f"messages[{index}] must be a dict, got {type(message).__name__}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise CheckpointError(
                    f"messages[{index}][{key!r}] must be a string, got {message.get(key)!r}"
                )


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training masks; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=4)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(template)


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
