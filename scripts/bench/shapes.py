"""Networks of real shapes with random weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxspec.config import ModelConfig
from jaxspec.drafters.eagle3 import Eagle3, Eagle3Config, default_capture
from jaxspec.drafters.none import NoDrafter
from jaxspec.engine.step import Models
from jaxspec.models.llama import Llama


@dataclass(frozen=True)
class Shape:
    """A target and its EAGLE-3 head of one layer.

    Attributes:
      target: the keys of its `config.json`.
      draft_vocab_size: of the head.
    """

    target: Mapping[str, Any]
    draft_vocab_size: int


SHAPES: Mapping[str, Shape] = {
    "smollm2-135m": Shape(
        target={
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "max_position_embeddings": 1 << 17,
        },
        draft_vocab_size=8192,
    ),
    "llama3-8b": Shape(
        target={
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 1 << 17,
        },
        draft_vocab_size=32000,
    ),
    "tiny": Shape(
        target={
            "model_type": "llama",
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1 << 17,
        },
        draft_vocab_size=128,
    ),
}


def build_models(shape: Shape, *, num_drafts: int, page_size: int, dtype: jnp.dtype) -> Models:
    """A target with an EAGLE-3 head that drafts `num_drafts` tokens; with 0 a target alone."""
    config = ModelConfig.from_hf(shape.target)
    target = Llama(config, dtype=dtype, rngs=nnx.Rngs(0))
    if not num_drafts:
        return Models(target, NoDrafter())
    head = Eagle3Config(
        layers=replace(config, num_hidden_layers=1, layer_types=("full_attention",)),
        draft_vocab_size=shape.draft_vocab_size,
        target_hidden_size=config.hidden_size,
        capture=default_capture(config.num_hidden_layers),
    )
    drafter = Eagle3(
        head, num_speculative_tokens=num_drafts, page_size=page_size, dtype=dtype, rngs=nnx.Rngs(1)
    )
    return Models(target, drafter)
