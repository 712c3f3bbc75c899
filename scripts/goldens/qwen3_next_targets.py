"""Qwen3-Next and Qwen3.5 targets: transformers' classes on random weights, every layer's input captured."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from goldens.random_target import write_target

VOCABULARY = 96
PROMPTS, PROMPT_LENGTH, ANSWER_LENGTH = 8, 24, 64
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "rope_parameters": ROPE,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
DENSE = {"intermediate_size": 48}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "patch_size": 2,
    "num_position_embeddings": 16,
}


def models() -> dict[str, PreTrainedModel]:
    """The models by the names of their cases."""
    eager = {"attn_implementation": "eager"}
    text = {**SHAPE, **DENSE}
    return {
        "qwen3-next": Qwen3NextForCausalLM(
            Qwen3NextConfig(**SHAPE, **DENSE, **EXPERTS, mlp_only_layers=[1], **eager)
        ),
        "qwen3-next-odd": Qwen3NextForCausalLM(
            Qwen3NextConfig(
                **{**SHAPE, **DENSE, **EXPERTS, "linear_num_value_heads": 2, "num_hidden_layers": 5},
                layer_types=[f"{kind}_attention" for kind in ("full", "linear", "linear", "full", "linear")],
                linear_conv_kernel_dim=3,
                decoder_sparse_step=2,
                norm_topk_prob=False,
                attention_bias=True,
                tie_word_embeddings=True,
                rms_norm_eps=1e-2,
                **eager,
            )
        ),
        "qwen3-5": Qwen3_5ForCausalLM(
            Qwen3_5TextConfig(
                **{**text, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
                full_attention_interval=2,
                **eager,
            )
        ),
        "qwen3-5-nested": Qwen3_5ForConditionalGeneration(
            Qwen3_5Config(
                text_config={
                    **text,
                    "rope_parameters": {**ROPE, "mrope_section": [1, 1, 0], "mrope_interleaved": True},
                },
                vision_config=VISION,
                image_token_id=90,
                video_token_id=91,
                vision_start_token_id=92,
                vision_end_token_id=93,
                tie_word_embeddings=True,
                **eager,
            )
        ),
        "qwen3-5-moe": Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SHAPE, **EXPERTS, **eager)),
    }


def prepare(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Norms that are offsets from 1, states that remember for different times, and experts that tie."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            parameter.data -= 1
        elif name.endswith("A_log"):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 1.5 - 2
        elif name.endswith("dt_bias"):
            parameter.data = torch.randn(parameter.shape, generator=generator)
        elif "mlp.experts." in name or name.endswith("mlp.gate.weight"):
            parameter.data[5] = parameter.data[2]


@torch.no_grad()
def answers(model: PreTrainedModel, prompts: Tensor) -> Tensor:
    """The most likely continuation of each prompt, by passes over the whole text."""
    texts = prompts
    for _ in range(ANSWER_LENGTH):
        last = model(texts, use_cache=False).logits[:, -1]
        texts = torch.cat([texts, last.argmax(-1, keepdim=True)], dim=1)
    return texts[:, prompts.shape[1] :].contiguous()


def add_answers(folder: Path, model: PreTrainedModel, seed: int) -> None:
    """Adds prompts and the model's answers to a golden's outputs."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, VOCABULARY - 8, (PROMPTS, PROMPT_LENGTH), generator=generator)
    path = folder / "outputs.safetensors"
    save_file({**load_file(path), "prompts": prompts, "answers": answers(model, prompts)}, path)


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    for seed, (case, model) in enumerate(models().items(), start=1101):
        write_target(root / case, model, seed=seed, prepare=prepare)
        add_answers(root / case, model, seed)
