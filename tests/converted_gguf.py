"""Writing a checkpoint as a GGUF, as llama.cpp's converter would, in float32 or MXFP4."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny_gguf import interleave, write_gguf

from jaxspec.files import Checkpoint
from jaxspec.files.quantized.mxfp4 import Mxfp4Tensor

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "glm4": "glm4",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "minimax_m2": "minimax-m2",
    "lfm2": "lfm2",
    "qwen2_5_vl_text": "qwen2vl",
    "qwen3_vl_text": "qwen3vl",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "smollm3": "smollm3",
    "phi3": "phi3",
    "granite": "granite",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "nemotron_h": "nemotron_h",
}
INTERLEAVED = ("llama", "smollm3", "granite")
NORMS_FROM_0 = ("gemma3", "qwen3next", "qwen35", "qwen35moe")


def architecture_of(config: Mapping[str, Any]) -> str:
    name = ARCHITECTURES[config["model_type"]]
    return f"{name}_moe" if name == "nemotron_h" and "moe" in config["layers_block_type"] else name


def write_converted(
    path: Path, checkpoint: Checkpoint, others: Mapping[str, np.ndarray | None] | None = None, **changes: Any
) -> Path:
    """Writes the file.

    Args:
      path: the file to write.
      checkpoint: the checkpoint to convert.
      others: replacements for tensors, by their names in the file; None drops one.
      **changes: metadata under the architecture's name, with dots written as `__`; None drops a key.
    """
    architecture = architecture_of(checkpoint.config)
    values = metadata(checkpoint.config)
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    prefixed = {f"{architecture}.{key}": value for key, value in values.items() if value is not None}
    stored = dict(tensors(checkpoint, architecture)) | dict(others or {})
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    return write_gguf(path, prefixed, kept, architecture)


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    whole = rope.get("full_attention", rope)
    common = {
        "block_count": config.get("num_hidden_layers") or len(config["layers_block_type"]),
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": next(
            config[key] for key in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if key in config
        ),
        "rope.freq_base": float(whole["rope_theta"]) if whole else None,
        "expert_count": config.get("num_experts")
        or config.get("num_local_experts")
        or config.get("n_routed_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }
    if whole.get("rope_type") in ("linear", "yarn"):
        common["rope.scaling.type"] = whole["rope_type"]
        common["rope.scaling.factor"] = whole["factor"]
        common["rope.scaling.original_context_length"] = whole.get("original_max_position_embeddings")
    return common | OWN.get(config["model_type"], lambda config, rope: {})(config, rope)


def _gemma3(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": config["layer_types"].index("full_attention") + 1,
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
    }


def _gemma4(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    types, shared = config["layer_types"], config["num_kv_shared_layers"]
    full = next(config["per_layer_config"][str(i)] for i, kind in enumerate(types) if kind[0] == "f")
    heads = {"sliding_attention": config["num_key_value_heads"]}
    heads["full_attention"] = full.get("num_key_value_heads", config["num_key_value_heads"])
    before = config["num_hidden_layers"] - shared
    inner, wide = config["intermediate_size"], 2 if config["use_double_wide_mlp"] else 1
    size = full["head_dim"]
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in types],
        "attention.shared_kv_layers": shared,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.head_count_kv": [heads[kind] for kind in types],
        "feed_forward_length": [inner * (wide if i >= before else 1) for i in range(len(types))],
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        "rope.dimension_count": size,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "expert_used_count": config["top_k_experts"],
    }


def _glm4(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    return {"rope.dimension_count": int(config["head_dim"] * rope["partial_rotary_factor"])}


def _gpt_oss(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
    }


def _deepseek(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    kinds = config.get("mlp_layer_types") or ["dense"] * config["first_k_dense_replace"]
    values = {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
        "leading_dense_block_count": kinds.count("dense"),
        "expert_shared_count": config["n_shared_experts"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"] or None,
        "expert_gating_func": 2,
    }
    if weight := rope.get("mscale_all_dim"):
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * weight
    return values


def _olmo3(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": pattern,
    }


def _phi3(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    size, length = config["hidden_size"] // config["num_attention_heads"], config["max_position_embeddings"]
    trained = config["original_max_position_embeddings"]
    values = {
        "rope.dimension_count": int(size * rope["partial_rotary_factor"]),
        "rope.scaling.original_context_length": trained,
        "attention.sliding_window": config["sliding_window"] or 0,
    }
    if "long_factor" in rope:
        values["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(length / trained) / math.log(trained))
    return values


def _granite(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def _minimax_m2(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_gating_func": 2,
        "rope.dimension_count": int(config["head_dim"] * rope["partial_rotary_factor"]),
    }


def _lfm2(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    heads, inner = config["num_key_value_heads"], config["intermediate_size"]
    if config["block_auto_adjust_ff_dim"]:
        unit = config["block_multiple_of"]
        inner = math.ceil(int(config["block_ffn_dim_multiplier"] * int(2 * inner / 3)) / unit) * unit
    return {
        "attention.head_count_kv": [heads * (kind != "conv") for kind in config["layer_types"]],
        "feed_forward_length": inner,
        "shortconv.l_cache": config["conv_L_cache"],
    }


def _delta(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    values, drafting = config["linear_num_value_heads"], config.get("mtp_num_hidden_layers", 0)
    return {
        "block_count": config["num_hidden_layers"] + drafting,
        "nextn_predict_layers": drafting or None,
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "full_attention_interval": config["layer_types"].index("full_attention") + 1,
        "rope.dimension_count": int(config["head_dim"] * rope["partial_rotary_factor"]),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": values,
        "ssm.inner_size": config["linear_value_head_dim"] * values,
    }


def _nemotron_h(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    kinds, drafting = config["layers_block_type"], config["num_nextn_predict_layers"]
    inner, has_experts = config["mamba_num_heads"] * config["mamba_head_dim"], "moe" in kinds
    wide = config["moe_intermediate_size"] if has_experts else config["intermediate_size"]
    values = {
        "block_count": len(kinds) + drafting,
        "nextn_predict_layers": drafting or None,
        "context_length": 2**20,  # whatever the config says
        "attention.head_count_kv": [
            config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds
        ]
        + [config["num_key_value_heads"]] * drafting,
        "feed_forward_length": [
            wide * (kind == ("moe" if has_experts else "mlp")) for kind in [*kinds, *["moe"] * drafting]
        ],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "ssm.inner_size": inner,
    }
    of_experts = {
        "expert_shared_count": config["n_shared_experts"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "moe_latent_size": config["moe_latent_size"],
    }
    none = dict.fromkeys(("expert_count", "expert_used_count", "expert_feed_forward_length"))
    return values | (of_experts if has_experts else none)


OWN = {
    "qwen3_next": _delta,
    "qwen3_5_text": _delta,
    "qwen3_5_moe_text": _delta,
    "nemotron_h": _nemotron_h,
    "lfm2": _lfm2,
    "minimax_m2": _minimax_m2,
    "olmo3": _olmo3,
    "phi3": _phi3,
    "granite": _granite,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "glm4": _glm4,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek,
    "glm4_moe_lite": _deepseek,
}


def tensors(checkpoint: Checkpoint, architecture: str) -> Iterator[tuple[str, Any]]:
    """All tensors by the names that the `gguf` package gives them."""
    config = checkpoint.config
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], metadata(config)["block_count"])

    def stored(name: str) -> str:
        layer, _, leaf = name.rpartition(".layers.")[2].partition(".")
        if drafting := DRAFTING.get(leaf.removesuffix(".weight")):
            return f"blk.{layer}.{drafting}.weight"
        if name.startswith("blk."):
            return name
        found = names.get_name(name, try_suffixes=(".weight", ".bias", ".scale"))
        assert found is not None, name
        return found

    for name, value in _own_tensors(checkpoint):
        if architecture in INTERLEAVED and ".q_proj." in name:
            value = interleave(value, config["num_attention_heads"])
        if architecture in INTERLEAVED and ".k_proj." in name:
            value = interleave(value, config["num_key_value_heads"])
        if architecture in NORMS_FROM_0 and "norm" in name and "linear_attn.norm" not in name:
            value = value + 1
        yield stored(name), value
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(rope, config["head_dim"])
    if whole := rope.get("full_attention", {}).get("partial_rotary_factor"):
        half = config["per_layer_config"][str(config["layer_types"].index("full_attention"))]["head_dim"] // 2
        yield "rope_freqs.weight", np.where(np.arange(half) < int(half * whole), 1, 1e30).astype(np.float32)
    for length in ("short", "long"):
        if factors := rope.get(f"{length}_factor"):
            yield f"rope_factors_{length}.weight", np.asarray(factors, np.float32)


def _own_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Any]]:
    """Tensors as the converter arranges them: experts stacked, gate and up separate, latents split."""
    config, stacks = checkpoint.config, {}
    for given, tensor in checkpoint.tensors.items():
        name = _of_layer_after_last(given, config)
        stem, found, leaf = name.partition(".experts.")
        if isinstance(tensor, Mxfp4Tensor):
            blocks = _ggml_blocks(tensor)
            yield from _apart(f"{stem}.experts.", leaf, [blocks], lambda each: (each, "MXFP4"))
        elif config["model_type"] == "gemma4_text" and not name.endswith(".weight"):
            renamed = name.replace("router.per_expert_scale", "experts.down_proj.scale")
            renamed = renamed.replace("router.scale", "router.proj.scale")
            yield renamed + ".weight" * (not renamed.endswith(".scale")), tensor.read()
        elif found and leaf[0].isdigit():
            index, _, projection = leaf.partition(".")
            stacks.setdefault(f"{stem}.experts.{projection}", []).append((int(index), tensor.read()))
        elif found:
            value = tensor.read()
            rows = value if leaf.endswith("_bias") else value.swapaxes(1, 2)
            yield from _apart(f"{stem}.experts.", leaf, [rows], lambda each: each)
        elif name.endswith("kv_b_proj.weight"):
            size, rank = config["qk_nope_head_dim"] + config["v_head_dim"], config["kv_lora_rank"]
            halves = tensor.read().reshape(-1, size, rank)
            keys, values = np.split(halves, [config["qk_nope_head_dim"]], axis=1)
            yield name.replace("kv_b", "k_b"), np.ascontiguousarray(keys.swapaxes(1, 2))
            yield name.replace("kv_b", "v_b"), np.ascontiguousarray(values)
        elif name.endswith((".conv.conv.weight", ".conv1d.weight")):
            yield name, _in_tiles(name, tensor.read()[:, 0], config)
        elif ".linear_attn." in name or ".mixer." in name:
            yield from _recurrent(name, tensor.read(), config)
        else:
            renamed = name.replace("e_score_correction_bias", "e_score_correction.bias")
            yield renamed + ".weight" * name.endswith(".sinks"), tensor.read()
    for name, parts in stacks.items():
        name = re.sub(r"backbone(.*)mixer.experts", r"model\1mlp.experts", name)
        yield name, np.stack([value for _, value in sorted(parts, key=lambda part: part[0])])


DRAFTING = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}
"""Names in the file that the `gguf` package does not know for these architectures."""


def _of_layer_after_last(name: str, config: Mapping[str, Any]) -> str:
    """The name of a tensor of an MTP layer as one of a layer after the last; others as they are."""
    if not name.startswith("mtp."):
        return name
    if config["model_type"] == "nemotron_h":
        last = len(config["layers_block_type"])
        own = {
            "mtp.layers.1.norm.weight": f"blk.{last}.post_attention_norm.weight",
            "mtp.layers.1.final_layernorm.weight": f"model.layers.{last}.shared_head.norm.weight",
        }
        return own.get(name, re.sub(r"mtp\.layers\.\d+", f"backbone.layers.{last}", name))
    last = config["num_hidden_layers"]
    own = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    own["norm"] = "shared_head.norm"
    leaf = name.split(".")[1]
    if leaf in own:
        return f"model.layers.{last}.{own[leaf]}.weight"
    return name.replace("mtp.layers.0", f"model.layers.{last}")


def _recurrent(name: str, value: np.ndarray, config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """The converter's changes of Mamba-2 layers and of gated delta rules."""
    if name.endswith(".A_log"):
        value = -np.exp(value)
    if config["model_type"] == "nemotron_h":
        if name.endswith((".A_log", ".D")):
            value = value[:, None]
        elif name.endswith(".mixer.norm.weight"):
            value = value.reshape(config["n_groups"], -1)
    elif name.endswith("in_proj_qkvz.weight"):
        heads, keys = config["linear_num_key_heads"], config["linear_key_head_dim"]
        parts = value.reshape(heads, -1, value.shape[1])
        values = (parts.shape[1] - 2 * keys) // 2
        *rest, gates = np.split(parts, [keys, 2 * keys, 2 * keys + values], axis=1)
        rows = [part.reshape(-1, value.shape[1]) for part in (*rest, gates)]
        yield name.replace("qkvz", "qkv"), np.concatenate(rows[:3])
        yield name.replace("qkvz", "z"), np.ascontiguousarray(rows[3])
        return
    name = name.replace("linear_attn.dt_bias", "linear_attn.dt_proj.bias")
    for leaf in ("mixer.dt", "e_score_correction"):
        name = name.replace(f"{leaf}_bias", f"{leaf}.bias")
    yield name, _in_tiles(name, value, config)


