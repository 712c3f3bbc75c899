"""Qwen3-MoE: Qwen3 with routed experts.

Source: the `Qwen3MoeForCausalLM` of transformers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxspec.config import ModelConfig, MoeConfig, joined
from jaxspec.files.gguf.architecture import GGUFArchitecture
from jaxspec.files.gguf.metadata import Metadata
from jaxspec.models.decoder import Decoder
from jaxspec.models.families.qwen.qwen3 import QK_NORMS
from jaxspec.models.layers.moe import STACKED_EXPERTS


def _gguf_config(meta: Metadata) -> dict[str, Any]:
    return {
        "num_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "moe_intermediate_size": meta.size("expert_feed_forward_length"),
        # GGUFs of the published models lack the key; the models' configs set it.
        "norm_topk_prob": meta.flag("expert_weights_norm", True),
    }


class Qwen3Moe(Decoder):
    """A target network."""

    defaults: ClassVar = {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
    }
    gguf = GGUFArchitecture(
        "qwen3moe", "Qwen3MoeForCausalLM", (*QK_NORMS, "mlp.gate", *STACKED_EXPERTS), config=_gguf_config
    )

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        # transformers ignores this family's layer_types and max_window_layers.
        return super().read_config(joined(config, {"layer_types": None}))

    @classmethod
    def is_windowed(cls, config: Mapping[str, Any], layer: int) -> bool:
        return True

    @classmethod
    def own_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        step, dense = config["decoder_sparse_step"], config["mlp_only_layers"] or ()
        layers = range(config["num_hidden_layers"])
        moe = MoeConfig(
            # transformers 5 writes num_local_experts; published checkpoints have num_experts.
            num_experts=config.get("num_local_experts") or config["num_experts"],
            experts_per_token=config["num_experts_per_tok"],
            intermediate_size=config["moe_intermediate_size"],
            normalize=bool(config["norm_topk_prob"]),
            dense_layers=tuple(i for i in layers if i in dense or (i + 1) % step),
        )
        return {"qk_norm": True, "moe": moe}
