"""The count of operations against XLA's own, for the part that is a plain forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.config import ModelConfig
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.models.llama import Llama
from jaxspec.training.config import HeadConfig
from jaxspec.training.head import head_config
from jaxspec.training.operations import operations_per_token
from jaxspec.training.packed_rows import PackedRows, run_target

TARGET = ModelConfig("llama", 640, 64, 192, 6, 4, 2, 16, tie_word_embeddings=True)


def count(draft_vocab_size: int, steps: int) -> float:
    args = {"dtype": jnp.float32, "rngs": nnx.Rngs(0)}
    target = nnx.eval_shape(lambda: Llama(TARGET, **args))
    config = head_config(HeadConfig(), TARGET, draft_vocab_size)
    head = nnx.eval_shape(lambda: Eagle3(config, num_speculative_tokens=1, **args))
    return operations_per_token(target, head, row_length=32, num_unroll_steps=steps)


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
