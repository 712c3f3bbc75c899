"""Heads of full size on their targets, from prompt to emitted tokens, without an array.

Sizes that no source gave are the target's own.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx
from full_size_run import assert_runs

from jaxspec.config import ModelConfig
from jaxspec.drafters.kinds.dflash import DFlash, DFlashConfig
from jaxspec.drafters.kinds.dspark import DSpark, DSparkConfig
from jaxspec.drafters.kinds.eagle1 import Eagle1, Eagle1Config
from jaxspec.drafters.kinds.eagle3 import Eagle3, Eagle3Config
from jaxspec.drafters.kinds.peagle import PEagle, PEagleConfig
from jaxspec.models.target import make_target
from jaxspec.weights.loading import declared

TARGETS = Path(__file__).parents[1] / "models" / "full_size"
LLAMA3_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
QWEN3_LAYERS: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
}
GPT_OSS_LAYERS = {
    "model_type": "llama",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
EAGLE1 = {**LLAMA3_8B, "num_hidden_layers": 1, "bias": False, "max_position_embeddings": 2048}
EAGLE3 = {**LLAMA3_8B, "num_hidden_layers": 1, "draft_vocab_size": 32000}
DFLASH_NESTED = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}

# Target, network, reader, config.json, names of tensors that stand for flags, K, parameters where published.
HEADS: dict[str, tuple] = {
    "EAGLE-1 on Llama-3-8B": (LLAMA3_8B, Eagle1, Eagle1Config, EAGLE1, (), 3, 0.25e9),
    "EAGLE-3 on Llama-3.1-8B": (LLAMA3_8B, Eagle3, Eagle3Config, EAGLE3, ("midlayer.",), 3, None),
    "EAGLE-3 on gpt-oss-20b": (
        "gpt-oss-20b",
        Eagle3,
        Eagle3Config,
        {"transformer_layer_config": GPT_OSS_LAYERS, "draft_vocab_size": 32000},
        ("input_norm.weight",),
        3,
        None,
    ),
    "P-EAGLE on Qwen3-8B": (
        "qwen3-8b",
        PEagle,
        PEagleConfig,
        {
            "transformer_layer_config": {**QWEN3_LAYERS, "num_hidden_layers": 4},
            "draft_vocab_size": 32000,
            "mask_token_id": 151669,
            "eagle_aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        },
        ("embed_tokens.weight",),
        4,
        None,
    ),
    "DFlash on Qwen3-8B": (
        "qwen3-8b",
        DFlash,
        DFlashConfig,
        {**QWEN3_LAYERS, "num_hidden_layers": 5, "block_size": 16, "dflash_config": DFLASH_NESTED},
        (),
        15,
        None,
    ),
    "DSpark on Qwen3-8B": (
        "qwen3-8b",
        DSpark,
        DSparkConfig,
        {
            **QWEN3_LAYERS,
            **DFLASH_NESTED,
            "architectures": ["Qwen3DSparkModel"],
            "num_hidden_layers": 5,
            "block_size": 7,
            "markov_rank": 256,
            "markov_head_type": "rnn",
            "confidence_head_with_markov": True,
        },
        ("embed_tokens.weight", "lm_head.weight", "confidence_head.proj.weight"),
        7,
        None,
    ),
}


SLOW = ("EAGLE-3 on Llama-3.1-8B", "P-EAGLE on Qwen3-8B")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in HEADS]
)
def test_full_size_heads_run_through_prefill_and_decode(name):
    target_config, network, reader, config, tensors, num_drafts, parameters = HEADS[name]
    if isinstance(target_config, str):
        target_config = json.loads((TARGETS / f"{target_config}.json").read_text("utf-8"))
    model = ModelConfig.from_hf(target_config)
    head = reader.from_hf(config, dict.fromkeys(tensors), model)
    args = {"dtype": jnp.bfloat16}
    target = nnx.eval_shape(lambda: make_target(model, **args, rngs=nnx.Rngs(0)))
    drafter = nnx.eval_shape(
        lambda: network(head, num_speculative_tokens=num_drafts, **args, rngs=nnx.Rngs(0))
    )
    if parameters is not None:
        count = sum(variable.get_value().size for variable, _ in declared(drafter))
        assert count == pytest.approx(parameters, rel=1e-2)

    assert_runs(target, drafter)
