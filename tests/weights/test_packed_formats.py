"""Matrices in further block formats stay packed, and are to the last bit what dense loading makes of them."""

import warnings

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.matmul import PackedRows, PackedWeight
from jaxspec_kernels.packed_matmul import CodedWeight
from tiny_gguf import gguf_tensors, hf_weights, write_gguf

from jaxspec.files import open_checkpoint
from jaxspec.models.target import load_target, plan_target
from jaxspec.weights import packed_weights
from jaxspec.weights.loading import declared

HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "IQ4_NL": (0,),
    "MXFP4": (),
    "IQ4_XS": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q8_0": (0,),
}
"""Where the float16 of a block lie."""


def random_matrix(kind, shape):
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    for start in HALVES[kind]:
        halves = rng.normal(size=(*packed.shape[:2], 1)).astype("<f2")
        packed[..., start : start + 2] = halves.view(np.uint8)
    if kind == "MXFP4":
        packed[..., 0] = rng.integers(118, 124, packed.shape[:2])
    return packed.reshape(shape[0], -1), kind


def checkpoint_of(kind, folder):
    """A model whose matrices are in a format."""
    tensors = gguf_tensors({name: w for name, w in hf_weights().items() if not name.endswith(".bias")})
    for name, weight in tensors.items():
        # The mix of llama.cpp's files: values and what the layers end with have more bits.
        own = {"Q4_K_M": "Q6_K" if "attn_v" in name or "ffn_down" in name else "Q4_K"}.get(kind, kind)
        tensors[name] = random_matrix(own, weight.shape) if weight.ndim == 2 else weight
    return open_checkpoint(write_gguf(folder / "tiny.gguf", tensors=tensors))


@pytest.mark.parametrize("kind", [*(kind for kind in HALVES if kind not in ("Q4_0", "Q4_1")), "Q4_K_M"])
def test_packed_is_dense(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(packed_weights, "MIN_WEIGHT_BYTES", 0)
    checkpoint = checkpoint_of(kind, tmp_path)
    packed = plan_target(checkpoint, dtype=jnp.dtype(jnp.float32)).read(packed=True)
    dense = load_target(checkpoint, dtype=jnp.float32)
    pairs = [
        (one.get_value(), other.get_value())
        for (one, _), (other, _) in zip(declared(packed), declared(dense), strict=True)
    ]
    assert sum(isinstance(one, PackedWeight | PackedRows) for one, _ in pairs) == 6
    for one, other in pairs:
        np.testing.assert_array_equal(np.asarray(one), other)
    tokens = jnp.asarray([3, 0, 299])
    np.testing.assert_array_equal(packed.embedding(tokens), dense.embedding(tokens), strict=True)


ON_A_GPU = {"Q4_0": False, "Q4_1": True, "Q4_K": True, "Q4_K_M": None, "Q8_0": False, "MXFP4": None}
ON_A_GPU |= {kind: kind in ("Q5_1", "Q2_K", "Q5_K") for kind in HALVES if kind not in ON_A_GPU}
"""Whether a format's codes have offsets; None for a mix of formats, and for one that is dequantized."""


@pytest.mark.parametrize("kind", ON_A_GPU)
def test_codes_in_a_bfloat16_network_are_dense_weights(tmp_path, kind):
    checkpoint = checkpoint_of(kind, tmp_path)
    with warnings.catch_warnings(record=True) as found_warnings:
        warnings.simplefilter("always")
        packed = plan_target(checkpoint, dtype=jnp.dtype(jnp.bfloat16)).read(packed=True, codes=True)
    dequantized = [str(each.message).partition("as they are stored: ")[2] for each in found_warnings]
    assert len(dequantized) == (kind == "MXFP4")
    dense = load_target(checkpoint, dtype=jnp.float32)
    found = []
    for (one, _), (other, _) in zip(declared(packed), declared(dense), strict=True):
        weight = one.get_value()
        if isinstance(weight, CodedWeight):
            found.append(weight)
            np.testing.assert_array_equal(np.asarray(weight), other.get_value())
        else:
            np.testing.assert_array_equal(weight, other.get_value().astype(jnp.bfloat16))
    # Queries, keys and values are one matrix, and so are gate and up.
    assert len(found) == (0 if kind == "MXFP4" else 5)
    if kind == "Q4_K_M":
        # Queries and keys in Q4_K share the form of values in Q6_K.
        assert sorted((w.bits, w.columns, w.offset is not None) for w in found) == [
            (4, 32, True), (4, 32, True), (4, 32, True), (8, 16, False), (8, 16, True),
        ]  # fmt: skip
    else:
        assert {weight.offset is not None for weight in found} <= {ON_A_GPU[kind]}
        assert {weight.bits for weight in found} <= {4 if kind.startswith("Q4") else 8}
