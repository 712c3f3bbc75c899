"""Sizes for the tests and the benchmark of each kernel."""

from bench.kernel_cases import (
    choose_entries,
    choose_experts,
    expert_matmul,
    gumbel_sample,
    latent_attention,
    latent_write,
    linear_recurrence,
    matmul,
    packed_attention,
    packed_matmul,
    paged_attention,
    process_logits,
    rope_kv_write,
    sinkhorn,
    slot_mapping,
    sparse_attention,
)

__all__ = [
    "choose_entries",
    "choose_experts",
    "expert_matmul",
    "gumbel_sample",
    "latent_attention",
    "latent_write",
    "linear_recurrence",
    "matmul",
    "packed_attention",
    "packed_matmul",
    "paged_attention",
    "process_logits",
    "rope_kv_write",
    "sinkhorn",
    "slot_mapping",
    "sparse_attention",
]
