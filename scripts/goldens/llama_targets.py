"""Llama targets: transformers' LlamaForCausalLM on random weights, every layer's input captured."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, LENGTH = 2, 48

# Prompts are longer than the original context; frequencies lie on both sides of every scaling threshold.
CASES: dict[str, dict] = {
    "llama-tied": {
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "llama-untied-llama3-rope": {
        "vocab_size": 160,
        "hidden_size": 48,
        "num_hidden_layers": 5,
        "head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama-linear-rope": {
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-2,  # large enough to detect a wrong epsilon
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    },
    "llama-yarn-rope": {
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama-seven-layers": {
        "vocab_size": 96,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 7,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
SHARDED = {"llama-untied-llama3-rope": "64KB"}

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def random_weight(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Norm weights 1 + N(0, 0.3), everything else N(0, 0.2)."""
    noise = torch.randn(shape, generator=generator)
    return 1 + 0.3 * noise if "norm" in name else 0.2 * noise


def build(case: str) -> tuple[LlamaForCausalLM, torch.Tensor]:
    """The model of `case` with random weights, and its prompts [B,S]."""
    generator = torch.Generator().manual_seed(1 + list(CASES).index(case))
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **CASES[case]}, attn_implementation="eager"))
    for name, parameter in model.named_parameters():
        parameter.data = random_weight(name, parameter.shape, generator)
    return model.eval(), torch.randint(3, model.config.vocab_size, (BATCH, LENGTH), generator=generator)


def run(model: LlamaForCausalLM, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits [B,S,V], `hidden` [L+1,B,S,M] and `normed` [B,S,M] for `input_ids` [B,S].

    `hidden[i]` enters layer i (capture id i); `hidden[L]` leaves the last layer; `normed` is its final norm.
    """
    text = getattr(model.model, "language_model", model.model)
    names = ("embedding_norm", "norm_f", "norm")
    last_norm = next(getattr(text, name) for name in names if hasattr(text, name))
    hidden: list[torch.Tensor] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs: hidden.append((args[0] if args else kwargs["hidden_states"]).clone()),
            with_kwargs=True,
        )
        for module in [*text.layers, last_norm]
    ]
    with torch.no_grad():
        output = model(input_ids, output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {"logits": output.logits, "hidden": torch.stack(hidden), "normed": output.hidden_states[-1]}


def write(root: Path) -> None:
    """Write `root/<case>/checkpoint` and `root/<case>/outputs.safetensors` for every case."""
    for case in CASES:
        model, input_ids = build(case)
        outputs = run(model, input_ids)
        model.save_pretrained(root / case / "checkpoint", max_shard_size=SHARDED.get(case, "5GB"))
        tensors = {"input_ids": input_ids, **outputs}
        save_file({name: t.contiguous() for name, t in tensors.items()}, root / case / "outputs.safetensors")
