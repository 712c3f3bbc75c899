"""The common form of all checkpoints, whatever their source."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxspec.files.text.tokenizer import Tokenizer


class TensorSource(Protocol):
    """One tensor of a checkpoint, not read yet.

    Attributes:
      shape: in Hugging Face layout; a projection is [out, in].
      dtype: of the array that `read` returns; bfloat16 and float8 are those of `ml_dtypes`.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def read(self) -> np.ndarray:
        """The values, as a new array or a read-only view of the file; reads the file at every call."""
        ...


def usual_dtype(tensors: Iterable[TensorSource]) -> str:
    """The name of the floating-point dtype that most entries of the tensors have."""
    entries: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype.kind not in "biu":
            entries[tensor.dtype.name] += math.prod(tensor.shape)
    return max(entries, key=lambda name: entries[name], default="float32")


@dataclass(frozen=True)
class Checkpoint:
    """A model or a drafter's head on disk.

    Attributes:
      name: the folder, file or Hub id, for messages.
      config: the contents of `config.json`, or the same keys derived from the metadata of a GGUF. For a GGUF
        with a tensor `rope_freqs.weight` (the llama3 factors, [D/2] divisors of the inverse frequencies),
        `config["rope_scaling"]` is `{"rope_type": "factors", "factors": [...]}`.
      tensors: tensors in Hugging Face layout by their Hugging Face names
        ("model.layers.0.self_attn.q_proj.weight"). Unquantized formats are read as stored, quantized GGUF
        blocks as float32.
      tokenizer: None if the source has none, as heads do.
      eos_token_ids: all tokens that end an answer, in the order of the generation config.
      generation: the contents of `generation_config.json`.
    """

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorSource]
    tokenizer: Tokenizer | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation: Mapping[str, Any] = field(default_factory=dict)
