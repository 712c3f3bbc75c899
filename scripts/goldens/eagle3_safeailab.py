"""EAGLE-3 heads in SafeAILab's format: `midlayer.*`, with the config of `eagle/traineagle3/config.json`."""

import json
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from goldens.draft_head import DraftHead, draft, eagle3_step, fuse
from goldens.head_cases import DRAFTS, LAYERS, Target, vocabulary_map, write_outputs
from goldens.llama_targets import random_weight

# The format does not state the captures; their default (2, L/2, L-3) needs a target of seven layers.
TARGET = "llama-seven-layers"
CASES: dict[str, dict] = {
    "eagle3-safeailab": {"hidden_size": 16},
    "eagle3-safeailab-own-embedding": {"hidden_size": 16, "own_embedding": True},
    "eagle3-safeailab-other-width": {"hidden_size": 24, "target_hidden_size": 16, "own_embedding": True},
}


def config_json(case: str, vocab_size: int) -> dict:
    """The keys of the published config: no rope, no head size, no `bias`."""
    sizes = {
        **LAYERS,
        "hidden_size": CASES[case]["hidden_size"],
        "vocab_size": vocab_size,
        "draft_vocab_size": 48,
    }
    if "target_hidden_size" in CASES[case]:
        sizes["target_hidden_size"] = CASES[case]["target_hidden_size"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": "llama",
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.28.1",
        "use_cache": True,
        **sizes,
    }


def shapes(config: LlamaConfig, target_width: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all trained tensors in the file."""
    width, inner = config.hidden_size, config.intermediate_size
    keys = config.num_key_value_heads * config.head_dim
    return {
        "fc.weight": (width, 3 * target_width),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.self_attn.q_proj.weight": (width, 2 * width),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, width),
        "midlayer.post_attention_layernorm.weight": (width,),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
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
        folder = root / case / "checkpoint"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_outputs(root / case, target, features, results)
