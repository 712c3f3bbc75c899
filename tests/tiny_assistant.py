"""Gemma 4 as a target of `tiny_models`, and an assistant for it."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file
from tiny_models import write_folder

from jaxspec.config import ModelConfig
from jaxspec.drafters.kinds.gemma4_assistant import Gemma4Assistant, Gemma4AssistantConfig
from jaxspec.weights.loading import declared
from jaxspec.weights.parameters import NoKeys

GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 6,
    "num_kv_shared_layers": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 8.0,
    "tie_word_embeddings": True,
}
"""Heads of two sizes, a window, shared keys and values, and bounded logits, as changes to
`tiny_models.TARGET`."""


def write_assistant(folder: Path, target: Path, *, clusters: int = 0, seed: int = 5) -> Path:
    """Writes an assistant with two layers that repeats the last token.

    `clusters` groups the tokens at random, and two thirds of the groups are scored.
    """
    rng = np.random.default_rng(seed)
    own = json.loads((target / "config.json").read_text("utf-8"))
    weights = load_file(target / "model.safetensors")
    rows, width = weights["model.embed_tokens.weight"], own["hidden_size"]
    text = {**own, "num_hidden_layers": 2, "layer_types": own["layer_types"][:2], "num_kv_shared_layers": 2}
    config = {"model_type": "gemma4_assistant", "backbone_hidden_size": width, "text_config": text}
    if clusters:
        config |= {"use_ordered_embeddings": True, "num_centroids": clusters}
        config["centroid_intermediate_top_k"] = 2 * clusters // 3
    shape = Gemma4AssistantConfig.from_hf(config, {}, ModelConfig.from_hf(own))
    model = nnx.eval_shape(
        lambda: Gemma4Assistant(shape, num_speculative_tokens=1, dtype=jnp.float32, rngs=NoKeys())
    )
    tensors: dict[str, np.ndarray] = {}
    for name, size in dict(t for _, source in declared(model) for t in source.tensors).items():
        matrix = rng.normal(size=size) * size[-1] ** -0.5
        # What a layer adds goes through a norm.
        quiet = (
            0.2
            if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight"))
            else 1
        )
        tensors[name] = (matrix if len(size) == 2 else quiet * np.ones(size)).astype(np.float32)
    tensors |= {
        "model.embed_tokens.weight": rows,
        "model.norm.weight": weights["model.norm.weight"],
        "pre_projection.weight": np.eye(width, 2 * width, width, dtype=np.float32),
        "post_projection.weight": np.eye(width, dtype=np.float32),
    }
    if clusters:
        ordering = rng.permutation(len(rows))
        means = rows[ordering].reshape(clusters, -1, width).mean(axis=1)
        tensors |= {
            "masked_embedding.token_ordering": ordering,
            "masked_embedding.centroids.weight": means.astype(np.float32),
        }
    return write_folder(folder, config, tensors)
