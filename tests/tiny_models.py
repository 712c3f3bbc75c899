"""Checkpoints of networks small enough to compile in a second, written as Hugging Face folders.

Targets are random. Heads are random, or made to repeat the last token: a random target runs into loops, so
that drafts of such a head are sometimes accepted and sometimes rejected.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxspec.config import ModelConfig
from jaxspec.models.target import make_target
from jaxspec.weights.loading import declared
from jaxspec.weights.parameters import NoKeys

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
    """Writes a random target, a Llama by default. `gain` scales its matrices; a larger one makes it repeat
    itself less."""
    config = {**TARGET, **changes}
    rng = np.random.default_rng(seed)
    shape = ModelConfig.from_hf(config)
    model = nnx.eval_shape(lambda: make_target(shape, dtype=jnp.float32, rngs=NoKeys()))
    kinds = {name: (source.kind, size) for _, source in declared(model) for name, size in source.tensors}
    tensors: dict[str, np.ndarray] = {}
    for name, (kind, size) in kinds.items():
        if kind == "int":
            assert shape.moe is not None
            tensors[name] = rng.integers(shape.moe.num_experts, size=size)
        else:
            tensors[name] = gain * _matrix(rng, size) if len(size) >= 2 else np.ones(size, np.float32)
    # States that last for one token or for fifty.
    tensors |= {
        name: rng.uniform(-4, 0, tensor.shape).astype(np.float32)
        for name, tensor in tensors.items()
        if name.endswith(".A_log")
    }
    return write_folder(folder, config, tensors)


def perturb(source: Path, folder: Path, *, scale: float, seed: int = 0) -> Path:
    """Writes a copy with noise of `scale` standard deviations on every matrix: a good draft model."""
    rng = np.random.default_rng(seed)
    tensors = {
        name: array
        if array.dtype.kind == "i"
        else (array + scale * array.std() * rng.normal(size=array.shape)).astype(np.float32)
        for name, array in load_file(source / "model.safetensors").items()
    }
    return write_folder(folder, json.loads((source / "config.json").read_text("utf-8")), tensors)


def with_rows(source: Path, folder: Path, rows: int, *, seed: int = 0) -> Path:
    """Writes a copy with so many rows for tokens: its first ones, or all and more that give large logits."""
    rng = np.random.default_rng(seed)
    tensors = load_file(source / "model.safetensors")
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & set(tensors):
        array = tensors[name][:rows]
        more = rng.normal(size=(rows - len(array), array.shape[1])) * 20 * array.std()
        tensors[name] = np.concatenate([array, more.astype(np.float32)])
    for name in (name for name in tensors if name.endswith(".tid2eid")):
        tensors[name] = np.resize(tensors[name], (rows, tensors[name].shape[1]))
    config = json.loads((source / "config.json").read_text("utf-8"))
    return write_folder(folder, {**config, "vocab_size": rows}, tensors)


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


def _matrix(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return (rng.normal(size=shape) * shape[1] ** -0.5).astype(np.float32)


def _quieten(tensors: dict[str, np.ndarray]) -> None:
    """Scales a layer so that it changes its input only a little."""
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.2


def _target(folder: Path) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """A target's config, the scale of its final norm, and its output rows [V, M]."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    weights = load_file(folder / "model.safetensors")
    rows = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    name = "embedding_norm" if config["model_type"] == "lfm2" else "norm"
    scale = weights[f"model.{name}.weight"]
    scale = scale + (config["model_type"] in ("gemma3_text", "qwen3_5_text"))
    return config, scale, rows


