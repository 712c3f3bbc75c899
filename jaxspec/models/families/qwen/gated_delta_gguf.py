"""How GGUFs store models with layers of gated delta rules.

Source: the converter of llama.cpp.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxspec.config.delta import DeltaConfig
from jaxspec.files import CheckpointError, TensorSource
from jaxspec.files.gguf.architecture import split_experts
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.models.families.recurrent_gguf import log_decay, with_middle_axis
from jaxspec.models.layers.moe import STACKED_EXPERTS

if TYPE_CHECKING:
    from jaxspec.files.gguf.tensor import GGUFTensor

LAYER_TENSORS = (
    *("self_attn.q_norm", "self_attn.k_norm"),
    *(f"linear_attn.{leaf}" for leaf in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")),
    *(f"linear_attn.{leaf}" for leaf in ("in_proj_qkvz", "in_proj_ba", "conv1d", "dt_proj", "A_log")),
    *("linear_attn.norm", "linear_attn.out_proj"),
)
EXPERT_TENSORS = (
    "mlp.gate",
    *STACKED_EXPERTS,
    "mlp.shared_expert_gate",
    *(f"mlp.shared_expert.{projection}_proj" for projection in ("gate", "up", "down")),
)
NEXT_TENSORS = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
"""The names of tensors, as of `GGUFArchitecture.layer_tensors`."""

_NEXT = {
    "eh_proj": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "shared_head.norm": "mtp.norm",
}


def next_layer(index: int, leaf: str) -> str:
    """See `GGUFArchitecture.next_layer`."""
    name, _, kind = leaf.rpartition(".")
    return f"{_NEXT.get(name, f'mtp.layers.{index}.{name}')}.{kind}"


def delta_config(meta: Metadata) -> dict[str, Any]:
    """The keys of `config.json` that Llama lacks.

    Raises:
      CheckpointError: a key is missing, or two do not fit each other.
    """
    width, heads = meta.size("embedding_length"), meta.size("attention.head_count")
    head_dim = meta.positive("attention.key_length", width // heads)
    drafting = meta.count("nextn_predict_layers", 0)
    layers = meta.size("block_count") - drafting
    values, inner = meta.size("ssm.time_step_rank"), meta.size("ssm.inner_size")
    if inner % values:
        raise CheckpointError(
            f"{meta.file}: metadata {meta.prefix}ssm.inner_size {inner} is no multiple of {values} heads"
        )
    return {
        "num_hidden_layers": layers,
        "mtp_num_hidden_layers": drafting,
        "layer_types": _layer_types(meta, layers),
        "partial_rotary_factor": meta.positive("rope.dimension_count", head_dim) / head_dim,
        "linear_conv_kernel_dim": meta.size("ssm.conv_kernel"),
        "linear_key_head_dim": meta.size("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_num_key_heads": meta.size("ssm.group_count"),
        "linear_num_value_heads": values,
    }


def _layer_types(meta: Metadata, layers: int) -> list[str]:
    every = meta.positive("full_attention_interval", 4)
    by_rule = [(i + 1) % every != 0 for i in range(layers)]
    recurrent = meta.list("attention.recurrent_layers", bool, by_rule)
    if len(recurrent) < layers:
        key = f"{meta.prefix}attention.recurrent_layers"
        raise CheckpointError(f"{meta.file}: metadata {key} has {len(recurrent)} entries for {layers} layers")
    return ["linear_attention" if each else "full_attention" for each in recurrent[:layers]]


def expert_config(meta: Metadata) -> dict[str, Any]:
    """`delta_config` with experts in every layer."""
    inner = meta.size("expert_feed_forward_length")
    return {
        **delta_config(meta),
        "intermediate_size": meta.positive("feed_forward_length", inner),
        "num_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": meta.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": meta.flag("expert_weights_norm", True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def from_tensors(config: Mapping[str, Any], tensors: Mapping[str, "GGUFTensor"]) -> dict[str, Any]:
    """Whether there are biases, which the first layer cannot tell."""
    return {"attention_bias": any(name.endswith(".attn_q.bias") for name in tensors)}


def grouped_tensors(
    tensors: Mapping[str, "GGUFTensor"], config: Mapping[str, Any]
) -> dict[str, TensorSource]:
    """Tensors of Qwen3-Next, which has a key head's queries, keys, values and gates one after another.

    Older files have them like this, newer ones have all heads' queries first, and gates in a tensor of their
    own.
    """
    from jaxspec.files.gguf.tensor import JoinedTensor  # imports slowly

    delta = DeltaConfig.from_hf(config)
    found = _as_stored(split_experts(tensors, config))
    heads, keys, values = delta.num_key_heads, delta.key_size, delta.group * delta.value_size
    for name, gates in tensors.items():
        stem, is_gates, _ = name.partition(".in_proj_z.weight")
        rest = tensors.get(f"{stem}.in_proj_qkv.weight")
        if not is_gates or rest is None:
            continue
        width = gates.shape[-1]
        if (rest.shape, gates.shape) != ((heads * (2 * keys + values), width), (heads * values, width)):
            raise CheckpointError(
                f"{gates.header.path}: {name!r} of shape {list(gates.shape)} and queries, keys and values "
                f"of {list(rest.shape)} are not the parts of one projection"
            )
        del found[name], found[f"{stem}.in_proj_qkv.weight"]
        shape = (rest.shape[0] + gates.shape[0], width)
        found[f"{stem}.in_proj_qkvz.weight"] = JoinedTensor((rest, gates), shape, _by_head(heads, keys))
    return found


def _by_head(heads: int, keys: int) -> Callable[..., np.ndarray]:
    """A function that puts the rows of each head together, of queries, keys and values, and of gates."""

    def join(rest: np.ndarray, gates: np.ndarray) -> np.ndarray:
        parts = [*np.split(rest, [heads * keys, 2 * heads * keys]), gates]
        by_head = [part.reshape(heads, -1, part.shape[1]) for part in parts]
        return np.concatenate(by_head, axis=1).reshape(-1, rest.shape[1])

    return join


def tiled_tensors(tensors: Mapping[str, "GGUFTensor"], config: Mapping[str, Any]) -> dict[str, TensorSource]:
    """Tensors of Qwen3.5, where the first value heads of all key heads come first."""
    from jaxspec.files.gguf.tensor import JoinedTensor, undo_tiling  # imports slowly

    delta = DeltaConfig.from_hf(config)
    tiles, num_keys = (delta.group, delta.num_key_heads), 2 * delta.num_key_heads * delta.key_size
    found = _as_stored(split_experts(tensors, config))
    if delta.group == 1:
        return found

    def values_behind(rows: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda array: np.concatenate([array[:rows], undo_tiling(array[rows:], *tiles)])

    for name, tensor in found.items():
        _, is_delta, leaf = name.partition(".linear_attn.")
        if not is_delta or leaf == "norm.weight":
            continue
        keys = num_keys if leaf in ("in_proj_qkv.weight", "conv1d.weight") else 0
        size = tensor.shape[-1 if leaf == "out_proj.weight" else 0] - keys
        if size < 0 or size % delta.num_value_heads:
            file = next(iter(tensors.values())).header.path
            shape, heads = list(tensor.shape), delta.num_value_heads
            raise CheckpointError(f"{file}: tensor {name!r} of shape {shape} is not that of {heads} heads")
        if leaf == "out_proj.weight":
            found[name] = replace(tensors[name], tiled_inputs=tiles)
        else:
            found[name] = JoinedTensor((tensor,), tensor.shape, values_behind(keys))
    return found


def _as_stored(tensors: Mapping[str, Any]) -> dict[str, TensorSource]:
    """Tensors with the names and axes of a checkpoint on the Hub."""
    found: dict[str, TensorSource] = {}
    for name, tensor in tensors.items():
        if name.endswith(".A_log"):
            found[name] = log_decay(tensor)
        elif name.endswith(".conv1d.weight"):
            found[name] = with_middle_axis(tensor)
        else:
            found[name.replace(".dt_proj.bias", ".dt_bias")] = tensor
    return found
