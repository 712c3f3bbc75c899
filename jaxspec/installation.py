"""The distribution that this package was installed from, and what its extras install."""

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

_OWN = "jaxspec_kernels"
"""A package of this distribution alone; on PyPI, `jaxspec` is that of another project."""


def distribution() -> metadata.Distribution | None:
    """The distribution that this package is part of; None if none was installed."""
    found = [each for each in metadata.distributions() if _OWN in _packages(each) and _holds_this(each)]
    # A clone that was installed before the distribution got its name is still there under the older one.
    return min(found, key=lambda each: each.name == "jaxspec", default=None)


def install_command(extra: str) -> str:
    """The command that installs an extra from where this package came from: a clone, a URL or an index."""
    installed = distribution()
    if installed is None:
        return _of_clone(_top(), extra)
    origin = _origin(installed)
    if _is_editable(origin):
        return _of_clone(_path(origin), extra)
    where = "" if origin is None else f" @ {_reference(origin)}"
    return f'pip install "{installed.name}[{extra}]{where}"'


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """What is imported inside is installed by an extra.

    Raises:
      ModuleNotFoundError: it is not installed; the message is one line that says what installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if _package(error) in ("", "jaxspec", _OWN):
            raise
        raise _missing(error, extra) from None


def optional(module: str, *, extra: str) -> ModuleType:
    """Imports a module of a package that an extra installs.

    Raises:
      ModuleNotFoundError: as `needs`, or that of another package, which the module's own needs.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if _package(error) != module.partition(".")[0]:
            raise
        raise _missing(error, extra) from None


def _package(error: ModuleNotFoundError) -> str:
    return (error.name or "").partition(".")[0]


def _missing(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    package = _package(error)
    problem = f"this needs {package}, which is not installed: {install_command(extra)}"
    return ModuleNotFoundError(problem, name=package)


def _packages(installed: metadata.Distribution) -> list[str]:
    return (installed.read_text("top_level.txt") or "").split()


def _holds_this(installed: metadata.Distribution) -> bool:
    """Whether this file is the distribution's, and not one of another clone further up the path."""
    origin = _origin(installed)
    if _is_editable(origin):
        return _path(origin).resolve() == _top()
    return Path(str(installed.locate_file("jaxspec"))).resolve() == Path(__file__).resolve().parent


def _origin(installed: metadata.Distribution) -> dict[str, Any] | None:
    """The contents of `direct_url.json` (PEP 610); None for a distribution from an index."""
    text = installed.read_text("direct_url.json")
    return None if text is None else json.loads(text)


def _is_editable(origin: dict[str, Any] | None) -> bool:
    return bool(origin and origin.get("dir_info", {}).get("editable"))


def _path(origin: dict[str, Any] | None) -> Path:
    return Path(url2pathname(urlsplit(origin["url"]).path)) if origin else _top()


def _reference(origin: dict[str, Any]) -> str:
    """The origin as a requirement has it (PEP 440's direct references)."""
    if "vcs_info" in origin:
        control = origin["vcs_info"]
        return f"{control['vcs']}+{origin['url']}@{control['commit_id']}"
    return origin["url"]


def _top() -> Path:
    """The folder that holds this package: a clone, or that of all packages."""
    return Path(__file__).resolve().parents[1]


def _of_clone(clone: Path, extra: str) -> str:
    here = Path.cwd() == clone.resolve()
    return f'pip install -e "{"." if here else clone}[{extra}]"'
