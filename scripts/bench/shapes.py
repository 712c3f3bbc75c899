"""Networks of real shapes with random weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from bench.random_weights import put_whole, random_module
from jaxspec.config import ModelConfig
from jaxspec.drafters.base import Drafter
from jaxspec.drafters.kinds.dflash import DFlash, DFlashConfig
from jaxspec.drafters.kinds.dspark import DSpark, DSparkConfig
from jaxspec.drafters.kinds.eagle1 import Eagle1, Eagle1Config
from jaxspec.drafters.kinds.eagle3 import Eagle3, Eagle3Config, default_capture
from jaxspec.drafters.kinds.mtp import Mtp
from jaxspec.drafters.kinds.none import NoDrafter
from jaxspec.drafters.vocabulary import vocabulary_buffers
from jaxspec.engine.device.step import Models
from jaxspec.models.target import make_target
from jaxspec.sharding import make_mesh
from jaxspec.weights.packed_weights import keeps_packed


@dataclass(frozen=True)
class Shape:
    """A target and its drafter.

    Attributes:
      target: the keys of the target's `config.json`.
      packed_experts: the checkpoint has experts in MXFP4, which stay packed if a kernel supports it.
      codes: the format of the target's matrices (see `random_module`); empty for bfloat16.
      head_codes: the same for the head's matrices and output rows.
      drafter: "eagle3", "eagle1", "mtp", "dflash" or "dspark".
      head: keys of the head's layers that differ from Llama's (Qwen3's in blocks) of the target's sizes.
      draft_vocab_size: W of an EAGLE-3 head.
    """

    target: Mapping[str, Any]
    packed_experts: bool = False
    codes: str = ""
    head_codes: str = ""
    drafter: str = "eagle3"
    head: Mapping[str, Any] = field(default_factory=dict)
    draft_vocab_size: int = 32000


_LLAMA3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1 << 17,
}

_GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 1 << 17,
}

_QWEN3_30B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
}


def _deepseek_v4(ratios: list[int]) -> dict[str, Any]:
    """DeepSeek-V4-Flash with a layer for each of the compression's ratios."""
    return {
        "model_type": "deepseek_v4",
        "vocab_size": 129280,
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": len(ratios),
        "num_attention_heads": 64,
        "compress_ratios": ratios,
        "num_hash_layers": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "max_position_embeddings": 1 << 20,
    }


SHAPES: Mapping[str, Shape] = {
    "smollm2-135m": Shape(
        target={
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "max_position_embeddings": 1 << 17,
        },
        draft_vocab_size=8192,
    ),
    "llama3-8b": Shape(_LLAMA3_8B),
    "llama3-8b-fp8": Shape(_LLAMA3_8B, codes="fp8"),
    "llama3-8b-fp8-by-output": Shape(_LLAMA3_8B, codes="fp8-by-output"),
    "llama3-8b-fp8-and-head": Shape(_LLAMA3_8B, codes="fp8", head_codes="fp8"),
    "llama3-8b-int4": Shape(_LLAMA3_8B, codes="int4"),
    "llama3-8b-awq": Shape(_LLAMA3_8B, codes="awq"),
    "llama3-70b": Shape(
        {
            **_LLAMA3_8B,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        }
    ),
    "llama3-8b-eagle1": Shape(_LLAMA3_8B, drafter="eagle1"),
    "llama3-8b-dflash": Shape(_LLAMA3_8B, drafter="dflash"),
    "llama3-8b-dspark": Shape(_LLAMA3_8B, drafter="dspark"),
    "qwen3-8b": Shape(
        target={
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
        },
    ),
    # The family's defaults in transformers.
    "qwen3.5-9b": Shape({"model_type": "qwen3_5_text", "max_position_embeddings": 1 << 18}, drafter="mtp"),
    "qwen3-30b-a3b": Shape(_QWEN3_30B),
    "qwen3-30b-a3b-fp8": Shape(_QWEN3_30B, codes="fp8"),
    "qwen3-30b-a3b-int4": Shape(_QWEN3_30B, codes="int4"),
    "gpt-oss-20b": Shape(_GPT_OSS_20B, packed_experts=True, head={"intermediate_size": 17280}),
    "gpt-oss-20b-bfloat16": Shape(_GPT_OSS_20B, head={"intermediate_size": 17280}),
    "glm-4.7-flash": Shape(
        target={
            "model_type": "glm4_moe_lite",
            "vocab_size": 154880,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "rope_theta": 1e6,
            "max_position_embeddings": 202752,
        },
        drafter="mtp",
    ),
    # What fits of 43 layers on an H100 and on an H200: in bfloat16 a layer has 13 GB.
    "deepseek-v4-flash-3-layers": Shape(_deepseek_v4([0, 4, 128]), drafter="mtp"),
    "deepseek-v4-flash-4-layers": Shape(_deepseek_v4([0, 4, 128, 4]), drafter="mtp"),
    "tiny": Shape(
        target={
            "model_type": "llama",
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1 << 17,
        },
        draft_vocab_size=128,
    ),
}


def build_models(
    shape: Shape,
    *,
    num_drafts: int,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    split_drafter: bool = True,
    activations: str | None = None,
) -> Models:
    """A target and a drafter with random weights.

    Args:
      shape: their sizes.
      num_drafts: K; 0 for no drafter.
      dtype: of the weights.
      mesh: the devices over which they are split; one by default.
      split_drafter: False puts the whole drafter on every device.
      activations: `EngineConfig.gpu_activations`.
    """
    mesh = mesh or make_mesh()
    config = ModelConfig.from_hf(shape.target).over(mesh.size)
    packed = keeps_packed(dtype, devices=mesh.size)
    target = random_module(
        lambda rngs: make_target(config, dtype=dtype, rngs=rngs),
        mesh,
        packed_experts=shape.packed_experts and packed,
        codes=shape.codes if packed else "",
        activations=activations,
    )
    if not num_drafts:
        return Models(target, NoDrafter())
    kind, head = _drafter(shape, config)
    if split_drafter:
        head = head.over(mesh.size)

    def make(rngs: nnx.Rngs) -> Drafter:
        return kind(head, num_speculative_tokens=num_drafts, dtype=dtype, rngs=rngs)

    head_codes = shape.head_codes if packed else ""
    names = ("_proj.weight", "fc.weight", "lm_head.weight")
    drafter = random_module(make, mesh, seed=1, codes=head_codes, quantized=names, is_split=split_drafter)
    drafter.needs = replace(drafter.needs, is_split=split_drafter)
    if isinstance(drafter, Eagle3):
        drafter.target_ids, drafter.draft_ids = vocabulary_buffers(shape.draft_vocab_size, config.vocab_size)
    put_whole(drafter, mesh)
    return Models(target, drafter)


def _drafter(shape: Shape, config: ModelConfig) -> tuple[Callable[..., Drafter], Any]:
    """The drafter's class, and its constructor's first argument."""
    if shape.drafter == "mtp":
        return Mtp.for_model(config), config
    in_blocks = shape.drafter in ("dflash", "dspark")
    sizes = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    layer = ModelConfig.from_hf(
        {
            "model_type": "qwen3" if in_blocks else "llama",
            "num_hidden_layers": 5 if in_blocks else 1,
            "max_position_embeddings": config.max_position_embeddings,
            "intermediate_size": config.intermediate_size,
            **{name: getattr(config, name) for name in sizes},
            **shape.head,
        }
    )
    if shape.drafter == "eagle1":
        return Eagle1, Eagle1Config(layer, fc_bias=False)
    if in_blocks:
        depth = config.num_hidden_layers
        settings: dict[str, Any] = {
            "layers": layer,
            "mask_token": 0,
            "capture": tuple(2 + i * (depth - 4) // 4 for i in range(5)),
            "target_hidden_size": config.hidden_size,
            "draft_vocab_size": config.vocab_size,
            "causal": (False,) * 5,
        }
        if shape.drafter == "dflash":
            return DFlash, DFlashConfig(block_size=9, **settings)
        both: dict[str, Any] = {
            "markov_rank": 256,
            "has_confidence": True,
            "confidence_head_with_markov": True,
        }
        return DSpark, DSparkConfig(block_size=8, anchor_drafts=True, **both, **settings)
    head = Eagle3Config(
        layers=layer,
        draft_vocab_size=shape.draft_vocab_size,
        target_hidden_size=config.hidden_size,
        capture=default_capture(config.num_hidden_layers),
    )
    return Eagle3, head
