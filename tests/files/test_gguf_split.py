"""Models in several files, as the `gguf` package splits them."""

import shutil

import gguf
import numpy as np
import pytest
from tiny_gguf import gguf_tensors, hf_weights, metadata, write_gguf
from tiny_tokenizers import byte_level

from jaxspec.files import CheckpointError, open_checkpoint

NAMES = [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture
def parts(tmp_path):
    """A folder with a model of 13 tensors in three files."""
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama", split_max_tensors=5)
    for key, value in {**metadata(), **byte_level()}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, tensor in gguf_tensors(hf_weights()).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_any_part_opens_the_whole(parts, name):
    checkpoint = open_checkpoint(parts / name)
    assert checkpoint.config["hidden_size"] == 256
    assert checkpoint.tokenizer.encode("hello w")
    assert set(checkpoint.tensors) == set(hf_weights())
    for key, weight in hf_weights().items():
        np.testing.assert_array_equal(checkpoint.tensors[key].read(), weight)


def missing(parts):
    (parts / NAMES[1]).unlink()
    return parts / NAMES[0]


def renamed(parts):
    return (parts / NAMES[0]).rename(parts / "tiny.gguf")


def swapped(parts):
    shutil.copy(parts / NAMES[1], parts / NAMES[2])
    return parts / NAMES[0]


def whole(parts):
    write_gguf(parts / NAMES[1])
    return parts / NAMES[0]


def incomplete(parts):
    values = {"split.no": 1, "split.count": 3, "split.tensors.count": 13}
    write_gguf(parts / NAMES[1], values, {"blk.0.attn_v.weight": np.zeros((2, 2), np.float32)})
    return parts / NAMES[0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing, r"tiny-00002-of-00003\.gguf: cannot be read: No such file"),
        (renamed, r"tiny\.gguf: one of 3 parts, but not named NAME-00001-of-00003\.gguf"),
        (swapped, r"tiny-00003-of-00003\.gguf: metadata split\.no is 1, expected 2"),
        (whole, r"tiny-00002-of-00003\.gguf: metadata split\.no is None, expected 1"),
        (incomplete, r"its parts hold \d+ tensors, and it states 13|appears twice"),
    ],
)
def test_parts_that_do_not_belong_together_are_named(parts, damage, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(damage(parts))
    assert "\n" not in str(caught.value)
