"""Extracts the language model of a vision-language checkpoint."""

from dataclasses import replace

from jaxspec.checkpoints import Checkpoint

_RENAMED = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHERS = tuple(
    f"{model}{part}." for model in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
)


def language_model(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the tensor names of a text-only model and without its vision tensors.

    Knows the names of published files and those of transformers 5. A checkpoint whose `config.json` has no
    `text_config` is returned unchanged.
    """
    if "text_config" not in checkpoint.config:
        return checkpoint
    tensors = {
        _text_name(name): tensor
        for name, tensor in checkpoint.tensors.items()
        if not name.startswith(_OTHERS)
    }
    return replace(checkpoint, tensors=tensors)


def _text_name(name: str) -> str:
    for prefix, text in _RENAMED.items():
        if name.startswith(prefix):
            return text + name.removeprefix(prefix)
    return name
