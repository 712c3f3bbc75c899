"""Checkpoints of networks small enough to compile in a second, written as Hugging Face folders.

Targets are random. Heads are random too, or made to say the last token again: a random target runs into
loops, so such a head is accepted in some places and rejected in others.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxspec.config import ModelConfig
from jaxspec.models.llama import Llama
from jaxspec.models.loading import declared

TARGET: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_target(folder: Path, *, seed: int = 0, gain: float = 2.5, **changes: Any) -> Path:
    """A random Llama. `gain` scales its matrices: the larger, the less it repeats itself."""
    config = {**TARGET, **changes}
    rng = np.random.default_rng(seed)
    model = nnx.eval_shape(lambda: Llama(ModelConfig.from_hf(config), dtype=jnp.float32, rngs=nnx.Rngs(0)))
    shapes = dict(tensor for _, source in declared(model) for tensor in source.tensors)
    tensors = {
        name: gain * _matrix(rng, shape) if len(shape) == 2 else np.ones(shape, np.float32)
        for name, shape in shapes.items()
    }
    return write_folder(folder, config, tensors)


def perturb(source: Path, folder: Path, *, scale: float, seed: int = 0) -> Path:
    """A copy with noise of `scale` standard deviations on every matrix: a draft model that is often right."""
    rng = np.random.default_rng(seed)
    tensors = {
        name: (array + scale * array.std() * rng.normal(size=array.shape)).astype(np.float32)
        for name, array in load_file(source / "model.safetensors").items()
    }
    return write_folder(folder, json.loads((source / "config.json").read_text("utf-8")), tensors)


def _layer(
    rng: np.random.Generator, prefix: str, config: dict[str, Any], in_width: int
) -> dict[str, np.ndarray]:
    width, inner = config["hidden_size"], config["intermediate_size"]
    size = width // config["num_attention_heads"]
    keys = config["num_key_value_heads"] * size
    shapes = {
        "self_attn.q_proj": (width, in_width),
        "self_attn.k_proj": (keys, in_width),
        "self_attn.v_proj": (keys, in_width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    tensors = {f"{prefix}.{name}.weight": _matrix(rng, shape) for name, shape in shapes.items()}
    return {**tensors, f"{prefix}.post_attention_layernorm.weight": np.ones(width, np.float32)}


def _matrix(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return (rng.normal(size=shape) * shape[1] ** -0.5).astype(np.float32)


def _quieten(tensors: dict[str, np.ndarray]) -> None:
    """Makes a layer change its input only a little."""
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.2


def write_eagle3(
    folder: Path, target: Path, *, repeats: bool = True, draft_vocab_size: int = 40, seed: int = 1
) -> Path:
    """An EAGLE-3 head in SafeAILab's format; `repeats` makes it draft the last token again."""
    rng = np.random.default_rng(seed)
    config = json.loads((target / "config.json").read_text("utf-8"))
    weights = load_file(target / "model.safetensors")
    width, depth, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    ids = np.sort(rng.choice(vocabulary, size=draft_vocab_size, replace=False))
    tensors = _layer(rng, "midlayer", config, 2 * width)
    ones = np.ones(width, np.float32)
    tensors |= {
        "fc.weight": _matrix(rng, (width, 3 * width)),
        "midlayer.hidden_norm.weight": ones,
        "midlayer.input_layernorm.weight": ones.copy(),
        "norm.weight": ones.copy(),
        "lm_head.weight": _matrix(rng, (draft_vocab_size, width)),
        "d2t": (ids - np.arange(draft_vocab_size)).astype(np.int64),
        "t2d": np.isin(np.arange(vocabulary), ids),
    }
    if repeats:
        # The output of the target's last layer goes straight to the target's own norm and output rows.
        _quieten(tensors)
        tensors["fc.weight"] = np.concatenate(
            [np.zeros((width, 2 * width), np.float32), np.eye(width, dtype=np.float32)], axis=1
        )
        tensors["norm.weight"] = weights["model.norm.weight"]
        tensors["lm_head.weight"] = weights["lm_head.weight"][ids]
    head_config = {
        **{key: value for key, value in config.items() if key != "tie_word_embeddings"},
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": [0, depth // 2, depth],
    }
    return write_folder(folder, head_config, tensors)


def write_eagle1(folder: Path, target: Path, *, repeats: bool = True, seed: int = 1) -> Path:
    """An EAGLE-1 head; `repeats` makes it draft the last token again."""
    rng = np.random.default_rng(seed)
    config = json.loads((target / "config.json").read_text("utf-8"))
    width = config["hidden_size"]
    tensors = {**_layer(rng, "layers.0", config, width), "fc.weight": _matrix(rng, (width, 2 * width))}
    if repeats:
        _quieten(tensors)
        identity = np.eye(width, dtype=np.float32)
        tensors["fc.weight"] = np.concatenate([np.zeros_like(identity), identity], axis=1)
    return write_folder(folder, {**config, "num_hidden_layers": 1, "bias": False}, tensors)