def _in_tiles(name: str, value: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """In Qwen3.5, values of the first value head of every key head come first, then those of the second."""
    if ".linear_attn." not in name or name.endswith(".norm.weight") or config["model_type"] == "qwen3_next":
        return value
    heads, count = config["linear_num_key_heads"], config["linear_num_value_heads"]
    order = np.arange(count).reshape(heads, -1).T.reshape(-1)
    if name.endswith(".out_proj.weight"):
        return np.ascontiguousarray(value.reshape(len(value), count, -1)[:, order].reshape(value.shape))
    keys = 2 * heads * config["linear_key_head_dim"] * name.endswith(("in_proj_qkv.weight", "conv1d.weight"))
    tiled = value[keys:].reshape(count, -1, *value.shape[1:])[order].reshape(-1, *value.shape[1:])
    return np.concatenate([value[:keys], tiled])


def _apart(stem: str, leaf: str, rows: list[np.ndarray], finish: Any) -> Iterator[tuple[str, Any]]:
    """Splits gpt-oss's fused projections, whose outputs are interleaved."""
    (values,) = rows
    kind = "bias" if leaf.endswith("_bias") else "weight"
    if not leaf.startswith("gate_up"):
        yield f"{stem}down_proj.{kind}", finish(np.ascontiguousarray(values))
        return
    for start, projection in enumerate(("gate", "up")):
        yield f"{stem}{projection}_proj.{kind}", finish(np.ascontiguousarray(values[:, start::2]))


def _ggml_blocks(tensor: Mxfp4Tensor) -> np.ndarray:
    """u8[E, out, in / 32 * 17]: blocks of a scale and 16 bytes; byte i holds values i and i + 16."""
    blocks, scales = tensor.blocks.read(), tensor.scales.read()
    values = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    packed = values[..., :16] | values[..., 16:] << 4
    return np.concatenate([scales[..., None], packed], axis=-1).reshape(*blocks.shape[:2], -1)


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """f32[D/2]: divisors of the inverse frequencies. Source: Llama 3.1's model card."""
    frequencies = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def without_dense_layers(checkpoint: Checkpoint) -> Checkpoint:
    """The golden without layer 1: the architecture has no place for a dense one."""
    kept = {name: t for name, t in checkpoint.tensors.items() if ".layers.1." not in name}
    tensors = {
        re.sub(r"(?<=layers\.)[2-9]", lambda layer: str(int(layer[0]) - 1), name): tensor
        for name, tensor in kept.items()
    }
    count, kinds = checkpoint.config["num_hidden_layers"], checkpoint.config.get("layer_types")
    kinds = [kinds[0], *kinds[2:]] if checkpoint.config["model_type"] == "qwen3_next" else None
    config = {"num_hidden_layers": count - 1, "layer_types": kinds, "mlp_only_layers": []}
    return replace(checkpoint, config={**checkpoint.config, **config}, tensors=tensors)
