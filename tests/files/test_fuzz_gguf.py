"""GGUF files that somebody broke are read, or refused by our own exceptions in one line."""

import struct

import converted_gguf
import gguf
import numpy as np
import pytest
from fuzzing import SCALARS, changed, damaged, refused_or
from golden_files import golden_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from tiny_gguf import metadata, write_gguf
from tiny_tokenizers import byte_level, sentence_piece

from jaxspec.files import open_checkpoint
from jaxspec.files.quantized.blocks import BlockSource

NAMES = (
    *("token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"),
    *(f"blk.0.{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "ffn_up", "attn_norm")),
    *("blk.0.attn_q.bias", "blk.00.attn_q.weight", "blk.99999999999.ffn_up.weight", "other"),
)
EXPERTS = tuple(
    f"blk.0.ffn_{name}_exps.{leaf}" for name in ("gate", "up", "down") for leaf in ("weight", "bias")
)
RECURRENT = (
    *("blk.0.ssm_a", "blk.0.ssm_conv1d.weight", "blk.0.ssm_norm.weight", "blk.0.ssm_out.weight"),
    *("blk.0.ssm_dt.bias", "blk.4.nextn.eh_proj.weight"),
)
HALVES = ("blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight", "blk.0.attn_kv_b.weight")
FAMILIES = {
    "gemma3": ("gemma3", ("blk.0.post_ffw_norm.weight", "blk.0.attn_q_norm.weight")),
    "glm4": ("glm4", ("blk.0.post_ffw_norm.weight", "blk.0.post_attention_norm.weight")),
    "qwen3moe": ("qwen3-moe", (*EXPERTS, "blk.0.ffn_gate_inp.weight")),
    "gpt-oss": ("gpt-oss", (*EXPERTS, "blk.0.attn_sinks.weight")),
    "qwen3next": ("qwen3-next", ("blk.0.attn_qkv.weight", "blk.0.attn_gate.weight", *RECURRENT)),
    "qwen35": ("qwen3-5", ("blk.0.attn_qkv.weight", "blk.0.ssm_beta.weight", *RECURRENT)),
    "nemotron_h_moe": ("nemotron-h", (*EXPERTS[2:], "blk.0.ssm_d", "blk.0.ssm_in.weight", *RECURRENT)),
    "deepseek2": ("deepseek-v3", (*EXPERTS, *HALVES, "blk.0.exp_probs_b.bias")),
}
"""By architecture: a golden, and names of tensors that llama lacks."""


def sizes(architecture):
    """Metadata of a file without a tokenizer."""
    if architecture == "llama":
        return {"general.architecture": "llama", **metadata()}
    values = converted_gguf.metadata(golden_checkpoint(FAMILIES[architecture][0]).config)
    prefixed = {f"{architecture}.{key}": value for key, value in values.items() if value is not None}
    return {"general.architecture": architecture, **prefixed}


KEYS = (
    *metadata(),
    *byte_level(),
    *sentence_piece(),
    *("general.architecture", "general.alignment", "split.count", "llama.attention.key_length"),
    *("llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scaling.original_context_length"),
    *("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.eot_token_id"),
)


def use(path):
    checkpoint = open_checkpoint(path)
    for tensor in checkpoint.tensors.values():
        if isinstance(tensor, BlockSource):
            tensor.read_blocks()
        array = tensor.read()
        assert (array.shape, array.dtype) == (tensor.shape, tensor.dtype)
    if checkpoint.tokenizer is not None:
        checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("hello w0rld é 🎉"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def small(folder):
    """A file that is mostly header."""
    tensors = {
        "token_embd.weight": np.zeros((4, 32), np.float32),
        "blk.0.attn_q.weight": (np.zeros((4, 34), np.uint8), "Q8_0"),
        "rope_freqs.weight": np.ones(4, np.float32),
    }
    sizes = metadata(
        llama__embedding_length=32, llama__attention__head_count=2, llama__rope__dimension_count=8
    )
    values = {**sizes, "llama.attention.key_length": 8, "x": [1.5], "y": ["a", "b"], "z": [True]}
    return write_gguf(folder / "small.gguf", values, tensors).read_bytes()


@given(data=st.data())
def test_other_bytes(folder, small, data):
    path = folder / "broken.gguf"
    path.write_bytes(data.draw(damaged(small)))
    refused_or(lambda: use(path))


@given(data=st.data())
def test_other_places_and_counts(folder, small, data):
    """One number of 32 or 64 bits anywhere in the header."""
    value = data.draw(st.sampled_from([0, 1, 2, 3, 8, 9, 2**16, 2**31, 2**32 - 1]))
    size = data.draw(st.sampled_from([4, 8]))
    at = data.draw(st.integers(0, len(small) // 2))
    path = folder / "broken.gguf"
    path.write_bytes(small[:at] + value.to_bytes(size, "little") + small[at + size :])
    refused_or(lambda: use(path))


def packed(value, kind):
    """A value as the file format has it, `kind` being one of `TYPES` or "s" for text."""
    if kind == "s":
        content = str(value).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(content)) + content
    if kind in "fd":
        with np.errstate(over="ignore"):
            return np.asarray(value, np.dtype(kind)).tobytes()
    size = 8 * struct.calcsize(f"<{kind}")
    return (value % 2**size).to_bytes(size // 8, "little")


def kinds_for(value):
    """The types that a value can be written in."""
    if isinstance(value, bool):
        return "?B"
    if isinstance(value, int):
        return "BbHhIiQq"
    return "fd" if isinstance(value, float) else "s"


def entry(key, value, data):
    """One key with its value, of a type that is drawn from those that fit."""
    if not isinstance(value, list):
        kind = data.draw(st.sampled_from(kinds_for(value)))
        return packed(key, "s") + packed(TYPES[kind], "I") + packed(value, kind)
    kinds = {kinds_for(item) for item in value} or {"sI"}
    kind = data.draw(st.sampled_from(kinds.pop() if len(kinds) == 1 else "s"))
    items = b"".join(packed(item, kind) for item in value)
    return packed(key, "s") + packed(9, "I") + packed(TYPES[kind], "I") + packed(len(value), "Q") + items


TYPES = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "?": 7, "s": 8, "Q": 10, "q": 11, "d": 12}
FLAT = st.lists(SCALARS, max_size=4) | SCALARS
DIMENSIONS = st.lists(st.sampled_from([0, 1, 2, 3, 32, 256, 300, 2**32, 2**62, 2**64 - 1]), max_size=5)


@pytest.mark.parametrize("tokens", [byte_level, sentence_piece])
@given(data=st.data())
def test_other_metadata(folder, tokens, data):
    values = data.draw(changed({**metadata(), **tokens()}, KEYS))
    for key in data.draw(st.sets(st.sampled_from(KEYS), max_size=2)):
        values[key] = data.draw(FLAT)
    values = {"general.architecture": "llama", **values}
    flat = {k: v for k, v in values.items() if v is not None and fits(v)}
    refused_or(lambda: use(one_tensor(folder, (entry(key, value, data) for key, value in flat.items()))))


def test_a_double_that_no_float32_holds_is_read(folder):
    """An epsilon just above the largest float32 once overflowed in a cast."""
    values = {"general.architecture": "llama", **metadata()}
    values["llama.attention.layer_norm_rms_epsilon"] = 3.4028235677973366e38
    entries = [as_written(key, value) for key, value in values.items()]
    assert open_checkpoint(one_tensor(folder, entries)).config["rms_norm_eps"] == 3.4028235677973366e38


def as_written(key, value):
    """One key with its value, of the type that holds it exactly; a list has at least one."""
    items = value if isinstance(value, list) else [value]
    kind = {str: "s", int: "I", float: "d", bool: "?"}[type(items[0])]
    of = packed(9, "I") + packed(TYPES[kind], "I") + packed(len(items), "Q")
    of = of if isinstance(value, list) else packed(TYPES[kind], "I")
    return packed(key, "s") + of + b"".join(packed(item, kind) for item in items)


def one_tensor(folder, entries):
    """A file of these entries and of an embedding of 3 rows of 256."""
    entries = list(entries)
    name = packed("token_embd.weight", "s") + packed(2, "I") + packed(256, "Q") + packed(3, "Q")
    content = b"GGUF" + packed(3, "I") + packed(1, "Q") + packed(len(entries), "Q") + b"".join(entries) + name
    path = folder / "broken.gguf"
    path.write_bytes(content + packed(0, "I") + packed(0, "Q") + bytes(4 * 256 * 3 + 64))
    return path


def fits(value):
    """Whether a value is one that the format has: a scalar, or an array of them."""
    return not isinstance(value, dict) and all(
        not isinstance(item, list | dict | None) for item in (value if isinstance(value, list) else [value])
    )


SHAPES = ((256, 4), (32, 256), (4,), (32,), (32, 4, 8), (32, 8))
KINDS = (
    *(gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0", "MXFP4")),
    *gguf.GGMLQuantizationType,
)


@pytest.mark.parametrize("architecture", ["llama", *FAMILIES])
@given(data=st.data())
def test_other_tensors(folder, architecture, data):
    values = sizes(architecture)
    header = b"".join(as_written(key, value) for key, value in values.items())
    known = NAMES if architecture == "llama" else FAMILIES[architecture][1]
    names = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=4))
    tensors, count = b"", len(names)
    if data.draw(st.booleans()):  # an embedding that is sound, or nothing else would be looked at
        tensors = packed("token_embd.weight", "s") + packed(2, "I") + packed(8, "Q") + packed(4, "Q")
        tensors += packed(0, "I") + packed(0, "Q")
        names = [name for name in dict.fromkeys(names) if name != "token_embd.weight"]
        count = len(names) + 1
    for name in names:
        shape = data.draw(st.sampled_from(SHAPES) | DIMENSIONS)
        tensors += packed(name, "s") + packed(len(shape), "I") + b"".join(packed(n, "Q") for n in shape)
        kind = data.draw(st.sampled_from(KINDS) | st.integers(0, 100))
        tensors += packed(int(kind), "I") + packed(data.draw(st.sampled_from([0, 32, 1, 2**63])), "Q")
    content = b"GGUF" + packed(3, "I") + packed(count, "Q") + packed(len(values), "Q") + header + tensors
    path = folder / "broken.gguf"
    path.write_bytes(content + bytes(2**16))
    refused_or(lambda: use(path))
