"""Weights into a network and out again, exactly, and nothing read for a checkpoint that does not fit."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import TARGETS, golden_checkpoint
from tiny_models import write_target

from jaxspec.checkpoints import CheckpointError, open_checkpoint
from jaxspec.models.loading import export_tensors, load_target


@pytest.mark.parametrize("case", TARGETS)
def test_export_gives_back_every_bit(case):
    checkpoint = golden_checkpoint(case)
    exported = export_tensors(load_target(checkpoint, dtype=jnp.float32))
    assert set(exported) == set(checkpoint.tensors)
    for name, tensor in checkpoint.tensors.items():
        stored = tensor.read()
        assert exported[name].dtype == stored.dtype
        assert exported[name].shape == stored.shape
        assert exported[name].tobytes() == stored.tobytes(), name


FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Unreadable:
    """A tensor of a checkpoint that must be refused before anything is read."""

    shape: tuple[int, ...]
    dtype: np.dtype = FLOAT32

    def read(self):
        raise AssertionError("read a tensor of a checkpoint that does not fit")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"'model\.norm\.weight' is missing"),
        ({"lm_head.weight": None}, r"'lm_head\.weight' is missing"),
        ({"model.layers.1.mlp.up_proj.weight": (48, 31)}, r"has shape \[48, 31\], expected \[48, 32\]"),
        ({"model.layers.7.mlp.up_proj.weight": (48, 32)}, r"spare tensor 'model\.layers\.7"),
    ],
)
def test_misfits_are_refused_before_anything_is_read(tmp_path, change, message):
    checkpoint = open_checkpoint(write_target(tmp_path / "target"))
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()} | change
    tensors = {name: Unreadable(shape) for name, shape in shapes.items() if shape is not None}
    with pytest.raises(CheckpointError, match=message) as error:
        load_target(replace(checkpoint, tensors=tensors), dtype=jnp.float32)
    assert "\n" not in str(error.value)


def test_an_output_head_that_is_there_is_used_whatever_the_flag_says(tmp_path):
    folder = write_target(tmp_path / "target")
    checkpoint = open_checkpoint(folder)
    head = checkpoint.tensors["lm_head.weight"].read()
    tied = replace(checkpoint, config={**checkpoint.config, "tie_word_embeddings": True})
    model = load_target(tied, dtype=jnp.float32)
    np.testing.assert_array_equal(np.asarray(model.output_kernel), head.T)


def test_an_embedding_is_tied_where_the_config_says_so(tmp_path):
    checkpoint = open_checkpoint(write_target(tmp_path / "target", tie_word_embeddings=True))
    assert "lm_head.weight" not in checkpoint.tensors
    model = load_target(checkpoint, dtype=jnp.float32)
    table = checkpoint.tensors["model.embed_tokens.weight"].read()
    np.testing.assert_array_equal(np.asarray(model.output_kernel), table.T)


def test_buffers_of_old_checkpoints_are_ignored(tmp_path):
    checkpoint = open_checkpoint(write_target(tmp_path / "target"))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load_target(
        replace(checkpoint, tensors={**checkpoint.tensors, name: Unreadable((4,))}), dtype=jnp.float32
    )


def test_weights_are_rounded_to_the_dtype_asked_for(tmp_path):
    checkpoint = open_checkpoint(write_target(tmp_path / "target"))
    model = load_target(checkpoint, dtype=jnp.bfloat16)
    exported = export_tensors(model)
    stored = checkpoint.tensors["lm_head.weight"].read()
    assert exported["lm_head.weight"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(exported["lm_head.weight"], stored.astype(jnp.bfloat16))
