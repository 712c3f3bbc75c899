"""Quantized checkpoints load and answer, packed or dequantized, with the tokens of plain decoding."""

import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import QUANTIZED, quantized_folder
from jaxspec_kernels.matmul import PackedWeight, matmul
from tiny_engines import tokens_of

import jaxspec
from jaxspec.files import open_checkpoint
from jaxspec.models.target import load_target, plan_target
from jaxspec.weights import packed_weights
from jaxspec.weights.loading import declared

needs_numba = pytest.mark.skipif(matmul.why_not("numba") is not None, reason="needs Numba's kernels")

PACKED_ON_A_CPU = {"awq", "gptq", "gptq-v2", "int4-channel", "int4-groups", "int4-zero-points"}


@needs_numba
@pytest.mark.parametrize("case", QUANTIZED)
def test_four_bits_stay_packed_on_a_cpu_and_are_the_dense_weights(monkeypatch, case):
    monkeypatch.setattr(packed_weights, "MIN_WEIGHT_BYTES", 0)
    checkpoint = open_checkpoint(quantized_folder(case))
    packed = plan_target(checkpoint, dtype=jnp.dtype(jnp.float32)).read(packed=True)
    dense = load_target(checkpoint, dtype=jnp.float32)
    found = 0
    for (one, source), (other, _) in zip(declared(packed), declared(dense), strict=True):
        weight = one.get_value()
        np.testing.assert_array_equal(np.asarray(weight), other.get_value())
        if isinstance(weight, PackedWeight) and "_proj" in source.tensors[0][0]:
            found += weight.form == "uint8"
    assert found == (4 if case in PACKED_ON_A_CPU else 0)


@pytest.mark.parametrize("case", ["awq", "fp8-blocks"])
def test_drafts_change_no_token_alone_or_in_company(monkeypatch, case):
    monkeypatch.setattr(packed_weights, "MIN_WEIGHT_BYTES", 0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 64, length).tolist() * 2 for length in (3, 9, 20)]
    engine = {"max_model_len": 128, "batch_size": 3}
    folder = quantized_folder(case)
    with jaxspec.load(folder, drafter="none", progress=False, **engine) as plain:
        expected = tokens_of(plain.generate(prompts, max_new_tokens=30, ignore_eos=True))
    drafter = {"kind": "ngram", "num_speculative_tokens": 3}
    with jaxspec.load(folder, drafter=drafter, progress=False, **engine) as drafting:
        together = drafting.generate(prompts, max_new_tokens=30, ignore_eos=True)
        alone = [drafting.generate(prompt, max_new_tokens=30, ignore_eos=True) for prompt in prompts]
    assert tokens_of(together) == tokens_of(alone) == expected
    assert sum(answer.stats.accepted for answer in together)
    assert len({token for tokens in expected for token in tokens}) > 5
