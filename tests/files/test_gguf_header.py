import gguf
import numpy as np
import pytest
from tiny_gguf import metadata, write_gguf
from tiny_tokenizers import byte_level

from jaxspec.files import CheckpointError
from jaxspec.files.gguf.header import read_header

ARRAYS = {
    "a.strings": ["x", "é", ""],
    "a.integers": [1, -2, 3],
    "a.floats": [0.5, 2.0],
    "a.flags": [True, False],
}


@pytest.fixture
def tiny(tmp_path):
    values = {**metadata(), **byte_level(), **ARRAYS}
    return write_gguf(tmp_path / "tiny.gguf", values)


def test_agrees_with_the_gguf_package(tiny):
    header, reader = read_header(tiny), gguf.GGUFReader(tiny)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert header.metadata == fields
    assert list(header.tensors) == [t.name for t in reader.tensors]
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert info.quantization == tensor.tensor_type
        np.testing.assert_array_equal(header.bytes_of(info), tensor.data.view(np.uint8).ravel())


@pytest.mark.parametrize("part", [0.0, 1e-6, 1e-5, 0.001, 0.004, 0.006, 0.3, 0.999])
def test_truncated_file_is_one_line(tiny, part):
    content = tiny.read_bytes()
    tiny.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: .*(truncated|empty|not a GGUF)") as caught:
        read_header(tiny)
    assert "\n" not in str(caught.value)


def test_every_cut_of_the_header_is_noticed(tmp_path):
    path = write_gguf(tmp_path / "small.gguf", {"a": [1, 2], "b": "text"}, {"t": np.zeros(3, np.float32)})
    content = path.read_bytes()
    for length in range(len(content) - 20):  # the last 20 bytes are padding
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            read_header(path)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, b"\x00\x00\x00\x03", "version 50331648 is not supported, or the file is big-endian"),
        (4, b"\x01\x00\x00\x00", "version 1 is not supported"),
        (16, b"\xff" * 8, "truncated"),
    ],
)
def test_foreign_file_is_named(tiny, offset, value, message):
    content = bytearray(tiny.read_bytes())
    content[offset : offset + len(value)] = value
    tiny.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_header(tiny)
