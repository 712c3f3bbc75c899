"""DeepSeek-V3 and GLM-4.7-Flash targets: transformers on random weights, every layer's input captured."""

from pathlib import Path

import torch
from transformers import (
    DeepseekV3ForCausalLM,
    Glm4MoeLiteForCausalLM,
    PreTrainedModel,
)

from goldens.random_target import write_target

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 2,
}
# `rms_norm_eps` is large, to differ from the fixed epsilon of the norms of latents.
CASES: dict[str, tuple[type[PreTrainedModel], dict]] = {
    "deepseek-v3": (
        DeepseekV3ForCausalLM,
        {
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 0.8,
                "mscale_all_dim": 0.6,
                "original_max_position_embeddings": 16,  # prompts are longer
            },
        },
    ),
    "deepseek-v3-direct": (
        DeepseekV3ForCausalLM,
        {
            "num_hidden_layers": 2,
            "q_lora_rank": None,
            "rope_interleave": False,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "glm4-moe-lite": (
        Glm4MoeLiteForCausalLM,
        {"rms_norm_eps": 1e-2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
}


def prepare(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Sets router biases that change the choice of experts, and makes some experts identical and so tie.

    Experts 1 and 2 are; with four groups of two, the first and the third group too.
    """
    for layer in model.model.layers:
        if not hasattr(layer.mlp, "experts"):
            continue
        gate = layer.mlp.gate
        gate.weight.data = gate.weight.data * 3
        gate.e_score_correction_bias.data = 0.3 * torch.randn(
            gate.e_score_correction_bias.shape, generator=generator
        )
        for tensor in (gate.weight, gate.e_score_correction_bias, *layer.mlp.experts.parameters()):
            tensor.data[2] = tensor.data[1]
            if gate.num_group == 4:
                tensor.data[4:6] = tensor.data[0:2]


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    for seed, (case, (model, changes)) in enumerate(CASES.items(), start=501):
        config = model.config_class(**{**SHAPE, **changes}, attn_implementation="eager")
        write_target(root / case, model(config), seed=seed, prepare=prepare)
