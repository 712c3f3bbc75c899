"""EAGLE-1 heads with the config of `eagle/train/EAGLE-LLaMA3-Instruct-8B` and the tensors of `cnets1.py`."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from goldens.draft_head import DraftHead, draft, eagle1_step
from goldens.head_cases import DRAFTS, SAFEAILAB, Target, layer_shapes, write_head, write_outputs
from goldens.targets import random_weight

# Without the key `bias`, as in the heads for Llama 2 and Vicuna, `fc` has one.
CASES: dict[str, dict] = {
    "eagle1": {"target": "llama-untied-llama3-rope", "config": {"bias": False, "rope_theta": 5000.0}},
    "eagle1-fc-bias": {"target": "llama-tied", "config": {}, "own_embedding": True},
    "eagle1-two-layers": {"target": "llama-tied", "config": {"bias": False, "num_hidden_layers": 2}},
}


def config_json(case: str, target: Target) -> dict:
    """The keys of the published config."""
    sizes = {"hidden_size": target.config.hidden_size, "vocab_size": target.config.vocab_size}
    return {**SAFEAILAB, **sizes, **CASES[case]["config"]}


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all trained tensors in the file."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * (width // config["num_attention_heads"])
    names: dict[str, tuple[int, ...]] = {"fc.weight": (width, 2 * width)}
    if config.get("bias", True):
        names["fc.bias"] = (width,)
    for layer in range(config["num_hidden_layers"]):
        if layer:
            names[f"layers.{layer}.input_layernorm.weight"] = (width,)
        names |= layer_shapes(f"layers.{layer}", width, inner, keys, width)
    return names


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    for index, (case, chosen) in enumerate(CASES.items()):
        generator = torch.Generator().manual_seed(301 + index)
        target = Target(chosen["target"])
        config = config_json(case, target)
        tensors: dict[str, Tensor] = {
            name: random_weight(name, shape, generator) for name, shape in shapes(config).items()
        }
        if chosen.get("own_embedding"):
            name = "embed_tokens.weight"
            tensors[name] = random_weight(name, target.embedding.shape, generator)
        head = DraftHead(LlamaConfig(**config), {"embed_tokens.weight": target.embedding, **tensors})
        step = partial(eagle1_step, head, target.lm_head)
        results = draft(step, target.tokens, target.normed, None, DRAFTS)
        write_head(root / case, config, tensors)
        write_outputs(root / case, target, target.normed, results)
