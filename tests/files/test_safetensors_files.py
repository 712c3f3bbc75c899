import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_folder import arrays, assert_same_tensors, write_folder, write_json

from jaxspec.files import CheckpointError
from jaxspec.files.safetensors.tensors import INDEX, open_safetensors, write_safetensors


@pytest.mark.parametrize("shards", [1, 3])
def test_reads_bit_for_bit(tmp_path, shards):
    assert_same_tensors(open_safetensors(write_folder(tmp_path, shards)), arrays())


def test_reads_files_without_an_index(tmp_path):
    save_file({"a": np.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(3)}, tmp_path / "two.safetensors")
    assert set(open_safetensors(tmp_path)) == {"a", "b"}
    save_file({"b": np.zeros(3)}, tmp_path / "three.safetensors")
    with pytest.raises(CheckpointError, match="tensor 'b' is in another file too"):
        open_safetensors(tmp_path)


def test_a_single_file_counts_before_an_index_that_does_not_name_it(tmp_path):
    """transformers leaves the index of an earlier save, and reads the single file."""
    index = write_folder(tmp_path, shards=3) / INDEX
    later = {"a": np.zeros(2, np.float32)}
    save_file(later, tmp_path / "model.safetensors")
    assert_same_tensors(open_safetensors(tmp_path), later)
    placed = json.loads(index.read_text())["weight_map"]
    write_json(index, {"weight_map": {**placed, "a": "model.safetensors"}})
    assert_same_tensors(open_safetensors(tmp_path), {**arrays(), **later})


@pytest.mark.parametrize(("shard_bytes", "files"), [(None, 1), (10**6, 1), (200, 2), (1, 5)])
def test_writes_what_it_reads(tmp_path, shard_bytes, files):
    write_safetensors(tmp_path, arrays().items(), shard_bytes)
    assert len(list(tmp_path.glob("model*.safetensors"))) == files
    assert (tmp_path / INDEX).exists() == (files > 1)
    assert_same_tensors(open_safetensors(tmp_path), arrays())


@pytest.mark.parametrize("length", [0, 7, 60, -1])
def test_truncated_file_is_named(tmp_path, length):
    path = write_folder(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: not a complete safetensors file"
    ) as caught:
        open_safetensors(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_shard_is_named(tmp_path):
    write_folder(tmp_path, shards=3)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: file not found"):
        open_safetensors(tmp_path)


def test_index_and_files_must_agree(tmp_path):
    index = write_folder(tmp_path, shards=2) / INDEX
    weight_map = json.loads(index.read_text())["weight_map"]
    write_json(index, {"weight_map": {**weight_map, "gone": "model-0.safetensors"}})
    with pytest.raises(CheckpointError, match="tensor 'gone' is missing"):
        open_safetensors(tmp_path)
    write_json(index, {"weight_map": {k: v for k, v in weight_map.items() if k != "d2t"}})
    with pytest.raises(CheckpointError, match="spare tensor 'd2t'"):
        open_safetensors(tmp_path)
    write_json(index, {})
    with pytest.raises(CheckpointError, match="has no weight_map"):
        open_safetensors(tmp_path)


def test_index_cannot_point_outside_the_folder(tmp_path):
    folder = tmp_path / "inner"
    write_folder(folder, shards=2)
    save_file({"secret": np.zeros(1)}, tmp_path / "outside.safetensors")
    write_json(folder / INDEX, {"weight_map": {"secret": "../outside.safetensors"}})
    with pytest.raises(CheckpointError, match=r"inner/outside\.safetensors: file not found"):
        open_safetensors(folder)


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: pickled .* convert them to safetensors"):
        open_safetensors(tmp_path)


def test_empty_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        open_safetensors(tmp_path)
