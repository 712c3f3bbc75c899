"""Qwen3-MoE against transformers: routed and dense layers, both ways to weigh experts, ties, windows."""

import jax.numpy as jnp
import pytest
from golden_files import golden_checkpoint
from target_checks import check_export, check_one_pass, check_pieces

from jaxspec.models.layers.moe import MoE
from jaxspec.models.layers.transformer import MLP
from jaxspec.models.target import load_target

CASES = ("qwen3-moe", "qwen3-moe-windowed", "qwen3-moe-layer-types")


@pytest.mark.parametrize("case", CASES)
def test_one_pass_equals_transformers(case):
    check_one_pass(case)


@pytest.mark.parametrize("size", [1, 5])
def test_pieces_through_the_cache_equal_one_pass(size):
    check_pieces("qwen3-moe-windowed", size)


@pytest.mark.parametrize("case", CASES)
def test_export_gives_back_every_tensor(case):
    check_export(case)


@pytest.mark.parametrize(
    ("case", "kinds"), [("qwen3-moe", [MoE, MLP, MoE]), ("qwen3-moe-windowed", [MLP, MoE])]
)
def test_layers_are_dense_where_the_config_says_so(case, kinds):
    model = load_target(golden_checkpoint(case), dtype=jnp.float32)
    for layer, kind in zip(model.layers, kinds, strict=True):
        assert isinstance(layer.mlp, kind)
