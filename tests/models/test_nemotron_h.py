"""Nemotron-H against transformers: Mamba-2, attention without rope, MLPs and experts, one to a layer."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_files import golden_checkpoint
from jaxspec_kernels.linear_recurrence import Mamba2Rule
from target_checks import check_one_pass, check_pieces, check_rule_alone, check_rule_in_chunks, normal

from jaxspec.attention import (
    NumStates,
    PagedMemory,
    PageTable,
    Recurrent,
    RowBlock,
    StatePlaces,
    init_cache,
)
from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters.kinds.mtp import mtp_config
from jaxspec.models.language_model import language_model
from jaxspec.models.layers.mamba2 import mamba_state_shape
from jaxspec.models.target import load_target, make_target, target_config
from jaxspec.sharding import make_mesh
from jaxspec.weights.loading import declared, export_tensors
from jaxspec.weights.memory import ArrayTensor

CASES = ("nemotron-h", "nemotron-h-latent", "nemotron-h-dense")
NANO = {  # of Nemotron 3 Nano 30B A3B
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "hidden_size": 2688,
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "intermediate_size": 1856,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
    "time_step_limit": [0.0, float("inf")],
}


@pytest.mark.parametrize("case", CASES)
def test_one_pass_equals_transformers(case):
    check_one_pass(case)


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("case", ["nemotron-h", "nemotron-h-dense"])
def test_pieces_through_the_cache_equal_one_pass(case, size):
    check_pieces(case, size)


@pytest.mark.parametrize("case", CASES)
def test_export_gives_back_every_tensor(case):
    checkpoint = language_model(golden_checkpoint(case))
    exported = export_tensors(load_target(checkpoint, dtype=jnp.float32))
    assert set(exported) == set(checkpoint.tensors)
    for name, tensor in checkpoint.tensors.items():
        np.testing.assert_array_equal(exported[name], tensor.read(), err_msg=name)


def test_older_files_give_the_layers_as_letters_or_other_names():
    """And layers that draft beside the model, which are left out."""
    checkpoint = golden_checkpoint("nemotron-h")
    config = {key: value for key, value in checkpoint.config.items() if key != "layers_block_type"}
    expected = ModelConfig.from_hf(checkpoint.config)
    kinds = ["mamba", "moe", "attention", "mamba", "moe"]
    for older in ({"hybrid_override_pattern": "ME*ME", "num_hidden_layers": 5}, {"layers_block_type": kinds}):
        assert ModelConfig.from_hf({**config, **older}) == expected
    older = {"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "*EE"}
    assert ModelConfig.from_hf({**config, **older}).mtp_types == ("full_attention", "moe", "moe")
    assert expected.mtp_types == ("full_attention", "moe")
    extra = {"mtp.layers.0.norm.weight": ArrayTensor(np.ones(32, np.float32))}
    load_target(replace(checkpoint, tensors={**checkpoint.tensors, **extra}), dtype=jnp.float32)


@pytest.mark.parametrize("length", [1, 2, 13, 64])
def test_a_chunk_is_its_rows_one_after_another(length):
    """States last for long."""
    check_rule_in_chunks(_rule(), _shape(), length, size=100)


def test_a_row_of_a_step_does_not_depend_on_those_beside_it():
    check_rule_alone(_rule(), _shape())


def _shape():
    return mamba_state_shape(ModelConfig.from_hf(golden_checkpoint("nemotron-h").config).mamba)


def _rule():
    rng = np.random.default_rng(9)
    by_head = (normal(rng, 2, 3) - 4, normal(rng, 2, 3), normal(rng, 2, 3))
    return Mamba2Rule(normal(rng, 2, 4, 28), normal(rng, 2, 28), *by_head, key_size=8)


@pytest.mark.parametrize("case", ["nemotron-h", "qwen3-5"])
def test_placeholders_leave_every_state_as_it_is(case):
    """Rows of padding and of free slots, here with the token -1: states are as if there were none.

    Of four slots, one decodes with a draft, one reads a prompt, and two do neither.
    """
    model = load_target(golden_checkpoint(case), dtype=jnp.float32)
    slots, drafts, nowhere = 4, 3, 2**31 - 1
    rng = np.random.default_rng(0)
    caches = init_cache(
        model.cache_shapes,
        num_pages=1 + slots,
        page_size=16,
        dtype=jnp.float32,
        mesh=make_mesh(),
        num_states=NumStates(slots, 0, drafts),
    )
    caches = jax.tree.map(lambda array: normal(rng, *array.shape), caches)

    def block(slot, start, count, padding, *unapplied):
        """The rows of a slot; with padding, also a free slot's."""
        index = np.arange(count + padding, dtype=np.int32)
        place = jnp.asarray([slot, nowhere], jnp.int32)
        whole = RowBlock(
            jnp.asarray([start + index, index]),
            jnp.asarray([index < count, index < 0]),
            PageTable(jnp.asarray([[1 + slot], [0]], jnp.int32), 16),
            states=StatePlaces(
                place, place, jnp.full_like(place, nowhere), jnp.asarray(unapplied, jnp.int32)
            ),
        )
        return whole if padding else jax.tree.map(lambda array: array[:1], whole)

    def run(padding):
        blocks = block(0, 5, 2, padding, 1, 0), block(1, 0, 3, padding)
        valid, positions = (
            np.concatenate([np.asarray(getattr(each, name)).ravel() for each in blocks])
            for name in ("valid", "positions")
        )
        tokens = np.full(valid.shape, -1, np.int32)
        tokens[valid] = [10, 20, 30, 40, 50]
        memory = PagedMemory.build(model.kinds, caches, blocks)
        forward = jax.jit(lambda tokens, positions, memory: model(tokens, positions, memory)[2].caches)
        return forward(jnp.asarray(tokens), jnp.asarray(positions), memory)

    padded, bare = run(2), run(0)
    layers = [i for i, kind in enumerate(model.kinds) if isinstance(kind, Recurrent)]
    assert layers
    for layer in layers:
        *states, inputs = zip(caches[layer], padded[layer], bare[layer], strict=True)
        for before, after, expected in states:
            np.testing.assert_allclose(after[:2], expected[:2], rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(after[2:], before[2:])
            assert np.all(np.any(np.asarray(after != before).reshape(slots, -1), axis=1)[:2])
        before, after, expected = inputs  # of the one draft, and of nobody
        np.testing.assert_allclose(after[0, 0], expected[0, 0], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(after[1:], before[1:])


def test_shapes_of_thirty_billion_parameters():
    config = ModelConfig.from_hf(NANO)
    target = nnx.eval_shape(lambda: make_target(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    total = sum(variable.get_value().size for variable, _ in declared(target))
    assert total == pytest.approx(31.6e9, rel=1e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_num_heads": 7}, "mamba_num_heads 7 is not a multiple of n_groups 2"),
        ({"conv_kernel": 1}, "conv_kernel 1 is not supported"),
        ({"layers_block_type": ["mamba3"]}, "layers_block_type: unknown kind 'mamba3'"),
        (
            {"layers_block_type": None, "hybrid_override_pattern": "MX"},
            "hybrid_override_pattern: unknown letter 'X'",
        ),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported; supported: relu2"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu' is not supported; supported: silu"),
        ({"n_shared_experts": 2}, "n_shared_experts 2 is not supported; supported: 1"),
        (
            {"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "*Y"},
            "mtp_hybrid_override_pattern: unknown letter 'Y'",
        ),
        ({"time_step_limit": [0.001, 0.1]}, r"time_step_limit \[0.001, 0.1\] is not supported"),
    ],
)
def test_what_is_not_supported_is_named(changes, message):
    config = {**golden_checkpoint("nemotron-h").config, **changes}
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers 2 is not supported; supported: 1"),
        (
            {"mtp_layers_block_type": ["mamba", "attention"]},
            "mtp_layers_block_type .*linear_attention.* is not",
        ),
        ({"mtp_layers_block_type": ["moe"]}, r"mtp_layers_block_type \['moe'\] is not supported"),
    ],
)
def test_layers_that_cannot_draft_are_named_where_they_should(changes, message):
    """The target without them loads."""
    checkpoint = golden_checkpoint("nemotron-h-mtp")
    checkpoint = replace(checkpoint, config={**checkpoint.config, **changes})
    with pytest.raises(ConfigError, match=message):
        mtp_config(checkpoint, target_config(golden_checkpoint("nemotron-h")))
