"""The table of targets: transformers' class, the seed of weights and prompts, and the configuration."""

from dataclasses import dataclass
from typing import Any

# fmt: off


@dataclass(frozen=True)
class Case:
    """A target.

    Attributes:
      model: the name of transformers' class.
      seed: of weights and prompts.
      config: arguments of its configuration.
      greedy: lengths of the beginnings of the prompts that are answered greedily, too.
      answers: whether there are more prompts with answers.
      shards: the largest size of a file of weights.
    """

    model: str
    seed: int
    config: dict[str, Any]
    greedy: tuple[int, ...] = ()
    answers: bool = False
    shards: str = "5GB"


def rope(theta: float, kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **more}


def sizes(width: int = 32, inner: int = 48, layers: int = 3, heads: int = 4, kv: int = 2,
          vocabulary: int = 96, longest: int = 128, **more: Any) -> dict[str, Any]:
    return {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
            "max_position_embeddings": longest, "eos_token_id": 2, **more}


LENGTHS = (48, 33, 17, 5)
# Prompts are longer than original contexts; frequencies lie on both sides of every threshold of ropes.
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "pad_token_id": None}
LLAMA = sizes(layers=4, vocabulary=128, bos_token_id=1, pad_token_id=None)
QWEN2 = sizes(rms_norm_eps=1e-6)
QWEN3 = QWEN2 | {"head_dim": 16}
QWEN3_MOE = sizes(head_dim=16, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=3)
WINDOWED = {"use_sliding_window": True, "sliding_window": 7}
GPT_OSS = sizes(inner=32, longest=256, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                sliding_window=7,
                rope_parameters=rope(150000.0, "yarn", factor=8.0, beta_fast=32.0, beta_slow=1.0,
                                     truncate=False,
                                     original_max_position_embeddings=32), **NO_TOKENS)
GEMMA3 = sizes(layers=4, head_dim=16, query_pre_attn_scalar=24, sliding_window=7, **NO_TOKENS)
S, F, L = "sliding_attention", "full_attention", "linear_attention"
GLM4 = sizes(head_dim=12, **NO_TOKENS)
# `rms_norm_eps` is large where a wrong epsilon would not show, or a fixed one of other norms.
DEEPSEEK = sizes(inner=24, kv=4, moe_intermediate_size=8, q_lora_rank=20, kv_lora_rank=16,
                 qk_nope_head_dim=12,
                 qk_rope_head_dim=8, v_head_dim=10, n_routed_experts=8, num_experts_per_tok=3,
                 bos_token_id=None)
QWEN3_NEXT = sizes(layers=4, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
                   linear_key_head_dim=8,
                   linear_value_head_dim=12, rope_parameters=rope(1e4, partial_rotary_factor=0.25))
EXPERTS = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "num_experts": 8,
           "num_experts_per_tok": 3}
QWEN3_5_MOE = {key: value for key, value in QWEN3_NEXT.items() if key != "intermediate_size"} | EXPERTS
NEMOTRON = sizes(head_dim=16, ssm_state_size=8, mamba_num_heads=6, mamba_head_dim=4, n_groups=2,
                 chunk_size=16)
del NEMOTRON["num_hidden_layers"]
NEMOTRON_EXPERTS = {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24}
SMALL = sizes(bos_token_id=1, pad_token_id=None)
LONG = rope(10000.0, "longrope", partial_rotary_factor=0.75, short_factor=[1.0, 1.1, 1.2, 1.4, 1.7, 2.0],
            long_factor=[1.0, 1.5, 2.2, 3.1, 4.5, 6.0])
GEMMA4 = SMALL | {"pad_token_id": 0, "head_dim": 8, "sliding_window": 7}
MROPE = rope(100.0, mrope_section=[2, 1, 1])
QWEN_VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "patch_size": 2,
               "out_hidden_size": 32}

