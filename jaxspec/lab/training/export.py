"""Exporting a trained head: in the public formats, and in the smaller one of the shipped head."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters.head import DRAFT_ORDER
from jaxspec.drafters.kinds.eagle3 import Eagle3, Eagle3Config, default_capture
from jaxspec.files.safetensors.tensors import write_safetensors
from jaxspec.models.decoder import Decoder
from jaxspec.spelling import known_names
from jaxspec.weights.loading import export_tensors

FORMATS = ("speculators", "safeailab", "shared")
"""speculators and vLLM load `speculators`. `shared` is the same without `embed_tokens.weight` and
`lm_head.weight`, which equal the target's, and with `draft_order`; only jaxspec loads it."""


def embedding_rows(target: Decoder) -> np.ndarray:
    """f32[V, M]: the embedding of every token, as a head reads it."""
    ids = jnp.arange(target.config.vocab_size)
    return np.asarray(target.embedding(ids).astype(jnp.float32))


def why_not_safeailab(config: Eagle3Config, target_depth: int) -> str | None:
    """Why the format of SafeAILab/EAGLE cannot represent a head, or None.

    Args:
      config: the head's shape.
      target_depth: number of layers of the target.
    """
    if config.layers.num_hidden_layers > 1:
        return f"holds one layer, the head has {config.layers.num_hidden_layers} (head.num_layers)"
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if getattr(config, flag):
            return f"has no {flag} (head.{flag})"
    if config.layers.rope.theta != 10000.0:
        return f"has no rope_theta: its code takes 10000, the head {config.layers.rope.theta:g}"
    if config.capture != default_capture(target_depth):
        default = list(default_capture(target_depth))
        return f"reads the hidden states {default}, the head {list(config.capture)} (head.capture)"
    return None


def export_head(
    head: Eagle3,
    target: ModelConfig,
    folder: Path,
    *,
    form: str,
    target_name: str,
    architectures: Sequence[str] = (),
    dtype: str = "bfloat16",
    embedding: np.ndarray | None = None,
    order: np.ndarray | None = None,
    card: str = "",
) -> None:
    """Atomically writes a new folder with `config.json`, `model.safetensors` and `README.md`.

    Args:
      head: the head, with float32 parameters.
      target: the target's shape.
      folder: must not exist.
      form: one of `FORMATS`.
      target_name, architectures: name and architectures of the target, which the format records. speculators
        opens the target by this name when it loads a head, and so does vLLM when it is given only the head.
      dtype: of the weights, "bfloat16" or "float32".
      embedding: [V, M], the target's embedding as the head reads it. speculators' format holds a copy, unless
        the head has its own embedding.
      order: i32[W], the head's draft ids, the most frequent first; `shared` keeps it.
      card: contents of `README.md`.

    Raises:
      ConfigError: the format cannot represent this head, or the folder exists.
    """
    if form not in FORMATS:
        raise ConfigError(f"export format {form!r} is unknown; {known_names(form, FORMATS)}")
    if folder.exists():
        raise ConfigError(f"{folder}: exists already; nothing was written")
    if form == "safeailab" and (reason := why_not_safeailab(head.config, target.num_hidden_layers)):
        raise ConfigError(f"the format of SafeAILab {reason}")
    # A head read from another format keeps the names of that format.
    tensors = {
        name.replace("midlayer.", "layers.0.", 1): _rounded(array, dtype)
        for name, array in export_tensors(head).items()
    }
    if form == "safeailab":
        tensors = {name.replace("layers.0.", "midlayer.", 1): array for name, array in tensors.items()}
        config = _safeailab_config(head.config, dtype)
    else:
        verifier = {"name_or_path": target_name, "architectures": list(architectures)}
        config = _speculators_config(head, verifier, dtype)
    if form == "speculators" and embedding is not None:
        tensors.setdefault("embed_tokens.weight", _rounded(embedding, dtype))
    if form == "shared":
        del tensors["lm_head.weight"]
        if order is not None and head.draft_vocab is not None:
            tensors[DRAFT_ORDER] = order
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    write_safetensors(part, tensors.items())
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    (part / "README.md").write_text(card, "utf-8")
    part.rename(folder)


def _rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    if array.dtype.kind in "biu":
        return array
    return array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)


def _layer_config(layers: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": layers.hidden_size,
        "intermediate_size": layers.intermediate_size,
        "num_hidden_layers": layers.num_hidden_layers,
        "num_attention_heads": layers.num_attention_heads,
        "num_key_value_heads": layers.num_key_value_heads,
        "head_dim": layers.head_dim,
        "rms_norm_eps": layers.rms_norm_eps,
        "max_position_embeddings": layers.max_position_embeddings,
        "vocab_size": layers.vocab_size,
        "tie_word_embeddings": False,
    }


def _safeailab_config(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        **_layer_config(config.layers),
        "draft_vocab_size": config.draft_vocab_size,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def _speculators_config(head: Eagle3, verifier: dict[str, Any], dtype: str) -> dict[str, Any]:
    config = head.config
    layers = {
        **_layer_config(config.layers),
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.layers.rope.theta},
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": head.num_speculative_tokens}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": dtype,
        "eagle_aux_hidden_state_layer_ids": list(config.capture),
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": verifier,
        },
    }
