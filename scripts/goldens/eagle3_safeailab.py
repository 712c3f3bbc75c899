"""EAGLE-3 heads in SafeAILab's format: `midlayer.*`, with the config of `eagle/traineagle3/config.json`."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from goldens.draft_head import DraftHead, draft, eagle3_step, fuse
from goldens.head_cases import (
    DRAFTS,
    SAFEAILAB,
    Target,
    layer_shapes,
    vocabulary_map,
    write_head,
    write_outputs,
)
from goldens.targets import random_weight

# The format does not state the captures; their default (2, L/2, L-3) needs a target of seven layers.
TARGET = "llama-seven-layers"
CASES: dict[str, dict] = {
    "eagle3-safeailab": {"hidden_size": 16},
    "eagle3-safeailab-own-embedding": {"hidden_size": 16, "own_embedding": True},
    "eagle3-safeailab-other-width": {"hidden_size": 24, "target_hidden_size": 16, "own_embedding": True},
}


def config_json(case: str, vocab_size: int) -> dict:
    """The keys of the published config: no rope, no head size, no `bias`."""
    sizes = {name: size for name, size in CASES[case].items() if name != "own_embedding"}
    return {**SAFEAILAB, "vocab_size": vocab_size, "draft_vocab_size": 48, **sizes}


def shapes(config: LlamaConfig, target_width: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all trained tensors in the file."""
    width, keys = config.hidden_size, config.num_key_value_heads * config.head_dim
    return {
        "fc.weight": (width, 3 * target_width),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.input_layernorm.weight": (width,),
        **layer_shapes("midlayer", width, config.intermediate_size, keys, 2 * width),
        "norm.weight": (width,),
        "lm_head.weight": (48, width),
    }


def build(case: str, target: Target) -> tuple[dict, dict[str, Tensor]]:
    """The config.json and the tensors of the file."""
    generator = torch.Generator().manual_seed(201 + list(CASES).index(case))
    config = config_json(case, target.config.vocab_size)
    layers = LlamaConfig(**config)
    names = shapes(layers, target.config.hidden_size)
    if CASES[case].get("own_embedding"):
        names["embed_tokens.weight"] = (layers.vocab_size, layers.hidden_size)
    tensors = {name: random_weight(name, shape, generator) for name, shape in names.items()}
    return config, {**tensors, **vocabulary_map(layers.vocab_size, 48, generator)}


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    target = Target(TARGET)
    depth = target.config.num_hidden_layers
    features = target.features([2, depth // 2, depth - 3])
    for case in CASES:
        config, tensors = build(case, target)
        canonical = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        head = DraftHead(LlamaConfig(**config), {"embed_tokens.weight": target.embedding, **canonical})
        step = partial(eagle3_step, head)
        results = draft(step, target.tokens, fuse(head, features), tensors["d2t"], DRAFTS)
        write_head(root / case, config, tensors)
        write_outputs(root / case, target, features, results)
