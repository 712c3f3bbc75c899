"""One update, and an average with the initial head, give the same weights on one device and on two."""

import subprocess
import sys

import numpy as np

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jaxspec.config import ModelConfig
from jaxspec.models.llama import Llama
from jaxspec.training.config import HeadConfig, TrainConfig
from jaxspec.training.head import head_config, is_trained, new_head
from jaxspec.training.trainer import Trainer

jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
shape = ModelConfig("llama", 40, 16, 24, 5, 2, 1, 8, tie_word_embeddings=True)
target = Llama(shape, dtype=jnp.float32, rngs=nnx.Rngs(0))
ids = np.arange(0, 40, 2)
config = head_config(HeadConfig(), shape, 20)
head = new_head(config, target, ids, num_speculative_tokens=2, seed=1)
config = TrainConfig(steps=4, batch_size=int(sys.argv[2]), row_length=16, warmup_steps=0, num_unroll_steps=2)
trainer = Trainer(head, target, config)
rng = np.random.default_rng(0)
batch = {
    "tokens": rng.integers(0, 40, (4, 16)),
    "positions": np.tile(np.arange(16), (4, 1)),
    "segments": np.ones((4, 16), int),
    "answer": np.arange(16) > np.array([[3], [2], [9], [11]]),  # devices have more of them or fewer
}
state, sums = trainer.update(trainer.initial_state(), trainer.put(batch))
loaded = jax.device_put(nnx.state(head, is_trained), jax.devices()[0])  # as a checkpoint is
average = trainer.averaged(state, loaded, 0.25)
before, after, mixed = (np.asarray(x.fc.kernel[...]) for x in (head, *map(trainer.head, (state, average))))
np.testing.assert_allclose(mixed, 0.25 * before + 0.75 * after, rtol=1e-6)
head = trainer.head(state)
assert head.fc.kernel[...].devices() == {jax.devices()[0]}
print(jax.device_count(), float(sums.loss[0]), *np.asarray(head.fc.kernel[...]).ravel()[:5].tolist())
"""


def update(devices: int, batch_size: int = 4) -> tuple[subprocess.CompletedProcess, list[float]]:
    command = [sys.executable, "-c", PROGRAM, str(devices), str(batch_size)]
    ran = subprocess.run(command, capture_output=True, text=True)
    return ran, [float(word) for word in ran.stdout.split()]


def test_two_devices_split_the_rows_and_agree_with_one():
    (one_run, one), (two_run, two) = update(1), update(2)
    assert one_run.returncode == 0, one_run.stderr
    assert two_run.returncode == 0, two_run.stderr
    assert (one[0], two[0]) == (1, 2)
    np.testing.assert_allclose(one[1:], two[1:], rtol=1e-4)


def test_a_batch_that_does_not_split_is_refused():
    run, _ = update(2, batch_size=3)
    assert "ConfigError: train.batch_size must be a multiple of the 2 devices, got 3" in run.stderr
