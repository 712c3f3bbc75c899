"""Safetensors files that somebody broke are read, or refused by our own exceptions in one line."""

import json

import numpy as np
import pytest
from fuzzing import changed, damaged, refused_or
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save
from tiny_folder import arrays

from jaxspec.files.safetensors.tensors import INDEX, open_safetensors

CONTENT = save(arrays(), metadata={"format": "pt"})
LENGTH = int.from_bytes(CONTENT[:8], "little")
HEADER, DATA = json.loads(CONTENT[8 : 8 + LENGTH]), CONTENT[8 + LENGTH :]
TYPES = ("F64", "F32", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I64", "U8", "BOOL", "C64", "X")


def read(folder):
    for tensor in open_safetensors(folder).values():
        array = tensor.read()
        assert (array.shape, array.dtype) == (tensor.shape, tensor.dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@given(content=damaged(CONTENT))
def test_other_bytes(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    refused_or(lambda: read(folder))


@given(data=st.data())
def test_a_header_of_other_values(folder, data):
    header = data.draw(changed(HEADER, ("dtype", "shape", "data_offsets", "__metadata__")))
    for name in data.draw(st.sets(st.sampled_from(sorted(HEADER)))):
        if isinstance(header.get(name), dict):
            header[name]["dtype"] = data.draw(st.sampled_from(TYPES))
    encoded = json.dumps(header).encode()
    length = data.draw(
        st.sampled_from([len(encoded), 0, 1, 2**32, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
    )
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + encoded + DATA)
    refused_or(lambda: read(folder))


@given(data=st.data())
def test_every_type_and_shape(folder, data):
    """Headers that agree with themselves: every type over the same bytes."""
    dtype = data.draw(st.sampled_from(TYPES))
    shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 8, 2**20, 2**32, 2**62]), max_size=5))
    size = data.draw(st.sampled_from([0, 1, 2, 4, 8, 16, 64]))
    header = {"t": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}
    encoded = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(size))
    refused_or(lambda: read(folder))


def test_an_index_of_many_files_takes_time_in_their_number_only(folder):
    weight_map = {f"model.layers.{i}.weight": f"model-{i}.safetensors" for i in range(100_000)}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    assert refused_or(lambda: read(folder)) is None
    (folder / INDEX).unlink()


def test_float8_is_read_where_it_lies(folder):
    header = {
        "a": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [1, 3]},
        "b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
    }
    encoded = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"\x01\x38\xb8")
    tensors = open_safetensors(folder)
    np.testing.assert_array_equal(tensors["a"].read().astype(np.float32), [1, -1])
    np.testing.assert_array_equal(tensors["b"].read(), [1])
