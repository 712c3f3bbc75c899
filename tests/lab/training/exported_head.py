"""The head of the golden `eagle3-exported`: random, and exported as a training run exports.

    python tests/lab/training/exported_head.py

writes the golden's checkpoint anew; `scripts/make_goldens.py eagle3-exported` then has speculators load it.
"""

import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from golden_files import DRAFTER_TARGETS, golden_checkpoint, golden_folder

from jaxspec.drafters.kinds.eagle3 import Eagle3
from jaxspec.lab.training.config import HeadConfig
from jaxspec.lab.training.export import embedding_rows, export_head
from jaxspec.lab.training.head import head_config, is_trained, new_head
from jaxspec.models.decoder import Decoder
from jaxspec.models.target import load_target

NAME = "eagle3-exported"


def random_head(target: Decoder) -> Eagle3:
    """A head over half of the target's vocabulary, whose trained weights are random and equal everywhere."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.choice(target.config.vocab_size, 64, replace=False)).astype(np.int32)
    shape = HeadConfig(
        intermediate_size=24, capture=(1, 2, 3), norm_before_residual=True, fc_norm=True, rope_theta=5e5
    )
    config = head_config(shape, target.config, ids.size)
    head = new_head(config, target, ids, num_speculative_tokens=4, seed=0)
    graph, trained, rest = nnx.split(head, is_trained, ...)

    def drawn(old: jax.Array) -> jax.Array:
        noise = rng.normal(size=old.shape)
        return jnp.asarray(1 + 0.3 * noise if old.ndim == 1 else 0.2 * noise, jnp.float32)

    return nnx.merge(graph, jax.tree.map(drawn, trained), rest)


def write(folder: Path) -> None:
    """Exports the head in speculators' format, in float32."""
    checkpoint = golden_checkpoint(DRAFTER_TARGETS[NAME])
    target = load_target(checkpoint, dtype=jnp.float32)
    export_head(
        random_head(target),
        target.config,
        folder,
        form="speculators",
        target_name=DRAFTER_TARGETS[NAME],
        architectures=checkpoint.config["architectures"],
        dtype="float32",
        embedding=embedding_rows(target),
    )
    (folder / "README.md").unlink()


if __name__ == "__main__":
    shutil.rmtree(golden_folder(NAME), ignore_errors=True)
    write(golden_folder(NAME))
