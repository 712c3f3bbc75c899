"""GLM-4 targets: transformers' Glm4ForCausalLM on random weights, every layer's input captured."""

from pathlib import Path

from transformers import Glm4Config, Glm4ForCausalLM

from goldens.random_target import write_target

CASES: dict[str, dict] = {
    "glm4": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        "rms_norm_eps": 1e-2,  # large enough that a wrong epsilon shows
    },
    "glm4-yarn-rope": {
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.75,
        },
    },
}
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    for seed, (case, changes) in enumerate(CASES.items(), start=1001):
        config = Glm4Config(**{**SHAPE, **changes}, attn_implementation="eager")
        write_target(root / case, Glm4ForCausalLM(config), seed=seed)