def _head_config(config: dict[str, Any], style: str) -> dict[str, Any]:
    """The config of a head with one "llama" or "qwen3" layer for a target."""
    same = ("vocab_size", "hidden_size", "intermediate_size")
    layers = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    kept = {key: config[key] for key in same} | {"max_position_embeddings": 128}
    kept["rms_norm_eps"] = config["norm_eps" if config["model_type"] == "lfm2" else "rms_norm_eps"]
    return {"model_type": style, "head_dim": config["hidden_size"] // 4, **kept, **layers}


def _norms(width: int, *names: str) -> dict[str, np.ndarray]:
    return {f"{name}.weight": np.ones(width, np.float32) for name in names}


def _vocabulary(rng: np.random.Generator, size: int, draft_size: int) -> tuple[np.ndarray, dict]:
    """The target ids of a random draft vocabulary, and its maps in a checkpoint."""
    ids = np.sort(rng.choice(size, size=draft_size, replace=False))
    d2t = (ids - np.arange(draft_size)).astype(np.int64)
    return ids, {"d2t": d2t, "t2d": np.isin(np.arange(size), ids)}


def _last_of(width: int, count: int) -> np.ndarray:
    """[M, count * M]: a projection that selects the last of `count` features."""
    return np.eye(width, count * width, (count - 1) * width, dtype=np.float32)


def write_eagle3(
    folder: Path,
    target: Path,
    *,
    repeats: bool = True,
    draft_vocab_size: int = 40,
    style: str = "llama",
    norm_before_fc: bool = False,
    window: int | None = None,
    seed: int = 1,
) -> Path:
    """Writes an EAGLE-3 head in SafeAILab's format; `repeats` makes it repeat the last token.

    `style` "qwen3" adds norms of queries and keys, `norm_before_fc` a norm over all features, and `window`
    sliding-window attention.
    """
    rng = np.random.default_rng(seed)
    target_config, scale, rows = _target(target)
    config = _head_config(target_config, style)
    width, depth = config["hidden_size"], target_config["num_hidden_layers"]
    ids, maps = _vocabulary(rng, config["vocab_size"], draft_vocab_size)
    tensors = _layer(rng, "midlayer", config, 2 * width)
    tensors |= {
        "fc.weight": _matrix(rng, (width, 3 * width)),
        **_norms(width, "midlayer.hidden_norm", "midlayer.input_layernorm", "norm"),
        "lm_head.weight": _matrix(rng, (draft_vocab_size, width)),
        **maps,
    }
    if style == "qwen3":
        tensors |= _norms(width // 4, "midlayer.self_attn.q_norm", "midlayer.self_attn.k_norm")
    if norm_before_fc:
        tensors |= _norms(3 * width, "input_norm")
    if window is not None:
        config |= {"layer_types": ["sliding_attention"], "sliding_window": window}
    if repeats:
        # The target's last hidden state goes directly to the target's norm and output rows.
        _quieten(tensors)
        tensors |= {
            "fc.weight": _last_of(width, 3),
            "norm.weight": scale,
            "lm_head.weight": rows[ids],
        }
    # With random weights, as trained heads do, it does not read the last layer's output.
    layers = {"eagle_aux_hidden_state_layer_ids": [0, depth // 2, depth if repeats else depth - 1]}
    return write_folder(folder, {**config, "draft_vocab_size": draft_vocab_size, **layers}, tensors)


def write_eagle1(
    folder: Path,
    target: Path,
    *,
    repeats: bool = True,
    style: str = "llama",
    window: int | None = None,
    seed: int = 1,
) -> Path:
    """Writes an EAGLE-1 head; `repeats`, `style` and `window` are as for EAGLE-3."""
    rng = np.random.default_rng(seed)
    config = _head_config(_target(target)[0], style)
    width = config["hidden_size"]
    tensors = {**_layer(rng, "layers.0", config, width), "fc.weight": _matrix(rng, (width, 2 * width))}
    if style == "qwen3":
        tensors |= _norms(width // 4, "layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm")
    if window is not None:
        config |= {"layer_types": ["sliding_attention"], "sliding_window": window}
    if repeats:
        _quieten(tensors)
        tensors["fc.weight"] = _last_of(width, 2)
    return write_folder(folder, {**config, "bias": False}, tensors)


def _pass_values(tensors: dict[str, np.ndarray], prefix: str, rng: np.random.Generator) -> None:
    """Makes a layer with as many key as query heads add roughly the mean of the rows that it sees."""
    attention = f"{prefix}.self_attn"
    width, in_width = tensors[f"{attention}.v_proj.weight"].shape
    tensors[f"{attention}.v_proj.weight"] = np.eye(width, in_width, in_width - width, dtype=np.float32)
    tensors[f"{attention}.o_proj.weight"] = np.eye(width, dtype=np.float32)
    for name in ("q_proj", "k_proj"):
        tensors[f"{attention}.{name}.weight"] *= 0.1
    tensors[f"{prefix}.mlp.down_proj.weight"] *= 0.2


def write_peagle(
    folder: Path,
    target: Path,
    *,
    repeats: bool = True,
    draft_vocab_size: int = 40,
    window: int | None = None,
    seed: int = 1,
) -> Path:
    """Writes a P-EAGLE head with two layers in speculators' format; `repeats` makes it repeat the last token.

    It passes the feature of the last real row on to the mask rows through windows of two.
    """
    rng = np.random.default_rng(seed)
    target_config, scale, rows = _target(target)
    layers = {**_head_config(target_config, "llama"), "num_hidden_layers": 2, "num_key_value_heads": 4}
    window = 2 if repeats else window
    if window is not None:
        layers |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": window}
    width, depth = layers["hidden_size"], target_config["num_hidden_layers"]
    ids, maps = _vocabulary(rng, layers["vocab_size"], draft_vocab_size)
    tensors = {
        **_layer(rng, "layers.0", layers, 2 * width),
        **_layer(rng, "layers.1", layers, width),
        "fc.weight": _matrix(rng, (width, 2 * width)),
        **_norms(
            width, "layers.0.hidden_norm", "layers.0.input_layernorm", "layers.1.input_layernorm", "norm"
        ),
        "lm_head.weight": _matrix(rng, (draft_vocab_size, width)),
        "mask_hidden": _matrix(rng, (1, 2 * width))[None],
        **maps,
    }
    if repeats:
        for prefix in ("layers.0", "layers.1"):
            _pass_values(tensors, prefix, rng)
        tensors |= {"fc.weight": _last_of(width, 2), "norm.weight": scale, "lm_head.weight": rows[ids]}
        tensors["mask_hidden"] *= 0.01
    config = {
        "speculators_model_type": "peagle",
        "draft_vocab_size": draft_vocab_size,
        "mask_token_id": 1,
        "eagle_aux_hidden_state_layer_ids": [0, depth],
        "transformer_layer_config": layers,
    }
    return write_folder(folder, config, tensors)


def write_dflash(
    folder: Path,
    target: Path,
    *,
    repeats: bool = True,
    draft_vocab_size: int = 40,
    window: int | None = None,
    markov: str | None = None,
    seed: int = 1,
) -> Path:
    """Writes a DFlash head with two layers and blocks of eight; `repeats` makes it repeat the last token.

    A repeating head is in speculators' format and reads only the last context feature. Other heads are in
    z-lab's format, which has no draft vocabulary; `window` is that of their first layer. `markov`, a
    `markov_head_type`, makes it a DSpark head, in speculators' or SpecForge's format.
    """
    rng = np.random.default_rng(seed)
    target_config, scale, rows = _target(target)
    layers = {**_head_config(target_config, "qwen3"), "num_hidden_layers": 2, "num_key_value_heads": 4}
    window = 1 if repeats else window
    if window is not None:
        others = "sliding_attention" if repeats else "full_attention"
        layers |= {"layer_types": ["sliding_attention", others], "sliding_window": window}
        layers["use_sliding_window"] = True
    width, depth = layers["hidden_size"], target_config["num_hidden_layers"]
    tensors = {"fc.weight": _matrix(rng, (width, 2 * width)), **_norms(width, "hidden_norm", "norm")}
    for prefix in ("layers.0", "layers.1"):
        tensors |= {**_layer(rng, prefix, layers, width), **_norms(width, f"{prefix}.input_layernorm")}
        tensors |= _norms(width // 4, f"{prefix}.self_attn.q_norm", f"{prefix}.self_attn.k_norm")
    if not repeats:
        nested = {"mask_token_id": 1, "target_layer_ids": [0, depth - 1]}
        if markov:
            tensors |= _markov(rng, layers["vocab_size"], layers["vocab_size"], width, markov, scale=2.0)
            nested |= {"markov_rank": 4, "markov_head_type": markov, "projector_type": "dspark"}
            nested |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
        return write_folder(folder, {**layers, "block_size": 8, "dflash_config": nested}, tensors)
    ids, maps = _vocabulary(rng, layers["vocab_size"], draft_vocab_size)
    for prefix in ("layers.0", "layers.1"):
        _pass_values(tensors, prefix, rng)
        tensors[f"{prefix}.self_attn.q_norm.weight"] *= 0.1
    tensors |= {"fc.weight": _last_of(width, 2), "norm.weight": scale, "lm_head.weight": rows[ids], **maps}
    tensors["embed_tokens.weight"] = 0.01 * _matrix(rng, (layers["vocab_size"], width))
    config = {
        "speculators_model_type": "dspark" if markov else "dflash",
        "block_size": 8,
        "draft_vocab_size": draft_vocab_size,
        "mask_token_id": 1,
        "aux_hidden_state_layer_ids": [0, depth],
        "sliding_window_non_causal": True,
        "transformer_layer_config": layers,
    }
    if markov:
        tensors |= _markov(rng, layers["vocab_size"], draft_vocab_size, width, markov, scale=0.3)
        config |= {"markov_rank": 4, "markov_head_type": markov, "sample_from_anchor": True}
    return write_folder(folder, config, tensors)


def _markov(rng, vocab_size, draft_vocab_size, width, kind, *, scale):
    """A Markov head of rank 4 whose corrections are about `scale`, and a confidence head."""
    tensors = {
        "markov_head.markov_w1.weight": rng.normal(size=(vocab_size, 4)).astype(np.float32),
        "markov_head.markov_w2.weight": scale * rng.normal(size=(draft_vocab_size, 4)).astype(np.float32),
        "confidence_head.proj.weight": _matrix(rng, (1, width + 4)),
        "confidence_head.proj.bias": np.zeros(1, np.float32),
    }
    if kind == "gated":
        tensors["markov_head.gate_proj.weight"] = _matrix(rng, (4, width + 4))
        tensors["markov_head.gate_proj.bias"] = np.ones(4, np.float32)
    if kind == "rnn":
        tensors["markov_head.joint_proj.weight"] = _matrix(rng, (12, width + 8))
        tensors["markov_head.joint_proj.bias"] = np.zeros(12, np.float32)
    return tensors


def changed(folder, seed):
    """The tensors of a folder, those of a matrix in another order."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.permutation(tensor.reshape(-1)).reshape(tensor.shape) if tensor.ndim == 2 else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }


def on_device(tensors):
    return {name: jnp.asarray(tensor) for name, tensor in tensors.items()}
