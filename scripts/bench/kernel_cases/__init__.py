"""Sizes for the tests and the benchmark of each kernel."""

from bench.kernel_cases import (
    choose_entries,
    delta_rule,
    expert_matmul,
    gumbel_sample,
    latent_attention,
    latent_write,
    listed_attention,
    mamba2,
    matmul,
    packed_attention,
    packed_matmul,
    paged_attention,
    process_logits,
    rope_kv_write,
    sinkhorn,
    slot_mapping,
)

__all__ = [
    "choose_entries",
    "delta_rule",
    "expert_matmul",
    "gumbel_sample",
    "latent_attention",
    "latent_write",
    "listed_attention",
    "mamba2",
    "matmul",
    "packed_attention",
    "packed_matmul",
    "paged_attention",
    "process_logits",
    "rope_kv_write",
    "sinkhorn",
    "slot_mapping",
]
