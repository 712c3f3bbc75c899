from dataclasses import replace
from types import SimpleNamespace

import bench.shapes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench import random_weights
from bench.random_weights import random_module
from bench.shapes import SHAPES, build_models
from bench.traffic import weight_bytes
from golden_files import golden_checkpoint
from jaxspec_kernels.expert_matmul import Mxfp4Weight
from jaxspec_kernels.packed_matmul import CodedExperts, CodedWeight

from jaxspec.config import ModelConfig
from jaxspec.models.target import make_target
from jaxspec.sharding import make_mesh
from jaxspec.weights.loading import declared, export_tensors

TINY = {key: value for key, value in golden_checkpoint("gpt-oss").config.items() if key != "layer_types"}


def build(**changes):
    target = TINY | {"hidden_size": 64, "intermediate_size": 96}
    shape = replace(SHAPES["gpt-oss-20b"], target=target, **changes)
    return build_models(shape, num_drafts=0, dtype=jnp.dtype(jnp.bfloat16))


@pytest.mark.parametrize("kernel", [True, False])
def test_experts_are_packed_where_a_kernel_takes_them(monkeypatch, kernel):
    monkeypatch.setattr(bench.shapes, "keeps_packed", lambda dtype, devices: kernel)
    models = build()
    experts = models.target.layers[1].mlp.gate_up.get_value()
    assert isinstance(experts, Mxfp4Weight) == kernel
    assert experts.shape == (TINY["num_local_experts"], 64, 2, 96)
    # Outputs about as large as inputs, as of a trained network.
    assert 0.5 < float(np.std(np.asarray(experts, np.float32))) * 8 < 2
    assert not isinstance(build(packed_experts=False).target.layers[1].mlp.down.get_value(), Mxfp4Weight)


def test_packed_experts_count_with_the_bytes_that_they_have(monkeypatch):
    monkeypatch.setattr(bench.shapes, "keeps_packed", lambda dtype, devices: True)
    packed, dense = (weight_bytes(build(packed_experts=kind), batch_size=100) for kind in (True, False))
    layer = 3 * 64 * 96 * TINY["num_local_experts"]
    saved = TINY["num_hidden_layers"] * layer * (2 - 1 / 2 - 1 / 32)
    assert dense - packed == pytest.approx(saved, rel=1e-3)


def test_copied_heads_have_the_numbers_of_the_network_without_copies():
    plain = ModelConfig.from_hf(golden_checkpoint("llama-tied").config)
    assert plain.over(4).kv_copies == 2

    def random(config):
        return random_module(lambda rngs: make_target(config, dtype=jnp.float32, rngs=rngs), make_mesh())

    copied = random(plain.over(4))
    expected, found = export_tensors(random(plain)), export_tensors(copied)
    for name in expected.keys() | found.keys():
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    for variable, source in declared(copied):
        value = np.asarray(variable.get_value())
        np.testing.assert_array_equal(source.join(source.split(value)), value)  # all copies are equal


@pytest.mark.parametrize("drafter", ["dflash", "dspark"])
def test_a_head_that_drafts_in_one_pass_is_read_once(drafter):
    """But for what a Markov head multiplies, which is read for each draft."""
    target = SHAPES["llama3-8b"].target | {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 512}
    target |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 6}
    shape = replace(SHAPES[f"llama3-8b-{drafter}"], target=target)
    sizes = [
        weight_bytes(build_models(shape, num_drafts=k, dtype=jnp.dtype(jnp.bfloat16)), batch_size=1)
        for k in (2, 4)
    ]
    assert sizes[1] - sizes[0] == (2 * 256 * 512 * 2 if drafter == "dspark" else 0)


def test_layers_with_codes_share_programs_that_make_them(monkeypatch):
    monkeypatch.setattr(bench.shapes, "keeps_packed", lambda dtype, devices: True)
    llama = SHAPES["llama3-8b"]
    target = llama.target | {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 64}
    target |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}
    compiled = []

    def jit(function, **options):
        return jax.jit(lambda key: (compiled.append(1), function(key))[1], **options)

    monkeypatch.setattr(random_weights, "jax", SimpleNamespace(**vars(jax) | {"jit": jit}))
    build_models(replace(llama, target=target, codes="awq"), num_drafts=0, dtype=jnp.dtype(jnp.bfloat16))
    # Queries, keys and values, their output, gate and up, and down; embedding, output rows and norms.
    assert len(compiled) <= 7


@pytest.mark.parametrize(("codes", "bits"), [("fp8", 8), ("int4", 4), ("awq", 4)])
def test_matrices_are_in_codes_where_a_kernel_takes_them(monkeypatch, codes, bits):
    monkeypatch.setattr(bench.shapes, "keeps_packed", lambda dtype, devices: True)
    target = SHAPES["qwen3-30b-a3b"].target | {"hidden_size": 256, "num_hidden_layers": 1, "vocab_size": 64}
    target |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    shape = replace(SHAPES["qwen3-30b-a3b"], target=target, codes=codes)
    layer = build_models(shape, num_drafts=0, dtype=jnp.dtype(jnp.bfloat16)).target.layers[0]
    weights = layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down
    kinds = [type(weight.get_value()) for weight in weights]
    assert kinds == [CodedWeight, CodedWeight, CodedExperts, CodedExperts]
    assert not isinstance(layer.mlp.router.kernel.get_value(), CodedWeight)
    for weight in (each.get_value() for each in weights):
        assert (weight.bits, weight.has_zero) == (bits, codes == "awq")
        # Outputs about as large as inputs, as of a trained network.
        width = weight.width if isinstance(weight, CodedWeight) else weight.shape[1]
        assert 0.5 < float(np.std(np.asarray(weight))) * width**0.5 < 2
