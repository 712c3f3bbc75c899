"""Weights into a network and out again, exactly, and nothing read for a checkpoint that does not fit."""

import re
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_files import TARGETS, golden_checkpoint
from tiny_models import write_target

from jaxspec.attention import PackedMemory
from jaxspec.config import ConfigError
from jaxspec.drafters.formats import identify
from jaxspec.files import CheckpointError, TensorSource, open_checkpoint
from jaxspec.models import target as loading
from jaxspec.models.target import load_target, plan_target, plan_target_update, target_config
from jaxspec.weights.loading import export_tensors


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


@pytest.mark.parametrize("case", ["llama-tied", "qwen2-windowed", "gpt-oss"])
def test_heads_copied_for_more_devices_are_stored_once(case):
    checkpoint = golden_checkpoint(case)
    shape = target_config(checkpoint).over(4)
    assert shape.kv_copies == 4 // shape.num_key_value_heads > 1
    plan = plan_target(checkpoint, dtype=jnp.float32, devices=4)
    for variable, stored in plan.parameters:
        source, whole = variable.get_metadata("source"), (slice(None),) * len(variable.shape)
        tensors = [tensor.read() for tensor in stored]
        everything = source.join(tensors)
        for along in range(len(whole)):
            part = (*whole[:along], slice(1, 3), *whole[along + 1 :])
            np.testing.assert_array_equal(source.join(tensors, part), everything[part])
    target = plan.read()
    exported = export_tensors(target)
    for name, tensor in checkpoint.tensors.items():
        assert exported[name].tobytes() == tensor.read().tobytes(), name
    logits = [logits_of(network) for network in (load_target(checkpoint, dtype=jnp.float32), target)]
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-5)


@nnx.jit
def logits_of(network):
    """Logits of a text of seven tokens."""
    positions = jnp.arange(7)
    memory = PackedMemory(network.kinds, positions[None], jnp.ones((1, 7), jnp.int32))
    hidden, _, _ = network(positions + 3, positions, memory)
    return network.logits(hidden)


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


def test_layers_that_are_not_there_are_refused_before_they_are_built(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(write_target(tmp_path / "target"))
    monkeypatch.setattr(loading, "make_target", lambda *_, **__: pytest.fail("built the network"))
    deep = replace(checkpoint, config={**checkpoint.config, "num_hidden_layers": 1000})
    with pytest.raises(CheckpointError, match="num_hidden_layers is 1000, but layer 2 has no tensors"):
        load_target(deep, dtype=jnp.float32)
    with pytest.raises(ConfigError, match="num_hidden_layers must be at most 1024, got 1000000"):
        load_target(replace(deep, config={**deep.config, "num_hidden_layers": 10**6}), dtype=jnp.float32)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("prefix", ["module.", "base_model.model.", "_orig_mod.module."])
def test_what_all_names_of_a_model_begin_with_is_named(tmp_path, prefix, tied):
    checkpoint = open_checkpoint(write_target(tmp_path / "target", tie_word_embeddings=tied))
    tensors = {f"{prefix}{name}": tensor for name, tensor in checkpoint.tensors.items()}
    named = re.escape(f"layer 0 has no tensors; the names of all tensors begin with {prefix!r}, which has to")
    with pytest.raises(CheckpointError, match=named):
        plan_target(replace(checkpoint, tensors=tensors), dtype=jnp.float32)
    bare = {name.replace("model.", "", 1): tensor for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=r"layer 0 has no tensors; the names of all tensors begin with"):
        plan_target(replace(checkpoint, tensors=bare), dtype=jnp.float32)
    arrays = {f"{prefix}{name}": tensor.read() for name, tensor in checkpoint.tensors.items()}
    model = load_target(checkpoint, dtype=jnp.float32)
    with pytest.raises(CheckpointError, match=rf"is missing; .* begin with {prefix!r}, which has to go"):
        plan_target_update(model, arrays, None)


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


@pytest.mark.parametrize("names", ["only lm_head", "no prefix", "no prefix, only lm_head"])
def test_other_names_of_the_same_model(tmp_path, names):
    checkpoint = open_checkpoint(write_target(tmp_path / "target", tie_word_embeddings=True))
    tensors = dict(checkpoint.tensors)
    if "lm_head" in names:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    if "prefix" in names:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    renamed = replace(checkpoint, tensors=tensors)
    found, expected = (export_tensors(load_target(each, dtype=jnp.float32)) for each in (renamed, checkpoint))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    assert "draft_model" in identify(renamed)


def test_an_embedding_that_is_missing_is_no_output_projection_of_an_untied_model(tmp_path):
    checkpoint = open_checkpoint(write_target(tmp_path / "target"))
    tensors = {n: t for n, t in checkpoint.tensors.items() if n != "model.embed_tokens.weight"}
    with pytest.raises(CheckpointError, match=r"'model\.embed_tokens\.weight' is missing"):
        load_target(replace(checkpoint, tensors=tensors), dtype=jnp.float32)


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


@dataclass(frozen=True)
class Poisoned:
    """A tensor of a checkpoint with one value that is no number."""

    tensor: TensorSource
    value: float

    @property
    def shape(self):
        return self.tensor.shape

    @property
    def dtype(self):
        return self.tensor.dtype

    def read(self):
        array = self.tensor.read().copy()
        array.flat[array.size // 2] = self.value
        return array


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_a_weight_that_is_no_number_is_named(tmp_path, name, value):
    checkpoint = open_checkpoint(write_target(tmp_path / "target"))
    poisoned = {**checkpoint.tensors, name: Poisoned(checkpoint.tensors[name], value)}
    with pytest.raises(CheckpointError, match=rf"{checkpoint.name}: tensor '{name}' holds NaN or infinity"):
        load_target(replace(checkpoint, tensors=poisoned), dtype=jnp.float32)
