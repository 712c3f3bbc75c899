"""Indexed-window attention as its definition says it: whole texts, no cache, numpy in float64.

It shares nothing with the package: it reads a checkpoint's tensors by name and a `config.json` by key.
"""

from typing import Any

import numpy as np


def logits(config: dict[str, Any], tensors: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """f64[S, V] of one text i32[S]."""
    weights = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    eps = config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][tokens]
    for i, ratio in enumerate(config["compress_ratios"]):
        layer = {k.removeprefix(f"model.layers.{i}."): v for k, v in weights.items()}
        x = x + _attention(config, layer, ratio, _norm(x, layer["input_layernorm.weight"], eps))
        normed = _norm(x, layer["post_attention_layernorm.weight"], eps)
        gate, up = (normed @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
    return _norm(x, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


def _attention(config: dict[str, Any], layer: dict[str, np.ndarray], ratio: int, x: np.ndarray) -> np.ndarray:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    length, window = len(x), config["sliding_window"]

    def project(name: str, count: int) -> np.ndarray:
        return (x @ layer[f"self_attn.{name}.weight"].T).reshape(length, count, -1)

    at = np.arange(length)
    queries = _rotate(project("q_proj", heads), at)
    keys, values = _rotate(project("k_proj", kv_heads), at), project("v_proj", kv_heads)
    if ratio > 1:
        count = length // ratio
        entry_keys, entry_values = _entries(config, layer, ratio, x[: count * ratio])
    result = np.zeros(queries.shape)
    for position in range(length):
        first = max(0, position - window + 1)
        k, v = keys[first : position + 1], values[first : position + 1]
        if ratio > 1:
            visible = (position + 1) // ratio
            k, v = np.concatenate([entry_keys[:visible], k]), np.concatenate([entry_values[:visible], v])
        for head in range(heads):
            own = head // (heads // kv_heads)
            scores = k[:, own] @ queries[position, head] / np.sqrt(queries.shape[-1])
            weights = np.exp(scores - scores.max())
            result[position, head] = weights / weights.sum() @ v[:, own]
    return result.reshape(length, -1) @ layer["self_attn.o_proj.weight"].T


def _entries(
    config: dict[str, Any], layer: dict[str, np.ndarray], ratio: int, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [entries, N, D] of whole groups of positions x [entries * ratio, M]."""
    compressor = {k.removeprefix("self_attn.compressor."): v for k, v in layer.items()}
    count, kv_heads = len(x) // ratio, config["num_key_value_heads"]
    content = (x @ compressor["wkv.weight"].T).reshape(count, ratio, -1)
    gate = (x @ compressor["wgate.weight"].T).reshape(count, ratio, -1) + compressor["ape"]
    gate = np.exp(gate - gate.max(axis=1, keepdims=True))
    pooled = (gate / gate.sum(axis=1, keepdims=True) * content).sum(axis=1).reshape(count, kv_heads, -1)
    values = _norm(pooled, compressor["norm.weight"], config["rms_norm_eps"])
    return _rotate(values, ratio * np.arange(count)), values


def _norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * scale


def _rotate(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotary embedding of x [S, heads, D], halves against each other, base 10000."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    left, right = x[..., :half], x[..., half:]
    return np.concatenate(
        [left * np.cos(angle) - right * np.sin(angle), right * np.cos(angle) + left * np.sin(angle)], axis=-1
    )
