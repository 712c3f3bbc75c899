"""A GGUF file as a checkpoint: Hugging Face names, layout and config."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from jaxspec.checkpoints.blocks import Blocks
from jaxspec.checkpoints.checkpoint import Checkpoint
from jaxspec.checkpoints.errors import CheckpointError
from jaxspec.checkpoints.gguf_blocks import unpack_ggml
from jaxspec.checkpoints.gguf_header import GGUFHeader, TensorInfo, read_header
from jaxspec.checkpoints.gguf_metadata import Metadata
from jaxspec.checkpoints.gguf_tokenizer import tokenizer_from_gguf

_PLAIN = {
    gguf.GGMLQuantizationType.F32: np.dtype(np.float32),
    gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
    gguf.GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_QUANTISED = tuple(
    getattr(gguf.GGMLQuantizationType, n) for n in ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
)

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a GGUF.

    Attributes:
      permuted_heads: heads whose rows the converter interleaved for its rope (query and key of the
        llama architecture); 0 for a tensor that is stored as Hugging Face has it.
    """

    header: GGUFHeader
    info: TensorInfo
    permuted_heads: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    @property
    def dtype(self) -> np.dtype:
        return _PLAIN.get(self.info.quantization, np.dtype(np.float32))

    def read_blocks(self) -> Blocks | None:
        """The integers and scales of a matrix in Q8_0, Q4_0 or Q4_1; None for other formats."""
        if len(self.shape) != 2:
            return None
        blocks = unpack_ggml(
            self.header.bytes_of(self.info).reshape(self.shape[0], -1), self.info.quantization
        )
        if blocks is None or not self.permuted_heads:
            return blocks
        return blocks.map(lambda rows: _undo_permutation(rows, self.permuted_heads))

    def read(self) -> np.ndarray:
        """The values: plain formats as stored, quantised blocks as float32 by ggml's formulas."""
        packed = self.header.bytes_of(self.info)
        if self.info.quantization in _PLAIN:
            values = packed.view(self.dtype).reshape(self.shape).copy()
        else:
            rows = packed.reshape(*self.shape[:-1], -1)
            values = gguf.quants.dequantize(rows, self.info.quantization)
        if self.permuted_heads:
            values = _undo_permutation(values, self.permuted_heads)
        return values


def open_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF of the llama architecture.

    Raises:
      CheckpointError: truncated or foreign, another architecture, a tensor or quantisation that is
        not known, or metadata that is missing.
    """
    header = read_header(path)
    meta = Metadata(str(path), header.metadata)
    architecture = meta.text("general.architecture", None)
    if architecture != "llama":
        raise CheckpointError(f"{path}: architecture {architecture!r} is not supported; supported: llama")
    # A file that says it has 0 parts is whole too.
    if (parts := meta.number("split.count", 1)) > 1:
        raise CheckpointError(f"{path}: one of {parts} parts; join them first, with llama-gguf-split")
    config = _config(header, meta)
    tokenizer = tokenizer_from_gguf(header.metadata, str(path))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for name, info in header.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        _check_tensor(path, name, info, heads)
        tensors[_hf_name(path, name)] = GGUFTensor(header, info, _permuted_heads(name, heads))
    eos = tokenizer.eos_token_ids if tokenizer else ()
    return Checkpoint(str(path), config, tensors, tokenizer, eos)


def _undo_permutation(rows: np.ndarray, heads: int) -> np.ndarray:
    """Interleaved rope order (0, D/2, 1, D/2 + 1, …) back to halves (0 … D/2 - 1, D/2 … D - 1)."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])  # [H, D/2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _hf_name(path: Path, name: str) -> str:
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    if name in _TOP:
        return _TOP[name]
    raise CheckpointError(f"{path}: tensor {name!r} is not part of the llama architecture")


def _permuted_heads(name: str, heads: Mapping[str, int]) -> int:
    match = _LAYER_NAME.fullmatch(name)
    return heads.get(match[2], 0) if match else 0


def _check_tensor(path: Path, name: str, info: TensorInfo, heads: Mapping[str, int]) -> None:
    if info.quantization not in _PLAIN and info.quantization not in _QUANTISED:
        known = ", ".join(q.name for q in (*_PLAIN, *_QUANTISED))
        raise CheckpointError(
            f"{path}: tensor {name!r} is {info.quantization.name}, which is not supported; supported: {known}"
        )
    permuted = _permuted_heads(name, heads)
    if permuted and info.shape[0] % (2 * permuted):
        raise CheckpointError(f"{path}: tensor {name!r} has {info.shape[0]} rows for {permuted} heads")


def _config(header: GGUFHeader, meta: Metadata) -> dict[str, Any]:
    """The keys of a `config.json` from `llama.*` metadata."""
    path, tensors = header.path, header.tensors

    def required(key: str) -> int:
        value = meta.positive(f"llama.{key}", None)
        if value is None:
            raise CheckpointError(f"{path}: metadata llama.{key} must be a positive integer, got None")
        return value

    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{path}: tensor 'token_embd.weight' is missing")
    hidden, heads = required("embedding_length"), required("attention.head_count")
    head_dim = meta.positive("llama.attention.key_length", hidden // heads)
    rotary = meta.positive("llama.rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise CheckpointError(f"{path}: rope over {rotary} of {head_dim} dimensions is not supported")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": required("feed_forward_length"),
        "num_hidden_layers": required("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.positive("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": required("context_length"),
        "rms_norm_eps": _shortest(meta.number("llama.attention.layer_norm_rms_epsilon", 1e-5)),
        "rope_theta": _shortest(meta.number("llama.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(header, meta, head_dim),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _rope_scaling(header: GGUFHeader, meta: Metadata, head_dim: int) -> dict[str, Any] | None:
    if _ROPE_FACTORS in header.tensors:
        info = header.tensors[_ROPE_FACTORS]
        if info.shape != (head_dim // 2,) or info.quantization not in _PLAIN:
            raise CheckpointError(
                f"{header.path}: tensor {_ROPE_FACTORS!r} is {info.quantization.name} of shape "
                f"{list(info.shape)}, expected F32 of shape {[head_dim // 2]}"
            )
        factors = GGUFTensor(header, info).read()
        return {"rope_type": "factors", "factors": factors.astype(np.float32).tolist()}
    kind = meta.text("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": meta.number("llama.rope.scaling.factor", 1.0)}
    original = meta.positive("llama.rope.scaling.original_context_length", None)
    if original:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _shortest(value: float) -> float:
    """The decimal that the file's float32 was written from: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value))) if abs(value) <= float(np.finfo(np.float32).max) else value
