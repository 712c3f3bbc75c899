"""Gemma 3 targets: transformers' Gemma3ForCausalLM on random weights, every layer's input captured."""

import json
from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from goldens.random_target import write_target

CASES: dict[str, dict] = {
    "gemma3": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gemma3-default-rope": {
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "layer_types": ["full_attention", "sliding_attention"],
        "rms_norm_eps": 1e-2,
    },
    # transformers reads no "type" for this family.
    "gemma3-typed-rope": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_scaling": {"type": "linear", "factor": 8.0},
    },
}
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,  # neither the head size nor width / heads
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def center_norms(model: Gemma3ForCausalLM, generator: torch.Generator) -> None:
    """Subtracts 1 from the weights of norms, because Gemma stores them as offsets from 1."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data -= 1


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    for seed, (case, changes) in enumerate(CASES.items(), start=401):
        config = Gemma3TextConfig(**{**SHAPE, **changes}, attn_implementation="eager")
        write_target(root / case, Gemma3ForCausalLM(config), seed=seed, prepare=center_norms)
        if "rope_scaling" in changes:  # as published files have it
            path = root / case / "checkpoint" / "config.json"
            written = json.loads(path.read_text("utf-8"))
            ropes = written.pop("rope_parameters")
            written["rope_theta"] = ropes["full_attention"]["rope_theta"]
            written["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
            written["rope_scaling"] = changes["rope_scaling"]
            path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", "utf-8")
            again = Gemma3TextConfig.from_pretrained(path.parent)
            assert again.rope_parameters == Gemma3ForCausalLM(config).config.rope_parameters
