"""The names of a text-only model, for checkpoints that give its tensors others."""

from collections.abc import Mapping
from dataclasses import replace

from jaxspec.files import Checkpoint
from jaxspec.models.deepseek_v4_names import has_published_names, module_name

_RENAMED = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHERS = tuple(
    f"{model}{part}."
    for model in ("", "model.")
    for part in (
        *("vision_tower", "multi_modal_projector", "visual"),
        *("audio_tower", "embed_vision", "embed_audio"),
    )
)
_OTHER_TOPS = {
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "backbone.": "model.",
}
"""How names of Nemotron-H's files begin, and those of other families."""


def language_model(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the tensor names of a text-only model and without its vision tensors.

    Knows the names of published files and of transformers 5, and names without "model." in front: those of
    models that were saved without their output projection.
    """
    if has_published_names(checkpoint):
        tensors = {module_name(name): tensor for name, tensor in checkpoint.tensors.items()}
        return replace(checkpoint, tensors=tensors)
    if has_bare_names(checkpoint):
        tensors = {
            name if name.startswith("lm_head.") else f"model.{name}": tensor
            for name, tensor in checkpoint.tensors.items()
        }
        return replace(checkpoint, tensors=tensors)
    if "backbone.embeddings.weight" in checkpoint.tensors:
        tensors = {_renamed(name, _OTHER_TOPS): tensor for name, tensor in checkpoint.tensors.items()}
        return replace(checkpoint, tensors=tensors)
    tensors = {
        _renamed(name, _RENAMED): tensor
        for name, tensor in checkpoint.tensors.items()
        if not name.startswith(_OTHERS)
    }
    return replace(checkpoint, tensors=tensors)


def has_bare_names(checkpoint: Checkpoint) -> bool:
    """Whether a whole model's tensors have no "model." in front, as those of draft heads have none."""
    names = checkpoint.tensors
    is_head = "fc.weight" in names or "layers.0.hidden_norm.weight" in names
    return not is_head and "layers.0.input_layernorm.weight" in names and "norm.weight" in names


def _renamed(name: str, beginnings: Mapping[str, str]) -> str:
    """The name with the first of these beginnings that it has replaced."""
    for old, new in beginnings.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
