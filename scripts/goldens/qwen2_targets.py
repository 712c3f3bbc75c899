"""Qwen2 targets: transformers' Qwen2ForCausalLM on random weights, every layer's input captured."""

from pathlib import Path

from transformers import Qwen2Config, Qwen2ForCausalLM

from goldens.random_target import write_target

CASES: dict[str, dict] = {
    "qwen2-tied": {
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen2-windowed": {
        "tie_word_embeddings": False,
        "num_key_value_heads": 1,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
}


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    for seed, (case, changes) in enumerate(CASES.items(), start=801):
        config = Qwen2Config(**{**SHAPE, **changes}, attn_implementation="eager")
        write_target(root / case, Qwen2ForCausalLM(config), seed=seed)
