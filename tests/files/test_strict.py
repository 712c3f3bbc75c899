from dataclasses import replace

import numpy as np
import pytest
from tiny_folder import arrays, write_folder

from jaxspec.files import Checkpoint, CheckpointError, StrictTensors, open_checkpoint
from jaxspec.weights.memory import ArrayTensor

SHAPES = {"fc.weight": (4, 12), "norm.weight": (4,), "lm_head.weight": (6, 4)}


class Unreadable:
    """Stands for a tensor that must not be read yet."""

    def __init__(self, tensor):
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def read(self):
        raise AssertionError("read before everything was checked")


@pytest.fixture
def checkpoint(tmp_path):
    return open_checkpoint(write_folder(tmp_path / "head"))


def test_everything_taken_once(checkpoint):
    tensors = StrictTensors(checkpoint)
    taken = {name: tensors.take(name, shape) for name, shape in SHAPES.items()}
    taken["d2t"] = tensors.take("d2t", (6,), "int")
    taken["t2d"] = tensors.take("t2d", (3,), "bool")
    tensors.finish()
    for name, array in arrays().items():
        np.testing.assert_array_equal(taken[name].read(), array, strict=True)


def test_nothing_is_read_before_the_caller_does(checkpoint):
    for name in checkpoint.tensors:
        checkpoint.tensors[name] = Unreadable(checkpoint.tensors[name])
    tensors = StrictTensors(checkpoint)
    for name, shape in SHAPES.items():
        tensors.take(name, shape)
    tensors.ignore("*2*")
    tensors.finish()


@pytest.mark.parametrize(
    ("name", "shape", "kind", "message"),
    [
        ("norm.bias", (4,), "float", r"tensor 'norm\.bias' is missing; expected shape \[4\]"),
        ("fc.weight", (4, 8), "float", r"tensor 'fc\.weight' has shape \[4, 12\], expected \[4, 8\]"),
        ("norm.weight", (4, 1), "float", r"tensor 'norm\.weight' has shape \[4\], expected \[4, 1\]"),
        ("d2t", (6,), "float", "tensor 'd2t' is int64, expected float"),
        ("t2d", (3,), "int", "tensor 't2d' is bool, expected int"),
        ("norm.weight", (4,), "int", r"tensor 'norm\.weight' is bfloat16, expected int"),
    ],
)
def test_misfit_is_named(checkpoint, name, shape, kind, message):
    with pytest.raises(CheckpointError, match=rf"^.*/head: {message}$"):
        StrictTensors(checkpoint).take(name, shape, kind)


def test_second_use_is_named(checkpoint):
    tensors = StrictTensors(checkpoint)
    tensors.take("norm.weight", (4,))
    with pytest.raises(CheckpointError, match=r"'norm\.weight' is used twice"):
        tensors.take("norm.weight", (4,))


def test_spare_tensors_are_named(checkpoint):
    tensors = StrictTensors(checkpoint)
    tensors.take("norm.weight", (4,))
    tensors.ignore("lm_head.*")
    with pytest.raises(CheckpointError, match=r"spare tensor 'd2t' of shape \[6\] and 2 more"):
        tensors.finish()


def test_has(checkpoint):
    tensors = StrictTensors(checkpoint)
    tensors.take("norm.weight", (4,))
    assert tensors.has("norm.weight")
    assert not tensors.has("norm.bias")


def test_biases_of_zeros_are_left_over_and_others_are_spare():
    def finish(**more):
        tensors = {"fc.weight": np.ones((4, 2)), "experts.up": np.ones((3, 4, 2)), **more}
        strict = StrictTensors(Checkpoint("head", {}, {name: ArrayTensor(a) for name, a in tensors.items()}))
        strict.take("fc.weight", (4, 2))
        strict.take("experts.up", (3, 4, 2))
        strict.finish()

    finish(**{"fc.bias": np.zeros(4), "experts.up_bias": np.zeros((3, 4))})
    for name, array in {
        "fc.bias": np.eye(4)[2],
        "fc.bias ": np.zeros(4),
        "other.bias": np.zeros(4),
        "experts.up_bias": np.ones((3, 4)),
        "experts.up_bias.weight": np.zeros((3, 4)),
    }.items():
        with pytest.raises(CheckpointError, match=f"spare tensor '{name}'"):
            finish(**{name: array})


@pytest.mark.parametrize("prefix", ["module.", "base_model.model.", "model.model."])
def test_what_all_names_begin_with_is_named(checkpoint, prefix):
    tensors = {f"{prefix}{name}": tensor for name, tensor in checkpoint.tensors.items()}
    message = f"'fc.weight' is missing; .*; the names of all tensors begin with '{prefix}', which has to go$"
    with pytest.raises(CheckpointError, match=message):
        StrictTensors(replace(checkpoint, tensors=tensors)).take("fc.weight", (4, 12))
    tensors["d2t"] = checkpoint.tensors["d2t"]  # this one does not
    with pytest.raises(CheckpointError, match=r"'fc\.weight' is missing; expected shape \[4, 12\]$"):
        StrictTensors(replace(checkpoint, tensors=tensors)).take("fc.weight", (4, 12))
