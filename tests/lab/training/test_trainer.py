"""Updates of a head: those of a batch again and again, and the same one on one device and on two."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.config import ConfigError, ModelConfig
from jaxspec.lab.training.config import HeadConfig, TrainConfig
from jaxspec.lab.training.head import head_config, is_trained, new_head
from jaxspec.lab.training.trainer import Trainer
from jaxspec.models.families.llama import Llama

TOLD = {"row_length": 16, "warmup_steps": 0, "num_unroll_steps": 2}


def models(dtype):
    """A head and its target."""
    shape = ModelConfig("llama", 40, 16, 24, 5, 2, 1, 8, tie_word_embeddings=True)
    target = Llama(shape, dtype=dtype, rngs=nnx.Rngs(0))
    ids = np.arange(0, 40, 2)
    return new_head(
        head_config(HeadConfig(), shape, 20), target, ids, num_speculative_tokens=2, seed=1
    ), target


def make_batch():
    rng = np.random.default_rng(0)
    return {
        "tokens": rng.integers(0, 40, (4, 16)),
        "positions": np.tile(np.arange(16), (4, 1)),
        "segments": np.ones((4, 16), int),
        "answer": np.arange(16) > np.array([[3], [2], [9], [11]]),  # devices have more of them or fewer
    }


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ten_updates_learn_a_batch(dtype):
    trainer = Trainer(*models(dtype), TrainConfig(batch_size=4, steps=10, learning_rate=0.01, **TOLD))
    state, losses = trainer.initial_state(), []
    for _ in range(10):
        state, sums = trainer.update(state, trainer.put(make_batch()))
        losses.append(float(sums.loss.sum() / sums.count.sum()))
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0]


def update():
    """The number of devices, the loss and some weights after an update, and why three rows are refused."""
    head, target = models(jnp.float32)
    told = TOLD | {"steps": 4}
    trainer = Trainer(head, target, TrainConfig(batch_size=4, **told))
    batch = make_batch()
    state, sums = trainer.update(trainer.initial_state(), trainer.put(batch))
    loaded = jax.device_put(nnx.state(head, is_trained), jax.devices()[0])  # as a checkpoint is
    heads = head, trainer.head(state), trainer.head(trainer.averaged(state, loaded, 0.25))
    before, after, mixed = (np.asarray(each.fc.kernel[...]) for each in heads)
    np.testing.assert_allclose(mixed, 0.25 * before + 0.75 * after, rtol=1e-6)
    assert heads[1].fc.kernel[...].devices() == {jax.devices()[0]}
    try:
        refused = Trainer(head, target, TrainConfig(batch_size=3, **told)) and ""
    except ConfigError as error:
        refused = str(error)
    return jax.device_count(), [float(sums.loss[0]), *after.ravel()[:5].tolist()], refused


def test_two_devices_split_the_rows_and_agree_with_one():
    ran = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (one, numbers, fits), (two, same, refused) = update(), json.loads(ran.stdout)
    assert (one, two) == (1, 2)
    np.testing.assert_allclose(numbers, same, rtol=1e-4)
    assert fits == ""
    assert refused == "train.batch_size must be a multiple of the 2 devices, got 3"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    print(json.dumps(update()))
