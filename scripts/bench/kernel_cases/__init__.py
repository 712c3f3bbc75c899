"""Sizes for the tests and the benchmark of each kernel."""

from bench.kernel_cases import (
    expert_matmul,
    gumbel_sample,
    indexed_attention,
    kv_write,
    latent_attention,
    latent_write,
    matmul,
    packed_attention,
    packed_matmul,
    paged_attention,
    process_logits,
    rope_kv_write,
    slot_mapping,
)

__all__ = [
    "expert_matmul",
    "gumbel_sample",
    "indexed_attention",
    "kv_write",
    "latent_attention",
    "latent_write",
    "matmul",
    "packed_attention",
    "packed_matmul",
    "paged_attention",
    "process_logits",
    "rope_kv_write",
    "slot_mapping",
]
