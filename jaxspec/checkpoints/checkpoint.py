"""What every source of weights is turned into."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxspec.checkpoints.tokenizer import Tokenizer


class TensorSource(Protocol):
    """One tensor of a checkpoint, not read yet.

    Attributes:
      shape: as Hugging Face stores it; a projection is [out, in].
      dtype: what `read` returns; bfloat16 and float8 come from `ml_dtypes`.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def read(self) -> np.ndarray:
        """The values, a new array or a view of the file that cannot be written; asks the file every time."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """A model or a drafter's head on disk: what it is, and how to read it.

    Attributes:
      name: the folder, file or Hub id, for messages.
      config: `config.json`, or the same keys made from the metadata of a GGUF. A GGUF with a
        `rope_freqs.weight` (the llama3 factors, [D/2] divisors of the inverse frequencies) has
        `config["rope_scaling"] = {"rope_type": "factors", "factors": [...]}`.
      tensors: Hugging Face names ("model.layers.0.self_attn.q_proj.weight") to tensors in Hugging Face
        layout. Plain formats are read as stored, quantised GGUF blocks as float32.
      tokenizer: None where the source has none, as heads do.
      eos_token_ids: every token that ends an answer, in the order of the generation config.
    """

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorSource]
    tokenizer: Tokenizer | None = None
    eos_token_ids: tuple[int, ...] = ()
