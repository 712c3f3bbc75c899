"""Gemma 4's assistants: transformers' Gemma4AssistantForCausalLM with random weights, which drafts for a
target's golden through transformers' own generator of candidates. Needs transformers 5.24.0: 5.23.0 cannot
build one.

The generator's first proposal after a single token is compared, whose window has W keys before the token;
after a whole prompt it would have W + 1. Later proposals would see keys of rejected drafts.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
)
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from goldens.head_cases import GOLDENS, ROWS, greedy_drafts
from goldens.targets import random_weight

DRAFTS, SHORT = 7, 5
LAYERS: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "max_position_embeddings": 128,
    "sliding_window": 7,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "gemma4-assistant": {
        "target": "gemma4",
        "layers": {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "global_head_dim": 16,
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
    },
    "gemma4-assistant-clusters": {
        "target": "gemma4-moe",
        "layers": {
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "global_head_dim": 12,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        "assistant": {
            "use_ordered_embeddings": True,
            "num_centroids": 12,
            "centroid_intermediate_top_k": 3,
        },
    },
}
SEEDS = {"gemma4-assistant": 801, "gemma4-assistant-clusters": 802}


def build(case: str) -> Gemma4AssistantForCausalLM:
    """The assistant with random weights."""
    chosen = CASES[case]
    text = Gemma4TextConfig(**LAYERS, **chosen["layers"], attn_implementation="eager")
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=32, **chosen.get("assistant", {}))
    config._attn_implementation = "eager"
    model = Gemma4AssistantForCausalLM(config)
    generator = torch.Generator().manual_seed(SEEDS[case])
    for name, parameter in model.named_parameters():
        parameter.data = random_weight(name, parameter.shape, generator)
    for layer in model.model.layers:
        layer.layer_scalar.data = 0.7 + 0.3 * torch.rand(1, generator=generator)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.data = torch.randperm(96, generator=generator)
    return model.eval()


@torch.no_grad()
def drafts(assistant: Gemma4AssistantForCausalLM, target: Gemma4ForCausalLM, tokens: Tensor) -> Tensor:
    """Logits [K, V] of K greedy drafts after `tokens` [S + 1], of which the target has read S."""
    asked = {"output_hidden_states": True, "return_shared_kv_states": True, "use_cache": True}
    cache = DynamicCache(config=target.config)
    target(tokens[None, :-2], cache=cache, use_cache=True)
    outputs = target(tokens[None, -2:-1], cache=cache, **asked)
    config = GenerationConfig(max_length=1000)
    assistant.generation_config = deepcopy(config)
    assistant.generation_config.num_assistant_tokens = DRAFTS
    candidates = SinglePositionMultiTokenCandidateGenerator(assistant, target.get_input_embeddings(), config)
    ids, logits = candidates.get_candidates(
        tokens[None], {}, model_outputs=outputs, is_first_iteration=False, n_last_matches=0
    )
    results = greedy_drafts(logits[0], None)
    torch.testing.assert_close(ids[:, len(tokens) :], results["draft_tokens"])
    return logits


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    for case, chosen in CASES.items():
        folder = GOLDENS / chosen["target"]
        target = Gemma4ForCausalLM.from_pretrained(folder / "checkpoint", attn_implementation="eager").eval()
        ids = load_file(folder / "outputs.safetensors")["input_ids"][0]
        assistant = build(case)
        assistant.save_pretrained(root / case / "checkpoint")
        logits = {
            "draft_logits": drafts(assistant, target, ids[: ROWS + 1]),
            "short_draft_logits": drafts(assistant, target, ids[: SHORT + 1]),
        }
        tensors = {"token_ids": ids[None, 1 : ROWS + 1], **logits}
        save_file({name: t.contiguous() for name, t in tensors.items()}, root / case / "outputs.safetensors")
