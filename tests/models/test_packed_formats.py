"""Matrices in further block formats stay packed, and are to the last bit what dense loading makes of them."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec_kernels.matmul import PackedRows, PackedWeight
from tiny_gguf import gguf_tensors, hf_weights, write_gguf

from jaxspec.checkpoints import open_checkpoint
from jaxspec.models import packed_weights
from jaxspec.models.loading import declared, load_target, plan_target

HALVES = {
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


@pytest.mark.parametrize("kind", [*HALVES, "Q4_K_M"])
def test_packed_is_dense(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(packed_weights, "MIN_WEIGHT_BYTES", 0)
    tensors = gguf_tensors({name: w for name, w in hf_weights().items() if not name.endswith(".bias")})
    for name, weight in tensors.items():
        # The mix of llama.cpp's files: values and what the layers end with have more bits.
        own = {"Q4_K_M": "Q6_K" if "attn_v" in name or "ffn_down" in name else "Q4_K"}.get(kind, kind)
        tensors[name] = random_matrix(own, weight.shape) if weight.ndim == 2 else weight
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", tensors=tensors))
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
