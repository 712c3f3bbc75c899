"""The count of operations against XLA's own, for the part that is a plain forward pass."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.config import ModelConfig
from jaxspec.config.moe import MoeConfig
from jaxspec.drafters.kinds.eagle3 import Eagle3
from jaxspec.lab.training.config import HeadConfig
from jaxspec.lab.training.head import head_config
from jaxspec.lab.training.operations import operations_per_token
from jaxspec.lab.training.packed_rows import PackedRows, run_target
from jaxspec.models.families.llama import Llama
from jaxspec.models.target import make_target

TARGET = ModelConfig("llama", 640, 64, 192, 6, 4, 2, 16, tie_word_embeddings=True)


def count(draft_vocab_size: int, steps: int) -> float:
    config = head_config(HeadConfig(), TARGET, draft_vocab_size)
    args = {"dtype": jnp.float32}
    target = nnx.eval_shape(lambda: Llama(TARGET, **args, rngs=nnx.Rngs(0)))
    head = nnx.eval_shape(lambda: Eagle3(config, num_speculative_tokens=1, **args, rngs=nnx.Rngs(0)))
    return operations_per_token(target, head, row_length=32, num_unroll_steps=steps)


@pytest.mark.cpu  # on a GPU, XLA counts nothing before it compiles
def test_forward_pass_is_what_xla_counts():
    target = Llama(TARGET, dtype=jnp.float32, rngs=nnx.Rngs(0))
    ints = jax.ShapeDtypeStruct((2, 32), jnp.int32)
    rows = PackedRows(ints, ints, ints, jax.ShapeDtypeStruct((2, 32), bool))
    lowered = jax.jit(lambda rows: target.logits(run_target(target, rows, ())[0])).lower(rows)
    without_head = count(160, 0) - 2 * 64 * 160 - 4 * 3 * 64 * 64
    np.testing.assert_allclose(without_head * 64, lowered.cost_analysis()["flops"], rtol=0.15)


def test_a_step_costs_three_passes_and_two_of_the_frozen_rows():
    step = count(160, 3) - count(160, 2)
    assert step == count(160, 1) - count(160, 0)
    layer = 2 * (128 * 8 * 16 + 64 * 64 + 3 * 64 * 192) + 4 * 32 * 64
    assert step == 3 * layer + 4 * 64 * 160


def test_of_experts_those_count_that_a_row_chooses():
    moe = MoeConfig(num_experts=8, experts_per_token=2, intermediate_size=24, normalize=True)
    config = replace(TARGET, family="qwen3_moe", moe=moe)

    def count(config):
        target = nnx.eval_shape(lambda: make_target(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
        shape = head_config(HeadConfig(), config, 160)
        head = nnx.eval_shape(
            lambda: Eagle3(shape, num_speculative_tokens=1, dtype=jnp.float32, rngs=nnx.Rngs(0))
        )
        return operations_per_token(target, head, row_length=32, num_unroll_steps=0)

    one_more = count(replace(config, moe=replace(moe, experts_per_token=3))) - count(config)
    assert one_more == 6 * 2 * 3 * 64 * 24
