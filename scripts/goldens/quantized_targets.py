"""Quantized Llama targets: their packed checkpoints, and the weights that they stand for.

compressed-tensors packs and dequantizes its own formats, and transformers dequantizes FP8 in blocks. AWQ and
GPTQ follow the formulas of AutoAWQ (`awq/modules/linear/gemm.py`) and AutoGPTQ (`qlinear_cuda.py`), whose
packages need a GPU.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from goldens.targets import random_weight

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
EXPECTED = ("q_proj.weight", "k_proj.weight", "down_proj.weight")
"""The matrices whose weights are written; the others are packed by the same code."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]
"""The stored tensors of one matrix by leaf, and the weight that they stand for."""


def write(root: Path) -> None:
    for seed, (case, (pack, settings)) in enumerate(CASES.items()):
        _write(root / "quantized" / case, pack, settings, seed)


def _write(folder: Path, pack: Callable[..., Packed], settings: dict, seed: int) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, dtype="bfloat16"))
    generator = torch.Generator().manual_seed(seed)
    stored: Tensors = {}
    expected: Tensors = {}
    for name, parameter in model.named_parameters():
        weight = random_weight(name, parameter.shape, generator).to(torch.bfloat16)
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        # Rows of several sizes, some of which have only positive weights.
        weight = weight * torch.linspace(0.25, 2, len(weight), dtype=torch.bfloat16)[:, None]
        weight[: len(weight) // 8] = weight[: len(weight) // 8].abs()
        leaves, value = pack(weight, generator)
        stored |= {f"{name.removesuffix('.weight')}.{leaf}": tensor for leaf, tensor in leaves.items()}
        if name.endswith(EXPECTED):
            expected[name] = value
    (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": settings}
    (folder / "checkpoint" / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()},
        folder / "checkpoint" / "model.safetensors",
        metadata={"format": "pt"},
    )
    if settings["quant_method"] == "fp8":
        loaded = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.bfloat16)
        expected = {name: loaded.get_parameter(name).detach() for name in expected}
    save_file({n: t.contiguous() for n, t in expected.items()}, folder / "expected.safetensors")


def _compressed(name: str, **weights) -> tuple[Callable[..., Packed], dict]:
    """A format of compressed-tensors."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    low, high = (
        (-448, 448) if args.type == "float" else (-(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1) - 1)
    )

    def pack(weight: torch.Tensor, generator: torch.Generator) -> Packed:
        outputs, inputs = weight.shape
        rows, columns = {
            "tensor": (outputs, inputs),
            "channel": (1, inputs),
            "group": (1, args.group_size),
            "block": args.block_structure,
        }[args.strategy]
        blocks = weight.float().reshape(outputs // rows, rows, inputs // columns, columns).transpose(1, 2)
        if args.symmetric:
            scale, zero = blocks.abs().amax((2, 3)) / high, None
        else:
            least, most = blocks.amin((2, 3)).clamp(max=0), blocks.amax((2, 3)).clamp(min=0)
            scale = (most - least) / (high - low)
            zero = (low - least / scale).round().clamp(low, high).to(torch.int8)
        state = {"weight": weight, "weight_scale": scale.to(torch.bfloat16)}
        if args.strategy == "tensor":
            state["weight_scale"] = state["weight_scale"].reshape(1)
        if zero is not None:
            state["weight_zero_point"] = zero
        compressor = BaseCompressor.get_value_from_registry(name)
        leaves = compressor.compress(state, scheme)
        return leaves, compressor.decompress(dict(leaves), scheme)["weight"]

    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json()), "input_activations": None}
    return pack, {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _fp8_blocks(weight: torch.Tensor, generator: torch.Generator) -> Packed:
    rows, columns = 32, 64
    blocks = weight.float().reshape(len(weight) // rows, rows, -1, columns).transpose(1, 2)
    scale = blocks.abs().amax((2, 3)) / 448
    codes = (blocks / scale[..., None, None]).transpose(1, 2).reshape(weight.shape).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, weight


def _fp8_tensor(weight: torch.Tensor, generator: torch.Generator) -> Packed:
    """ModelOpt's, with the scale of activations."""
    scale = weight.float().abs().max() / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    leaves = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return leaves, codes.float() * scale


def _rounded(weight: torch.Tensor, group: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Codes [out, in] from 0 to 15, float16 scales and zero points [out, groups]."""
    blocks = weight.float().reshape(len(weight), -1, group)
    if symmetric:
        scale, zero = blocks.abs().amax(-1) / 7, torch.full((len(weight), blocks.shape[1]), 8)
    else:
        least, most = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale = (most - least) / 15
        zero = (-least / scale).round().clamp(1, 15).to(torch.int64)
    scale = scale.to(torch.float16)
    codes = (blocks / scale.float()[..., None]).round() + zero[..., None]
    return codes.clamp(0, 15).to(torch.int64).reshape(weight.shape), scale, zero


def _words(integers: torch.Tensor, order=range(8)) -> torch.Tensor:
    """Words i32[rows, n / 8] from integers [rows, n]; nibble i is the integer `order[i]` of eight."""
    eights = integers.reshape(len(integers), -1, 8)
    words = sum(eights[..., at] << 4 * i for i, at in enumerate(order))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _awq(weight: torch.Tensor, generator: torch.Generator) -> Packed:
    codes, scale, zero = _rounded(weight, 32, symmetric=False)
    value = (codes - zero.repeat_interleave(32, 1)) * scale.float().repeat_interleave(32, 1)
    leaves = {"qweight": _words(codes.T, AWQ_ORDER), "qzeros": _words(zero.T, AWQ_ORDER), "scales": scale.T}
    return leaves, value


def _gptq(*, symmetric: bool, act_order: bool, version: int) -> Callable[..., Packed]:
    def pack(weight: torch.Tensor, generator: torch.Generator) -> Packed:
        group = 32
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=generator) if act_order else torch.arange(inputs)
        codes, scale, zero = _rounded(weight[:, order], group, symmetric)
        g_idx = torch.empty(inputs, dtype=torch.int64)
        g_idx[order] = torch.arange(inputs) // group
        stored = torch.empty_like(codes)
        stored[:, order] = codes
        value = (stored - zero[:, g_idx]) * scale.float()[:, g_idx]
        leaves = {
            "qweight": _words(stored).T,
            "qzeros": _words((zero - (2 - version)).T),
            "scales": scale.T,
            "g_idx": g_idx.to(torch.int32),
        }
        return leaves, value

    return pack


def _gptq_settings(**changes) -> dict:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, **changes}


INT4 = {"num_bits": 4, "type": "int"}
CASES: dict[str, tuple[Callable[..., Packed], dict]] = {
    "fp8-blocks": (
        _fp8_blocks,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 64]},
    ),
    "fp8-channel": _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "fp8-tensor": (_fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}),
    "int8-channel": _compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "int4-groups": _compressed("pack-quantized", **INT4, strategy="group", group_size=64),
    "int4-zero-points": _compressed(
        "pack-quantized", **INT4, strategy="group", group_size=32, symmetric=False
    ),
    "int4-channel": _compressed("pack-quantized", **INT4, strategy="channel"),
    "awq": (
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    ),
    "gptq": (_gptq(symmetric=True, act_order=False, version=1), _gptq_settings()),
    "gptq-act-order": (
        _gptq(symmetric=False, act_order=True, version=1),
        _gptq_settings(desc_act=True, sym=False),
    ),
    "gptq-v2": (
        _gptq(symmetric=False, act_order=False, version=2),
        _gptq_settings(sym=False, checkpoint_format="gptq_v2"),
    ),
}
