"""Every family of target networks, by the `model_type` of its `config.json`."""

from typing import Any, cast

from jaxspec.checkpoints.gguf_architecture import ARCHITECTURES
from jaxspec.config import model
from jaxspec.config.registry import register
from jaxspec.models.decoder import Decoder

FAMILIES: dict[str, type[Decoder]] = cast(Any, model.FAMILIES)


def register_family(model_type: str, family: type[Decoder]) -> None:
    """Makes a family known: its checkpoints are then targets and draft models like any other.

    Args:
      model_type: of its `config.json`.
      family: its class; see `jaxspec.models.decoder.Decoder` and docs/adding-a-family.md.

    Raises:
      ValueError: another class has the name.
      TypeError: it is no class of decoders.
    """
    register(FAMILIES, model_type, family, Decoder)
    # A subclass of a family that GGUFs hold is not what they hold.
    if architecture := vars(family).get("gguf"):
        ARCHITECTURES[architecture.name] = (model_type, architecture)
