"""Qwen3-Next and Qwen3.5 against transformers: gated delta rules, gated attention, a shared expert."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from full_size_run import assert_runs
from golden_files import golden_checkpoint
from jaxspec_kernels.linear_recurrence import DeltaRule
from target_checks import (
    check_export,
    check_one_pass,
    check_pieces,
    check_rule_alone,
    check_rule_in_chunks,
    normal,
)

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters.kinds.mtp import Mtp
from jaxspec.models.layers.gated_delta import delta_state_shape
from jaxspec.models.target import load_target, make_target
from jaxspec.weights.loading import declared, export_tensors
from jaxspec.weights.memory import ArrayTensor

CASES = ("qwen3-next", "qwen3-next-odd", "qwen3-5", "qwen3-5-nested", "qwen3-5-moe")


@pytest.mark.parametrize("case", CASES)
def test_one_pass_equals_transformers(case):
    check_one_pass(case)


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("case", ["qwen3-next-odd", "qwen3-5"])
def test_pieces_through_the_cache_equal_one_pass(case, size):
    check_pieces(case, size)


@pytest.mark.parametrize("case", ["qwen3-next", "qwen3-next-odd", "qwen3-5", "qwen3-5-moe"])
def test_export_gives_back_every_tensor(case):
    check_export(case)


@pytest.mark.parametrize("case", ["qwen3-5-nested"])
def test_what_sees_images_is_left_out(case):
    checkpoint = golden_checkpoint(case)
    exported = export_tensors(load_target(checkpoint, dtype=jnp.float32))
    left = [name for name in checkpoint.tensors if name.replace("language_model.", "") not in exported]
    assert left
    assert all(name.startswith("model.visual.") for name in left)


def test_experts_may_be_in_one_tensor():
    """As published with what sees images, and with an MTP layer beside the model."""
    checkpoint = golden_checkpoint("qwen3-5-moe")
    arrays = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
    stacked = {name: array for name, array in arrays.items() if ".experts." not in name}
    for layer in range(4):
        name = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([arrays[f"{name}.{i}.{part}_proj.weight"] for i in range(8)])
            for part in ("gate", "up", "down")
        )
        stacked |= {f"{name}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{name}.down_proj": down}
    named = {name.replace("model.", "model.language_model.", 1): each for name, each in stacked.items()}
    named |= {"mtp.fc.weight": np.zeros((32, 64), np.float32)}
    nested = {"model_type": "qwen3_5_moe", "text_config": checkpoint.config}
    given = replace(
        checkpoint, config=nested, tensors={name: ArrayTensor(each) for name, each in named.items()}
    )
    one, other = (load_target(each, dtype=jnp.float32) for each in (checkpoint, given))
    for ours, theirs in zip(jax.tree.leaves(nnx.state(one)), jax.tree.leaves(nnx.state(other)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    exported = export_tensors(other)
    assert set(exported) == set(stacked)
    for name, array in stacked.items():
        np.testing.assert_array_equal(exported[name], array)


@pytest.mark.parametrize("length", [1, 2, 13, 64])
def test_a_chunk_is_its_rows_one_after_another(length):
    """States last for long."""
    check_rule_in_chunks(_rule(), _shape(), length)


def test_a_row_of_a_step_does_not_depend_on_those_beside_it():
    check_rule_alone(_rule(), _shape())


def _shape():
    config = ModelConfig.from_hf(golden_checkpoint("qwen3-5").config).delta
    assert config is not None
    return delta_state_shape(config)


def _rule():
    rng = np.random.default_rng(9)
    return DeltaRule(normal(rng, 2, 4, 40), normal(rng, 2, 2) - 4, normal(rng, 2, 2), 8)


def of_qwen3_5(**changes):
    """Shapes of a target and of its MTP layer."""
    config = ModelConfig.from_hf({"model_type": "qwen3_5_text", **changes})
    return (
        nnx.eval_shape(lambda: make_target(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))),
        nnx.eval_shape(lambda: Mtp(config, num_speculative_tokens=3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))),
    )


def test_shapes_of_nine_billion_parameters_run_with_their_mtp_layer():
    """The family's defaults are those of Qwen3.5-9B."""
    target, _ = of_qwen3_5()
    assert sum(variable.get_value().size for variable, _ in declared(target)) == pytest.approx(
        8.95e9, rel=1e-2
    )
    assert_runs(*of_qwen3_5(num_hidden_layers=8))  # whose layers repeat
    (shape,) = {each for each in target.cache_shapes if not hasattr(each, "head_dim")}
    maps, inputs = (math.prod(each) * shape.num_heads for each, _ in shape.states)
    assert 24 * (4 * maps + 2 * inputs) == pytest.approx(49 * 2**20, rel=0.01)  # of docs/design.md


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"linear_num_value_heads": 3},
            "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2",
        ),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1 is not supported"),
        ({"layer_types": ["sliding_attention"] * 4}, "'sliding_attention' is not supported for this family"),
        ({"layer_types": ["mamba"] * 4}, "layer_types: unknown kind 'mamba'"),
        ({"attn_output_gate": False}, "attn_output_gate False is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    config = {**golden_checkpoint("qwen3-5").config, **changes}
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(config)
