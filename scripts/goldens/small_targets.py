"""Targets of families that differ from Llama in a few places, with greedy answers beside their logits."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from goldens.random_target import write_target

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LENGTHS = (48, 33, 17, 5)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0],
    "long_factor": [1.0, 1.5, 2.2, 3.1, 4.5, 6.0],
}

CASES: dict[str, tuple[type, type, dict[str, Any], tuple[int, ...]]] = {
    "olmo2": (
        Olmo2Config,
        Olmo2ForCausalLM,
        {"num_attention_heads": 6, "hidden_size": 48, "rms_norm_eps": 1e-2, "attention_bias": True},
        LENGTHS,
    ),
    "olmo3": (
        Olmo3Config,
        Olmo3ForCausalLM,
        {
            "num_hidden_layers": 5,
            "sliding_window": 7,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
        LENGTHS,
    ),
    "smollm3": (
        SmolLM3Config,
        SmolLM3ForCausalLM,
        {"num_hidden_layers": 5, "rms_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True},
        LENGTHS,
    ),
    "smollm3-windowed": (
        SmolLM3Config,
        SmolLM3ForCausalLM,
        {
            "no_rope_layers": [0, 1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 7,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
        LENGTHS,
    ),
    "phi3": (
        Phi3Config,
        Phi3ForCausalLM,
        {
            "hidden_size": 64,
            "num_key_value_heads": 1,
            "sliding_window": 7,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
            },
        },
        LENGTHS,
    ),
    # transformers takes the long factors past 32 positions, and the short ones up to 128.
    "phi3-long": (
        Phi3Config,
        Phi3ForCausalLM,
        {
            "hidden_size": 64,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 32,
            "rope_parameters": LONG,
        },
        (48, 44, 40, 36),
    ),
    "phi3-short": (
        Phi3Config,
        Phi3ForCausalLM,
        {
            "hidden_size": 64,
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 128,
            "rope_parameters": LONG,
        },
        LENGTHS,
    ),
    "granite": (
        GraniteConfig,
        GraniteForCausalLM,
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        LENGTHS,
    ),
    "lfm2": (
        Lfm2Config,
        Lfm2ForCausalLM,
        {
            "num_hidden_layers": 4,
            "full_attn_idxs": [2],
            "norm_eps": 1e-2,
            "block_multiple_of": 20,
            "block_ffn_dim_multiplier": 1.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
        LENGTHS,
    ),
    "lfm2-biased": (
        Lfm2Config,
        Lfm2ForCausalLM,
        {
            "layer_types": ["full_attention", "conv", "full_attention"],
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
            "num_key_value_heads": 1,
        },
        LENGTHS,
    ),
    "minimax-m2": (
        MiniMaxM2Config,
        MiniMaxM2ForCausalLM,
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 16,
            "head_dim": 12,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
            },
        },
        LENGTHS,
    ),
}
SEEDS = dict.fromkeys(CASES, 501) | {"olmo3": 502, "smollm3": 502, "phi3-long": 504, "lfm2-biased": 502}


def prepare(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Sets router biases that change the choice of experts, and lets convolutions see far."""
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.data = 0.3 * torch.randn(bias.shape, generator=generator)
    for name, weight in model.named_parameters():
        if name.endswith("conv.conv.weight"):
            weight.data *= 3


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    for case, (config, model, changes, lengths) in CASES.items():
        built = model(config(**{**SHAPE, **changes}, attn_implementation="eager"))
        write_target(root / case, built, seed=SEEDS[case], prepare=prepare, greedy=lengths)
