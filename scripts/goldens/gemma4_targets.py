"""Gemma 4 targets: transformers' Gemma4ForCausalLM on random weights, every layer's input captured."""

from pathlib import Path
from typing import Any

import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, PreTrainedModel

from goldens.random_target import write_target
from goldens.small_targets import LENGTHS, SHAPE

CASES: dict[str, tuple[type, type, dict[str, Any], tuple[int, ...]]] = {
    "gemma4": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 20.0,
            "sliding_window": 7,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000.0,
                },
            },
        },
        LENGTHS,
    ),
    "gemma4-moe": (
        Gemma4TextConfig,
        Gemma4ForCausalLM,
        {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "head_dim": 8,
            "global_head_dim": 12,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "use_bidirectional_attention": "vision",
            "sliding_window": 7,
        },
        LENGTHS,
    ),
}
SEEDS = dict.fromkeys(CASES, 701) | {"gemma4-moe": 701}


def prepare(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draws the factors of layers, which are no parameters, and keeps those of experts near 1."""
    for layer in model.model.layers:
        layer.layer_scalar.data = 0.7 + 0.3 * torch.rand(1, generator=generator)
        if layer.enable_moe_block:
            for scale in (layer.router.scale, layer.router.per_expert_scale):
                scale.data += 1


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    for case, (config, model, changes, lengths) in CASES.items():
        built = model(config(**{**SHAPE, "pad_token_id": 0, **changes}, attn_implementation="eager"))
        write_target(root / case, built, seed=SEEDS[case], prepare=prepare, greedy=lengths)
