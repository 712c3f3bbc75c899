"""A small llama GGUF, written with the `gguf` package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 256, 4, 2, 64, 256, 300

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def hf_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights of one layer, by Hugging Face names."""
    rng = np.random.default_rng(seed)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
        layer + "input_layernorm.weight": (HIDDEN,),
        layer + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.q_proj.bias": (HEADS * HEAD_DIM,),
        layer + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
        layer + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        layer + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        layer + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "model.layers.0.self_attn.q_proj.bias": "blk.0.attn_q.bias",
    "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Permutes query and key rows like llama.cpp's converter: the halves of a head are interleaved."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(weight.shape)


def gguf_tensors(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights by GGUF names, with interleaved query and key rows."""
    heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}
    return {
        GGUF_NAMES[name]: next((interleave(w, h) for part, h in heads.items() if part in name), w)
        for name, w in weights.items()
    }


def metadata(**changes: Any) -> dict[str, Any]:
    """All keys of the file. `changes` write dots as `__`; None drops a key."""
    values = {
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INTERMEDIATE,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.freq_base": 50000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        **changes,
    }
    return {key.replace("__", "."): value for key, value in values.items() if value is not None}


def write_gguf(
    path: Path,
    values: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | tuple[np.ndarray, str]] | None = None,
    architecture: str = "llama",
) -> Path:
    """Writes metadata and tensors; a tensor is an array, or packed bytes with the name of their type."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata() if values is None else values).items():
        _add(writer, key, value)
    if tensors is None:
        tensors = gguf_tensors(hf_weights())
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            packed, kind = tensor
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_packed_gguf(path: Path) -> Path:
    """A model whose matrices are in Q8_0, without biases."""
    tensors = gguf_tensors(hf_weights())
    del tensors["blk.0.attn_q.bias"]
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = {
        name: (gguf.quants.quantize(each, kind), "Q8_0") if each.ndim == 2 else each
        for name, each in tensors.items()
    }
    return write_gguf(path, tensors=packed)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
