"""Chat templates, rendered in a separate process with limited time and memory."""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.documents import plain_number
from jaxspec.files.errors import CheckpointError
from jaxspec.files.text.messages import as_messages
from jaxspec.interpreter import python_interpreter

_PROGRAM = Path(__file__).with_name("template_process.py")
_KEPT = ("LD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT", "TZ")
"""Environment variables that Python or the local time may need."""
READY = b"ready\n"
"""The first line of the process."""
_ENDED_BY_TEMPLATES = {
    getattr(signal, name, None) for name in ("SIGPROF", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGTRAP")
}
"""Signals that end a process that computes too long, or whose C code runs out of memory or stack."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that every template may be asked for; it must name any other role that it knows. "developer" is
OpenAI's new name of "system", and the old one for templates that do not name it."""

_SET_HERE = ("messages", "add_generation_prompt")


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Renders a conversation as text.

    The first call starts the process, which takes a tenth of a second; later calls take 0.1 to 0.2 ms. Any
    thread may call it.

    Args:
      template: jinja2 source, as in `tokenizer_config.json`.
      messages: at least one; `as_messages` says which forms are read.
      special_tokens: texts of "bos_token", "eos_token", …, which the template can use.
      add_generation_prompt: whether the text ends where the assistant's answer begins.
      arguments: further variables of the template, for example {"enable_thinking": False} or {"tools": […]}.

    Raises:
      CheckpointError: malformed messages, a role that is neither common nor named in the template, or tool
        calls where it does not name them; an argument that the template does not read; or the template fails,
        rejects them, or needs more than a second of CPU time or 200 MB.
    """
    messages = _known_to(template, as_messages(messages))
    arguments = check_arguments(arguments)
    variables = {
        **special_tokens,
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
        "tools": None,
        "documents": None,
    }
    reply = _ask(template, variables, arguments)
    if "error" in reply and any("tool_calls" in message for message in messages):
        # Some templates, as DeepSeek's, take the arguments of a call as the text that the model wrote.
        again = _ask(template, {**variables, "messages": _with_texts(messages)}, arguments)
        reply = reply if "error" in again else again
    if "unread" in reply:
        raise CheckpointError(f"chat_template_kwargs: the chat template {reply['unread']}")
    if "error" in reply:
        raise CheckpointError(f"the chat template failed: {reply['error']}")
    return reply["text"]


def _ask(template: str, variables: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, str]:
    question = {"template": template, "variables": variables, "arguments": arguments}
    try:
        request = json.dumps(question, ensure_ascii=False, default=_as_number)
    except (TypeError, ValueError, RecursionError) as error:
        what = "messages and chat_template_kwargs" if arguments else "messages"
        raise CheckpointError(f"{what} cannot be written as JSON: {error}") from None
    return _process.ask(request)


def _as_number(value: Any) -> Any:
    """A number of NumPy as Python's."""
    number = plain_number(value)
    if number is value:
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return number


def _known_to(template: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages by the roles that a template knows."""
    read = []
    for index, message in enumerate(messages):
        role = message["role"]
        if f"'{role}'" not in template and f'"{role}"' not in template:
            if role not in ROLES:
                raise CheckpointError(
                    f"messages[{index}]['role']: the chat template knows no role {role!r}; common ones are "
                    f"{', '.join(ROLES)}"
                )
            role = "system" if role == "developer" else role
        if "tool_calls" in message and "tool_calls" not in template:
            raise CheckpointError(f"messages[{index}]['tool_calls']: the chat template reads no tool calls")
        read.append({**message, "role": role})
    return read


def _with_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of their tool calls as JSON."""
    return [
        {**message, "tool_calls": [*map(_with_text, message["tool_calls"])]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def check_arguments(arguments: Any) -> dict[str, Any]:
    """Checks the form of a template's arguments; None becomes none.

    Raises:
      CheckpointError: they are no mapping from names, or set what `render_chat` sets itself.
    """
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise CheckpointError(
            f"chat_template_kwargs must be a mapping from names to values, got {arguments!r}"
        )
    for name in _SET_HERE:
        if name in arguments:
            raise CheckpointError(f"chat_template_kwargs: {name!r} cannot be set, it belongs to the prompt")
    return dict(arguments)


class _TemplateProcess:
    """The process of `template_process.py`, started by the first request, and again if a template ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: str) -> dict[str, str]:
        """Sends a request and returns the reply.

        Raises:
          ConfigError: there is no Python to start it with.
          CheckpointError: the process cannot be started, or ended before it replied.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:  # somebody ended it
                self._end()
            if self._process is None:
                self._process = _start()
            try:
                reply = _exchange(self._process, request.encode("utf-8", "surrogatepass") + b"\n")
            except BaseException:  # an interrupt: the next request would get this reply
                self._end()
                raise
            if not reply.endswith(b"\n"):
                problem = _why_ended(self._process)
                self._end()
                raise CheckpointError(problem)
        return json.loads(reply.decode("utf-8", "surrogatepass"))

    def close(self) -> None:
        """Ends the process; a later request starts another."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """After a fork, in the child: leaves the process to the parent."""
        if self._process is not None:
            self._process.returncode = 0  # it is not a child of this process
        self._lock, self._process = threading.Lock(), None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _start() -> subprocess.Popen[bytes]:
    # -S because importing site takes most of the start-up time; PYTHONPATH below replaces it.
    command = [python_interpreter(), "-S", "-P", str(_PROGRAM)]
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C does not reach it
        )
    except OSError as error:
        raise CheckpointError(
            f"chat templates need a Python process, which cannot be started: {error}"
        ) from None
    assert process.stdout is not None
    if process.stdout.readline() != READY:
        process.kill()
        process.communicate()
        raise CheckpointError(
            f"chat templates need a Python process with jinja2, which {command[0]} cannot become"
        )
    return process


def _why_ended(process: subprocess.Popen[bytes]) -> str:
    """The message about a process that ended instead of replying."""
    status = process.wait()
    if status < 0 and -status not in _ENDED_BY_TEMPLATES:
        name = signal.Signals(-status).name
        hint = ", perhaps because the machine ran out of memory" if name == "SIGKILL" else ""
        return f"the process that renders chat templates was ended by {name}{hint}; try again"
    return "the chat template failed: it took more computing or memory than any template needs"


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return process.stdout.readline()


_process = _TemplateProcess()
atexit.register(_process.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.forget)