CASES = {
    "llama-tied": Case("LlamaForCausalLM", 1, LLAMA | {
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_parameters": rope(10000.0)}),
    "llama-untied-llama3-rope": Case("LlamaForCausalLM", 2, LLAMA | {
        "vocab_size": 160, "hidden_size": 48, "num_hidden_layers": 5, "head_dim": 16, "attention_bias": True,
        "mlp_bias": True, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
        "rope_parameters": rope(5000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                original_max_position_embeddings=32)}, shards="64KB"),
    "llama-linear-rope": Case("LlamaForCausalLM", 3, LLAMA | {
        "tie_word_embeddings": False, "rms_norm_eps": 1e-2, "rope_parameters": rope(1000.0, "linear",
                                                                                    factor=4.0)}),
    "llama-yarn-rope": Case("LlamaForCausalLM", 4, LLAMA | {
        "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "head_dim": 16,
        "rope_parameters": rope(10000.0, "yarn", **YARN)}),
    "llama-seven-layers": Case("LlamaForCausalLM", 5, LLAMA | {
        "vocab_size": 96, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 7,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
        "rope_parameters": rope(10000.0)}),
    "qwen2-tied": Case("Qwen2ForCausalLM", 801, QWEN2 | {
        "tie_word_embeddings": True, "rope_parameters": rope(1e6)}),
    "qwen2-windowed": Case("Qwen2ForCausalLM", 802, QWEN2 | WINDOWED | {
        "tie_word_embeddings": False, "num_key_value_heads": 1, "max_window_layers": 1,
        "rope_parameters": rope(10000.0)}),
    "qwen3-tied": Case("Qwen3ForCausalLM", 101, QWEN3 | {
        "tie_word_embeddings": True, "rope_parameters": rope(1e6)}),
    "qwen3-windowed": Case("Qwen3ForCausalLM", 102, QWEN3 | WINDOWED | {
        "tie_word_embeddings": False, "num_key_value_heads": 1, "max_window_layers": 1,
        "rope_parameters": rope(10000.0)}),
    "qwen3-moe": Case("Qwen3MoeForCausalLM", 301, QWEN3_MOE | {
        "norm_topk_prob": True, "mlp_only_layers": [1], "rope_parameters": rope(1e6)}),
    "qwen3-moe-windowed": Case("Qwen3MoeForCausalLM", 302, QWEN3_MOE | WINDOWED | {
        "norm_topk_prob": False, "decoder_sparse_step": 2, "num_hidden_layers": 2,
        "tie_word_embeddings": True,
        "rope_parameters": rope(10000.0)}),
    # transformers ignores `layer_types` and `max_window_layers` for this family.
    "qwen3-moe-layer-types": Case("Qwen3MoeForCausalLM", 303, QWEN3_MOE | {
        "norm_topk_prob": True, "num_hidden_layers": 2, "layer_types": [F, S], "max_window_layers": 1,
        "rope_parameters": rope(10000.0)}),
    "qwen3-next": Case("Qwen3NextForCausalLM", 1101, QWEN3_NEXT | EXPERTS | {"mlp_only_layers": [1]},
        answers=True),
    "qwen3-next-odd": Case("Qwen3NextForCausalLM", 1102, QWEN3_NEXT | EXPERTS | {
        "linear_num_value_heads": 2, "num_hidden_layers": 5, "layer_types": [F, L, L, F, L],
        "linear_conv_kernel_dim": 3, "decoder_sparse_step": 2, "norm_topk_prob": False,
        "attention_bias": True,
        "tie_word_embeddings": True, "rms_norm_eps": 1e-2}, answers=True),
    "qwen3-5": Case("Qwen3_5ForCausalLM", 1103, QWEN3_NEXT | {
        "rope_parameters": rope(1e4, partial_rotary_factor=0.5), "full_attention_interval": 2}, answers=True),
    "qwen3-5-nested": Case("Qwen3_5ForConditionalGeneration", 1104, {
        "text_config": QWEN3_NEXT | {"rope_parameters": rope(
            1e4, partial_rotary_factor=0.25, mrope_section=[1, 1, 0], mrope_interleaved=True)},
        "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
                          "out_hidden_size": 32, "patch_size": 2, "num_position_embeddings": 16},
        "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
        "tie_word_embeddings": True}, answers=True),
    "qwen3-5-moe": Case("Qwen3_5MoeForCausalLM", 1105, QWEN3_5_MOE, answers=True),
    "gpt-oss": Case("GptOssForCausalLM", 201, GPT_OSS),
    "gpt-oss-mxfp4": Case("GptOssForCausalLM", 202, GPT_OSS | {  # several blocks of 32 to a row
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}),
    "gemma3": Case("Gemma3ForCausalLM", 401, GEMMA3 | {
        "layer_types": [S, S, F, S],
        "rope_parameters": {F: rope(1e5, "linear", factor=8.0), S: rope(100.0)}}),
    "gemma3-default-rope": Case("Gemma3ForCausalLM", 402, GEMMA3 | {
        "num_hidden_layers": 2, "num_key_value_heads": 1, "layer_types": [F, S], "rms_norm_eps": 1e-2}),
    # transformers reads no "type" for this family.
    "gemma3-typed-rope": Case("Gemma3ForCausalLM", 403, GEMMA3 | {
        "num_hidden_layers": 2, "layer_types": [F, S], "rope_scaling": {"type": "linear", "factor": 8.0}}),
    "glm4": Case("Glm4ForCausalLM", 1001, GLM4 | {
        "rope_parameters": rope(100.0, partial_rotary_factor=0.5), "rms_norm_eps": 1e-2}),
    "glm4-yarn-rope": Case("Glm4ForCausalLM", 1002, GLM4 | {
        "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16, "attention_bias": False,
        "tie_word_embeddings": True, "rope_parameters": rope(10000.0, "yarn", partial_rotary_factor=0.75,
                                                             **YARN)}),
    "deepseek-v3": Case("DeepseekV3ForCausalLM", 501, DEEPSEEK | {
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "rms_norm_eps": 1e-2,
        "rope_parameters": rope(10000.0, "yarn", factor=8.0, beta_fast=32.0, beta_slow=1.0, mscale=0.8,
                                mscale_all_dim=0.6, original_max_position_embeddings=16)}),
    "deepseek-v3-direct": Case("DeepseekV3ForCausalLM", 502, DEEPSEEK | {
        "num_hidden_layers": 2, "q_lora_rank": None, "rope_interleave": False, "n_group": 4, "topk_group": 2,
        "norm_topk_prob": False, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "rope_parameters": rope(10000.0)}),
    "glm4-moe-lite": Case("Glm4MoeLiteForCausalLM", 503, DEEPSEEK | {
        "rms_norm_eps": 1e-2, "rope_parameters": rope(1e6)}),
    "nemotron-h": Case("NemotronHForCausalLM", 1201, NEMOTRON | NEMOTRON_EXPERTS | {
        "layers_block_type": [L, "moe", F, L, "moe"], "n_routed_experts": 8, "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.5, "n_group": 2, "topk_group": 1}, answers=True),
    "nemotron-h-latent": Case("NemotronHForCausalLM", 1202, NEMOTRON | NEMOTRON_EXPERTS | {
        "layers_block_type": ["moe", L, F, "mlp", L], "n_groups": 3, "mlp_bias": True, "n_routed_experts": 6,
        "num_experts_per_tok": 2, "moe_latent_size": 12, "norm_topk_prob": False}, answers=True),
    "nemotron-h-dense": Case("NemotronHForCausalLM", 1203, NEMOTRON | {
        "layers_block_type": [F, L, "mlp", L], "conv_kernel": 3, "use_conv_bias": False, "use_bias": True,
        "mlp_bias": True, "n_groups": 1, "layer_norm_epsilon": 1e-2, "tie_word_embeddings": True},
        answers=True),
    "olmo2": Case("Olmo2ForCausalLM", 501, SMALL | {
        "num_attention_heads": 6, "hidden_size": 48, "rms_norm_eps": 1e-2, "attention_bias": True}, LENGTHS),
    "olmo3": Case("Olmo3ForCausalLM", 502, SMALL | {
        "num_hidden_layers": 5, "sliding_window": 7, "tie_word_embeddings": True,
        "rope_parameters": {F: rope(5000.0, "yarn", **YARN), S: rope(300.0)}}, LENGTHS),
    "smollm3": Case("SmolLM3ForCausalLM", 502, SMALL | {
        "num_hidden_layers": 5, "rms_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True}, LENGTHS),
    "smollm3-windowed": Case("SmolLM3ForCausalLM", 501, SMALL | WINDOWED | {
        "no_rope_layers": [0, 1, 0, 1], "tie_word_embeddings": False, "rope_parameters": rope(100.0)},
        LENGTHS),
    "phi3": Case("Phi3ForCausalLM", 501, SMALL | {
        "hidden_size": 64, "num_key_value_heads": 1, "sliding_window": 7,
        "rope_parameters": rope(100.0, partial_rotary_factor=0.5)}, LENGTHS),
    # transformers takes the long factors past 32 positions, and the short ones up to 128.
    "phi3-long": Case("Phi3ForCausalLM", 504, SMALL | {
        "hidden_size": 64, "tie_word_embeddings": True, "original_max_position_embeddings": 32,
        "rope_parameters": LONG}, (48, 44, 40, 36)),
    "phi3-short": Case("Phi3ForCausalLM", 501, SMALL | {
        "hidden_size": 64, "max_position_embeddings": 256, "original_max_position_embeddings": 128,
        "rope_parameters": LONG}, LENGTHS),
    "granite": Case("GraniteForCausalLM", 501, SMALL | {
        "embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
        "logits_scaling": 3.0,
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, LENGTHS),
    "lfm2": Case("Lfm2ForCausalLM", 501, SMALL | {
        "num_hidden_layers": 4, "full_attn_idxs": [2], "norm_eps": 1e-2, "block_multiple_of": 20,
        "block_ffn_dim_multiplier": 1.5, "rope_parameters": rope(100.0)}, LENGTHS),
    "lfm2-biased": Case("Lfm2ForCausalLM", 502, SMALL | {
        "layer_types": [F, "conv", F], "conv_bias": True, "conv_L_cache": 5,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False, "num_key_value_heads": 1}, LENGTHS),
    "minimax-m2": Case("MiniMaxM2ForCausalLM", 501, SMALL | {
        "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 16, "head_dim": 12,
        "rms_norm_eps": 1e-2, "rope_parameters": rope(100.0, partial_rotary_factor=0.5)}, LENGTHS),
    "gemma4": Case("Gemma4ForCausalLM", 701, GEMMA4 | {
        "num_hidden_layers": 6, "layer_types": [S, F] * 3, "num_kv_shared_layers": 2, "global_head_dim": 16,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "use_double_wide_mlp": True,
        "final_logit_softcapping": 20.0, "rms_norm_eps": 1e-2, "rope_parameters": {
            S: rope(100.0), F: rope(1000.0, "proportional", partial_rotary_factor=0.25)}}, LENGTHS),
    "gemma4-moe": Case("Gemma4ForCausalLM", 701, GEMMA4 | {
        "layer_types": [S, S, F], "global_head_dim": 12, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2,
        "moe_intermediate_size": 16, "use_bidirectional_attention": "vision"}, LENGTHS),
    "qwen2.5-vl": Case("Qwen2_5_VLForConditionalGeneration", 601, {
        "text_config": SMALL | {"rope_parameters": MROPE},
        "vision_config": QWEN_VISION | {"fullatt_block_indexes": [0]}}, LENGTHS),
    "qwen3-vl": Case("Qwen3VLForConditionalGeneration", 601, {
        "text_config": SMALL | {"head_dim": 12, "rope_parameters": MROPE | {
            "mrope_section": [2, 2, 2], "mrope_interleaved": True}},
        "vision_config": QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        "tie_word_embeddings": True}, LENGTHS),
    "gemma3-vision": Case("Gemma3ForConditionalGeneration", 601, {
        "text_config": SMALL | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 7,
                                "layer_types": [S, F, S], "pad_token_id": 0},
        "vision_config": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                          "num_attention_heads": 2,
                          "image_size": 4, "patch_size": 2},
        "mm_tokens_per_image": 1}, LENGTHS),
}
