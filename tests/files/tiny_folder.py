"""Folders in Hugging Face's layout, with tensors of every kind and a small tokenizer."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tiny_gguf import TEMPLATE
from tiny_tokenizers import byte_level

from jaxspec.files.gguf.tokenizer import tokenizer_from_gguf

CONFIG = {"model_type": "llama", "hidden_size": 4, "eos_token_id": 7, "rope_scaling": {"rope_type": "linear"}}


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "fc.weight": rng.normal(size=(4, 12)).astype(np.float32),
        "norm.weight": rng.normal(size=4).astype(ml_dtypes.bfloat16),
        "lm_head.weight": rng.normal(size=(6, 4)).astype(np.float16),
        "d2t": np.arange(6, dtype=np.int64) * 2**40,
        "t2d": np.array([True, False, True]),
    }


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), "utf-8")


def write_folder(folder: Path, shards: int = 1) -> Path:
    """A head's folder: config and weights, in one file or in shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIG)
    if shards == 1:
        save_file(arrays(), folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(arrays())}
    for file in set(weight_map.values()):
        save_file({n: a for n, a in arrays().items() if weight_map[n] == file}, folder / file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder


def write_tokenizer(folder: Path) -> None:
    """`tokenizer.json` and its config, as transformers writes them."""
    backend = tokenizer_from_gguf(byte_level("llama-bpe"), "tiny").backend
    backend.enable_truncation(4)
    backend.enable_padding(length=40)
    backend.save(str(folder / "tokenizer.json"))
    special = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    write_json(
        folder / "tokenizer_config.json", {**special, "chat_template": TEMPLATE, "model_max_length": 4}
    )


def assert_same_tensors(tensors, expected: dict[str, np.ndarray]) -> None:
    assert set(tensors) == set(expected)
    for name, array in expected.items():
        tensor = tensors[name]
        read = tensor.read()
        assert (tensor.shape, tensor.dtype) == (array.shape, array.dtype) == (read.shape, read.dtype)
        assert read.tobytes() == array.tobytes()
