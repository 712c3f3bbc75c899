"""Checkpoints: opening and writing weights in all supported formats, and their tokenizers."""

from jaxspec.files.checkpoint import Checkpoint, TensorSource
from jaxspec.files.errors import CheckpointError
from jaxspec.files.safetensors.save import save_orbax, save_safetensors
from jaxspec.files.source import open_checkpoint
from jaxspec.files.strict import StrictTensors
from jaxspec.files.text.text_stream import TextStream
from jaxspec.files.text.tokenizer import Tokenizer

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "StrictTensors",
    "TensorSource",
    "TextStream",
    "Tokenizer",
    "open_checkpoint",
    "save_orbax",
    "save_safetensors",
]
