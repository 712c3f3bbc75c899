"""Nemotron-H targets: transformers' NemotronHForCausalLM on random weights, every layer's input captured."""

from pathlib import Path
from typing import Any

import torch
from transformers import NemotronHConfig, NemotronHForCausalLM

from goldens.qwen3_next_targets import add_answers
from goldens.random_target import write_target

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "ssm_state_size": 8,
    "mamba_num_heads": 6,
    "mamba_head_dim": 4,
    "n_groups": 2,
    "chunk_size": 16,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
CASES: dict[str, dict[str, Any]] = {
    "nemotron-h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "routed_scaling_factor": 2.5,
        "n_group": 2,
        "topk_group": 1,
    },
    "nemotron-h-latent": {
        "layers_block_type": ["moe", "linear_attention", "full_attention", "mlp", "linear_attention"],
        "n_groups": 3,
        "mlp_bias": True,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "moe_latent_size": 12,
        "norm_topk_prob": False,
    },
    "nemotron-h-dense": {
        "layers_block_type": ["full_attention", "linear_attention", "mlp", "linear_attention"],
        "conv_kernel": 3,
        "use_conv_bias": False,
        "use_bias": True,
        "mlp_bias": True,
        "n_groups": 1,
        "layer_norm_epsilon": 1e-2,
        "tie_word_embeddings": True,
    },
}


def prepare(model: NemotronHForCausalLM, generator: torch.Generator) -> None:
    """States that remember for different times, biases on the choice of experts, and experts that tie."""
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("A_log"):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 1.5 - 2
        elif name.endswith(("dt_bias", "mixer.D")):
            parameter.data = torch.randn(parameter.shape, generator=generator)
        elif name.endswith("e_score_correction_bias"):
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if "mixer.experts." in name or ".mixer.gate." in name:
            parameter.data[5] = parameter.data[2]


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    for seed, (case, changes) in enumerate(CASES.items(), start=1201):
        model = NemotronHForCausalLM(NemotronHConfig(**{**SHAPE, **changes}, attn_implementation="eager"))
        write_target(root / case, model, seed=seed, prepare=prepare)
        add_answers(root / case, model, seed)
