"""A training run small enough for a test: a random target with a tokenizer and a chat template."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import nnx
from safetensors.numpy import save_file
from tokenizers.pre_tokenizers import ByteLevel

from jaxspec.config import ModelConfig
from jaxspec.models.families.llama import Llama
from jaxspec.weights.loading import export_tensors

SPECIAL = ["<unk>", "<s>", "</s>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'][0] + ' ' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>a ' }}{% endif %}"
)
CONFIG = {
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def write_tokenizer(folder: Path, template: str | None) -> None:
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(ByteLevel.alphabet())])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", **({"chat_template": template} if template else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


def write_target(folder: Path, *, template: str | None = TEMPLATE, gain: float = 0.7, seed: int = 0) -> Path:
    """A random Llama, quiet enough to repeat itself: what a head can learn in a few hundred updates."""
    folder.mkdir(parents=True)
    model = Llama(ModelConfig.from_hf(CONFIG), dtype=jnp.float32, rngs=nnx.Rngs(seed))
    tensors = export_tensors(model)
    tensors = {
        name: array * np.float32(gain) if array.ndim == 2 else array for name, array in tensors.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    write_tokenizer(folder, template)
    return folder


def write_run(folder: Path, *, num_prompts: int = 48, **sections: dict) -> Path:
    """A target, prompts and the TOML of a run over them; `sections` add keys, as {"train": {"steps": 3}}."""
    if not (folder / "target").exists():
        write_target(folder / "target")
    words = ["red", "green", "blue", "one", "two", "three", "sun", "moon"]
    rng = np.random.default_rng(0)
    rows = [{"prompt": " ".join(rng.choice(words, 4)) + f" {i}"} for i in range(num_prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (folder / "held_out.jsonl").write_text('{"turns": ["What is blue?", "And what is not?"]}\n', "utf-8")
    document: dict[str, dict] = {
        "target": {"source": str(folder / "target")},
        "prompts": {"files": ["prompts.jsonl"], "held_out": ["held_out.jsonl"], "max_tokens": 64},
        "responses": {"temperatures": [0.0], "max_new_tokens": 40},
        "vocabulary": {"size": 128},
        "train": {
            "steps": 20,
            "batch_size": 8,
            "row_length": 64,
            "num_unroll_steps": 3,
            "learning_rate": 5e-3,
            "warmup_steps": 5,
            "validation_rows": 8,
            "validate_every": 10,
            "checkpoint_every": 10,
            "log_every": 5,
        },
        "evaluate": {
            "files": ["held_out.jsonl"],
            "temperatures": [0.0],
            "num_speculative_tokens": 3,
            "max_new_tokens": 32,
        },
        "engine": {"batch_size": 8},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    lines = []
    for name, section in document.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in section.items()]
    path = folder / "run.toml"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path
