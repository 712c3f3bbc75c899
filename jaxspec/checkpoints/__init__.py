"""Checkpoints: opening and writing weights in all supported formats, and their tokenizers."""

from jaxspec.checkpoints.checkpoint import Checkpoint, TensorSource
from jaxspec.checkpoints.errors import CheckpointError
from jaxspec.checkpoints.save import save_orbax, save_safetensors
from jaxspec.checkpoints.source import open_checkpoint
from jaxspec.checkpoints.strict import StrictTensors
from jaxspec.checkpoints.text_stream import TextStream
from jaxspec.checkpoints.tokenizer import Tokenizer

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
