"""Qwen3-MoE targets: transformers' Qwen3MoeForCausalLM on random weights, every layer's input captured."""

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from goldens.random_target import write_target

CASES: dict[str, dict] = {
    "qwen3-moe": {
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen3-moe-windowed": {
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "sliding_window": 7,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    # transformers ignores both keys for this family.
    "qwen3-moe-layer-types": {
        "norm_topk_prob": True,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "max_window_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}


def tie(model: Qwen3MoeForCausalLM, generator: torch.Generator) -> None:
    """Makes experts 2 and 5 of every layer identical, a tie whose order `torch.topk` leaves open."""
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            for parameter in layer.mlp.parameters():
                parameter.data[5] = parameter.data[2]


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    for seed, (case, changes) in enumerate(CASES.items(), start=301):
        config = Qwen3MoeConfig(**{**SHAPE, **changes}, attn_implementation="eager")
        write_target(root / case, Qwen3MoeForCausalLM(config), seed=seed, prepare=tie)
