"""How GGUFs store Nemotron-H and Nemotron 3.

Source: the converter of llama.cpp.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxspec.files import CheckpointError, TensorSource
from jaxspec.files.gguf.architecture import GGUFArchitecture, split_experts
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.models.families.recurrent_gguf import flat, log_decay, with_middle_axis, without_last_axis
from jaxspec.models.layers.moe import STACKED_EXPERTS

if TYPE_CHECKING:
    from jaxspec.files.gguf.tensor import GGUFTensor

_TENSORS = (
    *("norm", "post_attention_layernorm", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    *(f"mixer.{leaf}" for leaf in ("in_proj", "conv1d", "dt", "A_log", "D", "norm", "out_proj")),
    *(f"mixer.{leaf}_proj" for leaf in ("q", "k", "v", "o", "up", "down", "fc1_latent", "fc2_latent")),
    *("mixer.gate", "mixer.gate.e_score_correction", *STACKED_EXPERTS),
    *("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
)


def _config(meta: Metadata) -> dict[str, Any]:
    heads = {count for count in meta.list("attention.head_count_kv", int, []) if count}
    if len(heads) != 1:
        key = f"{meta.prefix}attention.head_count_kv"
        raise CheckpointError(f"{meta.file}: metadata {key} must list one number of heads and 0")
    count, inner = meta.size("ssm.time_step_rank"), meta.size("ssm.inner_size")
    if inner % count:
        raise CheckpointError(
            f"{meta.file}: metadata {meta.prefix}ssm.inner_size {inner} is no multiple of {count} heads"
        )
    config: dict[str, Any] = {
        "num_hidden_layers": meta.size("block_count") - meta.count("nextn_predict_layers", 0),
        "num_nextn_predict_layers": meta.count("nextn_predict_layers", 0),
        "mtp_layers_block_type": ["full_attention", "moe"],
        "num_key_value_heads": heads.pop(),
        "intermediate_size": max(meta.list("feed_forward_length", int, []), default=0) or 1,
        "layer_norm_epsilon": meta.decimal("attention.layer_norm_rms_epsilon", 1e-5),
        "mamba_num_heads": count,
        "mamba_head_dim": inner // count,
        "n_groups": meta.size("ssm.group_count"),
        "ssm_state_size": meta.size("ssm.state_size"),
        "conv_kernel": meta.size("ssm.conv_kernel"),
    }
    if experts := meta.count("expert_count", 0):
        config |= {
            "n_routed_experts": experts,
            "num_experts_per_tok": meta.size("expert_used_count"),
            "n_shared_experts": meta.count("expert_shared_count", 0),
            "moe_intermediate_size": meta.size("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": meta.size("expert_shared_feed_forward_length"),
            "moe_latent_size": meta.count("moe_latent_size", 0) or None,
            "n_group": meta.positive("expert_group_count", 1),
            "topk_group": meta.positive("expert_group_used_count", 1),
            "norm_topk_prob": meta.flag("expert_weights_norm", False),
            "routed_scaling_factor": meta.decimal("expert_weights_scale", 1.0),
        }
    return config


_KINDS = {
    "ssm_in": "linear_attention",
    "attn_q": "full_attention",
    "ffn_gate_inp": "moe",
    "ffn_up": "mlp",
}
"""The kind of a layer that has a tensor of this name."""


def _from_tensors(config: Mapping[str, Any], tensors: Mapping[str, "GGUFTensor"]) -> dict[str, Any]:
    """What each layer is, and whether there are biases.

    Raises:
      CheckpointError: a layer is none of the kinds.
    """
    kinds = []
    for i in range(config["num_hidden_layers"]):
        kind = next((kind for leaf, kind in _KINDS.items() if f"blk.{i}.{leaf}.weight" in tensors), None)
        if kind is None:
            file = tensors["token_embd.weight"].header.path
            raise CheckpointError(f"{file}: layer {i} has none of {', '.join(_KINDS)}")
        kinds.append(kind)

    def has(*leaves: str) -> bool:
        return any(name.endswith(leaves) for name in tensors)

    wide = next((tensor for name, tensor in tensors.items() if name.endswith(".ffn_up.weight")), None)
    return {
        "layers_block_type": kinds,
        "use_conv_bias": has(".ssm_conv1d.bias"),
        "use_bias": has(".ssm_in.bias"),
        "mlp_bias": has(".ffn_up.bias", ".ffn_up_shexp.bias"),
        # Some files list 0 for layers that are MLPs.
        **({"intermediate_size": wide.shape[0]} if wide else {}),
    }


_RENAMED = {
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
    "model.layers.": "backbone.layers.",
    ".mlp.experts.": ".mixer.experts.",
    ".dt.bias": ".dt_bias",
    ".e_score_correction.bias": ".e_score_correction_bias",
}


def _tensors(tensors: Mapping[str, "GGUFTensor"], config: Mapping[str, Any]) -> dict[str, TensorSource]:
    found: dict[str, TensorSource] = {}
    changes = {
        ".mixer.A_log": log_decay,
        ".mixer.D": without_last_axis,
        ".mixer.norm.weight": flat,
        ".mixer.conv1d.weight": with_middle_axis,
    }
    for name, tensor in split_experts(tensors, config).items():
        change = next((change for leaf, change in changes.items() if name.endswith(leaf)), None)
        value = change(tensors[name]) if change else tensor
        for part, renamed in _RENAMED.items():
            name = name.replace(part, renamed)
        found[name] = value
    return found


_NEXT = {
    "shared_head.norm.weight": "mtp.layers.1.final_layernorm.weight",
    "post_attention_layernorm.weight": "mtp.layers.1.norm.weight",
}
_ATTENTION = tuple(f"mixer.{projection}_proj." for projection in ("q", "k", "v", "o"))


def _next_layer(index: int, leaf: str) -> str:
    """Attention and experts are one layer in the file, and two on the Hub."""
    is_second = leaf.startswith(("mixer.", "mlp.")) and not leaf.startswith(_ATTENTION)
    return _NEXT.get(leaf, f"mtp.layers.{2 * index + is_second}.{leaf}")


NEMOTRON_H = GGUFArchitecture(
    "nemotron_h",
    "NemotronHForCausalLM",
    _TENSORS,
    other_name="nemotron_h_moe",
    has_rope=False,
    config=_config,
    from_tensors=_from_tensors,
    tensors=_tensors,
    next_layer=_next_layer,
)
