"""Sizes that a run leaves open: by the data, by the memory, and never what somebody gave."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.drafters.kinds.eagle3 import Eagle3
from jaxspec.lab.training.config import HeadConfig, TrainConfig
from jaxspec.lab.training.head import config_from, head_config
from jaxspec.lab.training.sizes import (
    draft_vocabulary_size,
    fitting_slots,
    read_sizes,
    resolve_sizes,
    save_sizes,
)
from jaxspec.models.families.llama import Llama

TARGET = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, tie_word_embeddings=True)
OPEN = TrainConfig()
GB = 10**9


@pytest.fixture(scope="module")
def models():
    config = head_config(HeadConfig(), TARGET, 8192)
    return (
        nnx.eval_shape(
            lambda: Eagle3(config, num_speculative_tokens=4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        ),
        nnx.eval_shape(lambda: Llama(TARGET, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))),
    )


def resolved(models, config=OPEN, *, lengths=(300,) * 20000, memory=140 * GB, devices=1):
    return resolve_sizes(config, *models, np.array(lengths), memory=memory, devices=devices)


def test_rows_are_as_long_as_the_longest_conversation(models):
    assert resolved(models, lengths=[300] * 5000 + [2100]).row_length == 2112
    assert resolved(models).row_length == 512
    assert resolved(models, replace(OPEN, row_length=640)).row_length == 640


def test_an_update_has_the_tokens_asked_for_where_the_memory_has_room(models):
    sizes = resolved(models)
    assert (sizes.batch_size, sizes.row_length) == (32, 512)
    assert resolved(models, replace(OPEN, batch_size=5)).batch_size == 5
    small = resolved(models, memory=2 * GB)
    assert 1 <= small.batch_size < 16
    assert resolved(models, memory=GB // 10).batch_size == 1
    assert resolved(models, devices=8).batch_size == 32
    assert resolved(models, memory=GB // 10, devices=8).batch_size == 8


def test_of_little_data_there_are_small_updates_and_enough_of_them(models):
    sizes = resolved(models, lengths=[200] * 100)
    assert sizes.batch_size * 5 <= 40
    assert sizes.steps == 300
    assert sizes.validation_rows <= 4
    assert sizes.warmup_steps == 30
    assert sizes.checkpoint_every == 75


def test_steps_are_epochs(models):
    sizes = resolved(models)
    rows = 20000 * 300 / 512
    assert sizes.validation_rows == 64
    assert abs(sizes.steps - 4 * (rows - 64) / 32) < 2
    assert resolved(models, replace(OPEN, steps=777)).steps == 777


def test_a_run_goes_on_with_the_sizes_that_it_began_with(models, tmp_path):
    assert read_sizes(tmp_path) is None
    sizes = resolved(models)
    save_sizes(sizes, tmp_path)
    assert read_sizes(tmp_path) == sizes


def test_slots_whose_cache_fits(models):
    _, target = models
    position = 30 * 2 * 3 * 64 * 2
    assert fitting_slots(target, 128, 2304, memory=140 * GB) == 128
    assert fitting_slots(target, 128, 2304, memory=GB) == int(0.4 * GB / (2304 * position))
    assert fitting_slots(target, 128, 2304, memory=1) == 1


def test_draft_vocabularies():
    sizes = [draft_vocabulary_size(replace(TARGET, vocab_size=size)) for size in (259, 49152, 128256)]
    assert sizes == [259, 8192, 32768]


def test_a_run_has_the_shape_of_the_head_that_it_goes_on_from():
    initial = head_config(HeadConfig(intermediate_size=96, capture=(1, 2, 30), fc_norm=True), TARGET, 500)
    initial = replace(initial, own_embedding=True, first_layer="midlayer")
    config = config_from(initial, HeadConfig(initial="head", fc_norm=True), TARGET, 700)
    assert config == replace(initial, draft_vocab_size=700, own_embedding=False, first_layer="layers.0")


@pytest.mark.parametrize(
    ("changes", "layers", "message"),
    [
        ({}, {"intermediate_size": 48}, "head.intermediate_size is 96, that of head.initial 48"),
        ({"capture": ()}, {}, "only the target's final hidden state"),
        ({}, {"qk_norm": True}, "its qk_norm is True; only heads with False can be trained"),
        ({}, {"attention_bias": True}, "its attention_bias is True"),
        ({}, {"hidden_size": 512}, "it is 512 wide and the target 576"),
    ],
)
def test_heads_that_are_not_trained(changes, layers, message):
    initial = head_config(HeadConfig(intermediate_size=96), TARGET, 500)
    initial = replace(initial, layers=replace(initial.layers, **layers), **changes)
    with pytest.raises(ConfigError, match=message):
        config_from(initial, HeadConfig(initial="head", intermediate_size=96), TARGET, 500)
