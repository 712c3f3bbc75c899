"""The registry of target families, by the `model_type` of their `config.json`."""

from dataclasses import replace
from typing import Any, cast

from jaxspec.config import model
from jaxspec.files.gguf.architecture import ARCHITECTURES
from jaxspec.models.decoder import Decoder
from jaxspec.registry import register

FAMILIES: dict[str, type[Decoder]] = cast(Any, model.FAMILIES)


def register_family(model_type: str, family: type[Decoder]) -> None:
    """Registers a family, so that its checkpoints can be loaded as targets and draft models.

    Args:
      model_type: the `model_type` of its `config.json`.
      family: a subclass of `Decoder`; see docs/adding-a-family.md.

    Raises:
      ValueError: another class is registered under this name.
      TypeError: `family` is not a subclass of `Decoder`.
    """
    register(FAMILIES, model_type, family, Decoder)
    # Only the class's own `gguf`: an inherited one belongs to the parent's family.
    if architecture := vars(family).get("gguf"):
        for name in filter(None, (architecture.name, architecture.other_name)):
            ARCHITECTURES[name] = (model_type, replace(architecture, name=name))
