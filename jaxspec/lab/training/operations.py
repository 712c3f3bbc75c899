"""Floating-point operations of an update, for comparing throughput with a device's peak."""

from typing import Any

import jax
from flax import nnx

from jaxspec.config import ModelConfig
from jaxspec.drafters.kinds.eagle3 import Eagle3
from jaxspec.models.decoder import Decoder


def operations_per_token(target: Decoder, head: Eagle3, *, row_length: int, num_unroll_steps: int) -> float:
    """Floating-point operations of matrix products per token of a packed row.

    Counts the target's forward pass and output projections, and the forward and backward passes of the head
    in every draft step, without recomputation, norms and softmax. Attention is counted as if every token saw
    the whole row, although kernels on a GPU compute only what is visible. Only the chosen experts are
    counted. Output projections are counted as if every token were part of an answer.
    """
    outputs = head.config.draft_vocab_size
    forward = _layers(target.layers, target.config, row_length) + 2 * target.config.hidden_size * (
        target.config.vocab_size + outputs
    )
    layers = _layers((head.first, *head.rest), head.config.layers, row_length)
    # The output rows are frozen, so the backward pass needs only the product for the input.
    step = 3 * layers + 2 * (2 * head.needs.state_size * outputs)
    fuse = 2 * _products(head.fc, head.config.layers)
    return float(forward + fuse + num_unroll_steps * step)


def _layers(layers: Any, config: ModelConfig, row_length: int) -> float:
    """Operations per token of the forward pass of decoder layers."""
    latent = config.latent
    width = 2 * (config.compressed or config).head_dim
    if latent:
        width = 2 * latent.kv_lora_rank + latent.qk_rope_head_dim
    attention = 2 * row_length * config.num_attention_heads * width
    return sum(_products(layer, config) + attention for layer in layers)


def _products(module: Any, config: ModelConfig) -> float:
    """Operations of multiplying one row by every matrix of a module."""
    moe, total = config.moe, 0.0
    for weight in jax.tree.leaves(nnx.state(module, nnx.Param)):
        if weight.ndim < 2:
            continue
        is_expert = moe is not None and weight.ndim > 2 and weight.shape[0] == moe.num_experts
        total += 2 * weight.size * (moe.experts_per_token / moe.num_experts if moe and is_expert else 1)
    return total
