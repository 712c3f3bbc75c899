"""The keys of `config.json`, from the metadata of a GGUF."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.files.checkpoint import usual_dtype
from jaxspec.files.errors import CheckpointError
from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.files.gguf.tensor import PLAIN, GGUFTensor

ROPE_FACTORS = {
    "factors": "rope_freqs.weight",
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
"""[D/2] divisors of the inverse frequencies: tensors in the file, but part of the config here."""

_NOT_BUILT = (
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "router_logit_softcapping",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.temperature_scale",
    "attention.scale",
)
"""Keys of features that are not supported, if their value is not 0, except where a family has them."""


def config_from_gguf(
    architecture: GGUFArchitecture, model_type: str, meta: Metadata, tensors: Mapping[str, GGUFTensor]
) -> dict[str, Any]:
    """The contents of the `config.json` that corresponds to a GGUF.

    Args:
      architecture: the file's architecture.
      model_type: of the family, for the config.
      meta: all of the file's metadata.
      tensors: the file's tensors, by their names in the file.

    Raises:
      CheckpointError: metadata is missing, or has a value that is not supported.
    """
    own = meta.under(architecture.name)
    for key in (key for key in _NOT_BUILT if key not in architecture.scales):
        if value := own.decimal(key, 0.0):
            raise CheckpointError(f"{meta.file}: metadata {own.prefix}{key} {value!r} is not supported")
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{meta.file}: tensor 'token_embd.weight' is missing")
    hidden, heads = own.size("embedding_length"), own.size("attention.head_count")
    head_dim = own.positive("attention.key_length", hidden // heads)
    of_family = architecture.config(own)
    config: dict[str, Any] = {
        "model_type": model_type,
        **({"architectures": [architecture.model_class]} if architecture.model_class else {}),
        "torch_dtype": usual_dtype(tensors.values()),
        "hidden_size": hidden,
        "intermediate_size": of_family.get("intermediate_size") or own.size("feed_forward_length"),
        "num_hidden_layers": own.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": of_family.get("num_key_value_heads")
        or own.positive("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": own.size("context_length"),
        "rms_norm_eps": own.decimal("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": own.decimal("rope.freq_base", 10000.0),
        "sliding_window": own.count("attention.sliding_window", 0) or None,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "rope_scaling": None,
    }
    config |= of_family
    if architecture.has_rope and (scaling := _rope(own, tensors, config, head_dim)):
        config["rope_scaling"] = {**(config["rope_scaling"] or {}), **scaling}
    config |= architecture.from_tensors(config, tensors)
    if config["rope_scaling"] is None and "rope_parameters" in config:
        del config["rope_scaling"]  # transformers takes None for all of `rope_parameters`
    return config


def _rope(
    meta: Metadata, tensors: Mapping[str, GGUFTensor], config: Mapping[str, Any], head_dim: int
) -> dict[str, Any] | None:
    # With latent attention only a part of each head is rotated, and its size has a key of its own.
    rotated = config.get("qk_rope_head_dim", head_dim)
    stated = meta.positive("rope.dimension_count", rotated)
    if "partial_rotary_factor" in config:
        rotated = min(stated, head_dim)
    if stated != rotated:
        raise CheckpointError(f"{meta.file}: rope over {stated} of {rotated} dimensions is not supported")
    return _rope_scaling(meta, tensors, rotated)


def _rope_scaling(meta: Metadata, tensors: Mapping[str, GGUFTensor], rotated: int) -> dict[str, Any] | None:
    found = {key: tensors[name] for key, name in ROPE_FACTORS.items() if name in tensors}
    for key, factors in found.items():
        if factors.shape != (rotated // 2,) or factors.info.quantization not in PLAIN:
            raise CheckpointError(
                f"{meta.file}: tensor {ROPE_FACTORS[key]!r} is {factors.info.quantization.name} of shape "
                f"{list(factors.shape)}, expected F32 of shape {[rotated // 2]}"
            )
    if found:
        lists = {key: factors.read().astype(np.float32).tolist() for key, factors in found.items()}
        if "factors" in found:
            return {"rope_type": "factors", **lists}
        factor = meta.decimal("rope.scaling.attn_factor", 1.0)
        return {"rope_type": "longrope", "attention_factor": factor, **lists}
    # Early GGUFs had a separate key for linear scaling.
    old = meta.decimal("rope.scale_linear", 1.0)
    kind = meta.text("rope.scaling.type", "none" if old == 1 else "linear")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": meta.decimal("rope.scaling.factor", old)}
    original = meta.positive("rope.scaling.original_context_length", None)
    if original:
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if value := meta.decimal(f"rope.scaling.{key}", 0.0):
                scaling[name] = value
        if (factor := meta.decimal("rope.scaling.attn_factor", 1.0)) != 1:
            raise CheckpointError(
                f"{meta.file}: metadata {meta.prefix}rope.scaling.attn_factor {factor!r} is not supported"
            )
    return scaling
