"""A target of `tiny_models` with a multi-token-prediction layer in its checkpoint."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file
from tiny_models import write_folder

from jaxspec.config import ModelConfig
from jaxspec.drafters.kinds.mtp import Mtp, layer_names
from jaxspec.weights.loading import declared
from jaxspec.weights.parameters import NoKeys

LATENT: dict[str, Any] = {
    "model_type": "glm4_moe_lite",
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
"""Latent attention, as changes to `tiny_models.TARGET`."""
COMPRESSED: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "num_key_value_heads": 1,
    "head_dim": 8,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 12,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 10},
    "sliding_window": 6,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 4,
    "o_groups": 4,
    "o_lora_rank": 6,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "num_hash_layers": 1,
}
"""A window and compressed entries, of which an indexer chooses in the first layer; likewise."""


def write_with_mtp(folder: Path, target: Path, *, seed: int = 3) -> Path:
    """Writes a copy of a target with such a layer, which repeats the last token."""
    rng = np.random.default_rng(seed)
    json_config = json.loads((target / "config.json").read_text("utf-8"))
    tensors = load_file(target / "model.safetensors")
    config = ModelConfig.from_hf(json_config)
    names, width = layer_names(config), config.hidden_size
    made = Mtp.for_model(config)
    model = nnx.eval_shape(lambda: made(config, num_speculative_tokens=1, dtype=jnp.float32, rngs=NoKeys()))
    for tensor, shape in dict(t for _, source in declared(model) for t in source.tensors).items():
        matrix = rng.normal(size=shape) * shape[-1] ** -0.5
        quiet = 0.2 if tensor.endswith(("o_proj.weight", "o_b_proj.weight", "down_proj.weight")) else 1.0
        tensors[tensor] = (quiet * matrix if len(shape) == 2 else np.ones(shape)).astype(np.float32)
    if config.streams:
        tensors[f"{names.root}h_proj.weight"] = np.eye(width, dtype=np.float32)
        tensors[f"{names.projection}.weight"] *= 0
        for part in ("fn", "base", "scale"):
            tensors[f"{names.root}hc_head.hc_{part}"] = tensors[f"model.hc_head.hc_{part}"].copy()
    else:
        tensors[f"{names.projection}.weight"] = np.eye(width, 2 * width, width, dtype=np.float32)
    tensors[f"{names.root}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors[f"{names.root}shared_head.head.weight"] = tensors["lm_head.weight"].copy()
    return write_folder(folder, json_config, tensors)
