"""GPT-OSS targets: transformers' GptOssForCausalLM on random weights, plain and packed as MXFP4."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from goldens.random_target import write_target

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,  # prompts are longer
}
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "max_position_embeddings": 256,
    "rope_parameters": YARN,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": None,
}
PACKED_SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
}  # several blocks of 32 to a row
PACKED = ("gate_up_proj", "down_proj")


def prepare(model: GptOssForCausalLM, generator: torch.Generator) -> None:
    """Sets sinks that matter, experts that reach the clamp of 7, and a tie of two experts in every layer.

    The two experts are identical, because `torch.topk` does not define which of them it prefers.
    """
    for layer in model.model.layers:
        sinks = layer.self_attn.sinks
        sinks.data = torch.randn(sinks.shape, generator=generator)
        layer.mlp.experts.gate_up_proj.data *= 8
        layer.mlp.experts.down_proj.data /= 8
        for parameter in layer.mlp.parameters():
            parameter.data[2] = parameter.data[1]


def pack(shape: tuple[int, int, int], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks u8[E, out, in/32, 16] and exponents u8[E, out, in/32] of experts [E, in, out]."""
    experts, width, out = shape
    blocks = torch.randint(0, 256, (experts, out, width // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(122, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    blocks[2], scales[2] = blocks[1], scales[1]
    return blocks, scales


def write(root: Path) -> None:
    """Write `gpt-oss/` and `gpt-oss-mxfp4/`; the latter's outputs are those of its dequantised weights."""
    config = GptOssConfig(**SHAPE, attn_implementation="eager")
    write_target(root / "gpt-oss", GptOssForCausalLM(config), seed=201, prepare=prepare)

    packed: dict[str, torch.Tensor] = {}

    def dequantised(model: GptOssForCausalLM, generator: torch.Generator) -> None:
        prepare(model, generator)
        for i, layer in enumerate(model.model.layers):
            for name in PACKED:
                parameter = getattr(layer.mlp.experts, name)
                blocks, scales = pack(tuple(parameter.shape), generator)
                parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
                key = f"model.layers.{i}.mlp.experts.{name}"
                packed[f"{key}_blocks"], packed[f"{key}_scales"] = blocks, scales

    small = GptOssConfig(**{**SHAPE, **PACKED_SHAPE}, attn_implementation="eager")
    folder = root / "gpt-oss-mxfp4"
    write_target(folder, GptOssForCausalLM(small), seed=202, prepare=dequantised)
    file = folder / "checkpoint" / "model.safetensors"
    stems = {key.rsplit("_", 1)[0] for key in packed}
    kept = {key: tensor for key, tensor in load_file(file).items() if key not in stems}
    save_file({**kept, **packed}, file, metadata={"format": "pt"})
    path = folder / "checkpoint" / "config.json"
    quantised = {**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(quantised, indent=2) + "\n")
