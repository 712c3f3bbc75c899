"""Qwen3.5, dense and with experts: Qwen3-Next with the inputs of its delta rules in other tensors.

Source: the `Qwen3_5ForCausalLM` and `Qwen3_5MoeForCausalLM` of transformers; the MTP layer is vLLM's
`qwen3_5_mtp.py`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jaxspec.config import ConfigError, MoeConfig
from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.models.families.qwen.gated_delta_gguf import (
    EXPERT_TENSORS,
    LAYER_TENSORS,
    NEXT_TENSORS,
    delta_config,
    expert_config,
    from_tensors,
    next_layer,
    tiled_tensors,
)
from jaxspec.models.families.qwen.qwen3_next import Qwen3Next
from jaxspec.models.layers.gated_delta import GatedDeltaNet


class Qwen3_5(Qwen3Next):
    """A target network, dense. Text has one position per token, so the rope of images does not matter."""

    defaults: ClassVar = {
        **Qwen3Next.defaults,
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    }
    gguf = GGUFArchitecture(
        "qwen35",
        "Qwen3_5ForCausalLM",
        (*LAYER_TENSORS, *NEXT_TENSORS),
        norm_offset=1.0,
        plain_norms=("linear_attn.norm",),
        config=delta_config,
        from_tensors=from_tensors,
        tensors=tiled_tensors,
        next_layer=next_layer,
    )
    delta_type = GatedDeltaNet

    @classmethod
    def experts(cls, config: Mapping[str, Any]) -> MoeConfig | None:
        return None


class Qwen3_5Moe(Qwen3Next):
    """A target network in which every layer has experts."""

    defaults: ClassVar = {
        **Qwen3Next.defaults,
        "vocab_size": 248320,
        "num_hidden_layers": 40,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    }
    gguf = replace(
        Qwen3_5.gguf,
        name="qwen35moe",
        model_class="Qwen3_5MoeForCausalLM",
        layer_tensors=(*Qwen3_5.gguf.layer_tensors, *EXPERT_TENSORS),
        config=expert_config,
    )
    delta_type = GatedDeltaNet

    @classmethod
    def experts(cls, config: Mapping[str, Any]) -> MoeConfig | None:
        # The family's class in transformers has no such key.
        if config["norm_topk_prob"] is not True:
            raise ConfigError(
                f"norm_topk_prob {config['norm_topk_prob']!r} is not supported; supported: True"
            )
        return super().experts(config)
