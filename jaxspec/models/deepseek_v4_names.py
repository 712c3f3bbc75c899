"""The published names of DeepSeek-V4's tensors, as those of transformers' modules.

Source: deepseek-ai/DeepSeek-V4-Flash, as vLLM 0.33 loads it (`models/deepseek_v4/nvidia/`), and the files
that transformers 5.24 writes, which have most of the published names.
"""

import re

from jaxspec.files import Checkpoint

_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_IN_ORDER = (
    (r"^model\.mtp\.", "mtp."),
    (r"^layers\.", "model.layers."),
    (r"^(mtp\.\d+)\.emb\.tok_emb\.", r"\1.embed_tokens."),
    (r"^(mtp\.\d+)\.head\.", r"\1.shared_head.head."),
    (r"^(mtp\.\d+)\.norm\.", r"\1.shared_head.norm."),
    (r"^hc_head_", "model.hc_head.hc_"),
    (r"\.hc_head_", ".hc_head.hc_"),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.indexer\.compressor\.", ".indexer."),
    (r"\.self_attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"\.indexer\.weights_proj\.", ".indexer.scorer.weights_proj."),
    (r"\.(self_attn|compressor|indexer)\.norm\.", r".\1.kv_norm."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.w(q_a|q_b|kv|o_a|o_b|gate)\.", r".\1_proj."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"(experts(?:\.\d+)?)\.w1\.", r"\1.gate_proj."),
    (r"(experts(?:\.\d+)?)\.w2\.", r"\1.down_proj."),
    (r"(experts(?:\.\d+)?)\.w3\.", r"\1.up_proj."),
)
_PATTERNS = tuple((re.compile(pattern), name) for pattern, name in _IN_ORDER)
_KNOWN_BY = ("layers.0.attn.wkv.weight", "model.layers.0.attn.wkv.weight", "mtp.0.attn.wkv.weight")


def has_published_names(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint's tensors have the published names, or those that transformers writes."""
    return any(name in checkpoint.tensors for name in _KNOWN_BY)


def module_name(name: str) -> str:
    """The name of a tensor's module in transformers, for its published name."""
    name = _TOP.get(name, name)
    for pattern, new in _PATTERNS:
        name = pattern.sub(new, name)
    return name
