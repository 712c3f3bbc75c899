"""Models that take images, given text: transformers' classes with their vision towers, random throughout."""

from pathlib import Path
from typing import Any

from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from goldens.random_target import write_target
from goldens.small_targets import LENGTHS, SHAPE

MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "patch_size": 2,
    "out_hidden_size": 32,
}

CASES: dict[str, tuple[type, type, dict[str, Any], tuple[int, ...]]] = {
    "qwen2.5-vl": (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        {
            "text_config": {**SHAPE, "rope_parameters": MROPE},
            "vision_config": {**QWEN_VISION, "fullatt_block_indexes": [0]},
        },
        LENGTHS,
    ),
    "qwen3-vl": (
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        {
            "text_config": {
                **SHAPE,
                "head_dim": 12,
                "rope_parameters": {**MROPE, "mrope_section": [2, 2, 2], "mrope_interleaved": True},
            },
            "vision_config": {
                **QWEN_VISION,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            "tie_word_embeddings": True,
        },
        LENGTHS,
    ),
    "gemma3-vision": (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        {
            "text_config": {
                **SHAPE,
                "head_dim": 8,
                "query_pre_attn_scalar": 8,
                "sliding_window": 7,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "pad_token_id": 0,
            },
            "vision_config": {
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 4,
                "patch_size": 2,
            },
            "mm_tokens_per_image": 1,
        },
        LENGTHS,
    ),
}
SEEDS = dict.fromkeys(CASES, 601)


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    for case, (config, model, changes, lengths) in CASES.items():
        built = model(config(**changes, attn_implementation="eager"))
        write_target(root / case, built, seed=SEEDS[case], greedy=lengths)
