"""GLM-4.7-Flash: the architecture of DeepSeek-V3 with other defaults.

Source: the `Glm4MoeLiteForCausalLM` of transformers.
"""

from typing import ClassVar

from jaxspec.models.families.deepseek.deepseek import Deepseek


class Glm4MoeLite(Deepseek):
    """A target network."""

    defaults: ClassVar = {
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "rope_interleave": True,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    }
    recycles_normed = False
