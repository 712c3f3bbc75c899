"""Shared by all EAGLE goldens: prompts and features from a Llama target, sizes, and files of a case."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from goldens import targets

GOLDENS = Path(__file__).resolve().parents[2] / "tests" / "goldens"
ROWS, DRAFTS = 24, 4

LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


class Target:
    """A golden target: its config, prompt, hidden states, embedding [V,M] and lm_head [V,M]."""

    def __init__(self, case: str) -> None:
        model, input_ids = targets.build(case)
        outputs = targets.run(model, input_ids)
        self.config = model.config
        self.embedding = model.model.embed_tokens.weight.detach()
        self.lm_head = model.lm_head.weight.detach()
        self.tokens = input_ids[0, 1 : ROWS + 1]  # row i carries token i+1
        self.normed = outputs["normed"][0, :ROWS]
        self.hidden = outputs["hidden"][:, 0, :ROWS]

    def features(self, captures: list[int]) -> Tensor:
        """[S, captures * M]: the inputs of the chosen layers, concatenated."""
        return torch.cat([self.hidden[layer] for layer in captures], dim=-1)


def vocabulary_map(size: int, draft_size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """d2t int64[draft_size], target id minus draft id, and t2d bool[size]."""
    chosen = torch.randperm(size, generator=generator)[:draft_size].sort().values
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[chosen] = True
    return {"d2t": chosen - torch.arange(draft_size), "t2d": t2d}


def greedy_drafts(logits: Tensor, d2t: Tensor | None) -> dict[str, Tensor]:
    """draft_logits [1,K,V] and draft_tokens [1,K], as target ids, from the logits [K,V] of one pass."""
    best = logits.topk(2).values
    if (best[:, 0] - best[:, 1]).min() < 1e-3:
        raise ValueError("the two best logits of a draft nearly tie; change the seed")
    tokens = logits.argmax(-1)
    tokens = tokens if d2t is None else tokens + d2t[tokens]
    return {"draft_logits": logits[None], "draft_tokens": tokens[None]}


# What the published config.json of heads in SafeAILab's formats have.
SAFEAILAB = {
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
    **LAYERS,
}


def layer_shapes(name: str, width: int, inner: int, keys: int, inputs: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a decoder layer's matrices and its second norm; attention reads `inputs` features."""
    return {
        f"{name}.self_attn.q_proj.weight": (width, inputs),
        f"{name}.self_attn.k_proj.weight": (keys, inputs),
        f"{name}.self_attn.v_proj.weight": (keys, inputs),
        f"{name}.self_attn.o_proj.weight": (width, width),
        f"{name}.post_attention_layernorm.weight": (width,),
        f"{name}.mlp.gate_proj.weight": (inner, width),
        f"{name}.mlp.up_proj.weight": (inner, width),
        f"{name}.mlp.down_proj.weight": (width, inner),
    }


def split_experts(name: str, tensor: Tensor, parts: tuple[str, ...]) -> dict[str, Tensor]:
    """The matrices of experts [E, parts * out, in] by their published names."""
    return {
        f"{name}.{expert}.{part}.weight": rows.contiguous()
        for expert, matrix in enumerate(tensor)
        for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True)
    }


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes `folder/checkpoint`."""
    folder = folder / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_outputs(folder: Path, target: Target, features: Tensor, results: dict[str, Tensor]) -> None:
    """Write `folder/outputs.safetensors`: the inputs, with a leading axis of size 1, and `results`."""
    inputs = {"token_ids": target.tokens[None], "features": features[None]}
    tensors = {name: tensor.contiguous() for name, tensor in {**inputs, **results}.items()}
    save_file(tensors, folder / "outputs.safetensors")
