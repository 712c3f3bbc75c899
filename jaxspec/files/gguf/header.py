"""The header of a GGUF file: metadata, and the position of each tensor.

The reader of the `gguf` package makes one numpy view per vocabulary entry, which takes two seconds for
49,152 tokens, and trusts any length stated in a damaged file. This one checks every length against the size
of the file. Format: ggml's docs/gguf.md, versions 2 and 3, little-endian.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxspec.files.errors import CheckpointError

_SCALARS = {
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT64: "d",
    gguf.GGUFValueType.BOOL: "?",
}
_MAX_RANK = 4

# The largest vocabularies make headers of 15 MB with 900,000 values.
_MAX_BYTES = 32 * 2**20
_MAX_VALUES = 1_500_000
_MAX_TENSORS = 65_536


@dataclass(frozen=True)
class TensorInfo:
    """Shape, format and position of one tensor.

    Attributes:
      shape: in numpy's order (the file states it reversed).
      quantization: the format of the values.
      offset, nbytes: position and size in the file, in bytes.
    """

    shape: tuple[int, ...]
    quantization: gguf.GGMLQuantizationType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata by key, tensors by their names in the file, and the memory-mapped file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: np.ndarray  # the whole file, uint8

    def bytes_of(self, info: TensorInfo) -> np.ndarray:
        return self.data[info.offset : info.offset + info.nbytes]


def read_header(path: Path) -> GGUFHeader:
    """Reads the header, and checks that the file holds every tensor.

    Raises:
      CheckpointError: not a GGUF, an unsupported version or byte order, a truncated file, or a header larger
        than any model's.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path}: the file is empty") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if data[:4] != b"GGUF":
        raise CheckpointError(f"{path}: not a GGUF file (it begins with {data[:4]!r})")
    cursor = _Cursor(path, data)
    version = cursor.scalar("I")
    if version not in gguf.gguf_reader.READER_SUPPORTED_VERSIONS:
        raise CheckpointError(f"{path}: GGUF version {version} is not supported, or the file is big-endian")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    if num_tensors > _MAX_TENSORS:
        raise CheckpointError(
            f"{path}: states {num_tensors} tensors, or is truncated; at most {_MAX_TENSORS}"
        )
    cursor.count(num_keys)
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.value_type(key), key)
    places = [cursor.tensor() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}")
    start = -(-cursor.offset // alignment) * alignment
    tensors = {}
    for name, shape, quantization, offset in places:
        info = TensorInfo(shape, quantization, start + offset, _nbytes(path, name, shape, quantization))
        if info.offset + info.nbytes > len(data):
            raise CheckpointError(
                f"{path}: truncated: tensor {name!r} ends at byte {info.offset + info.nbytes}, "
                f"the file at {len(data)}"
            )
        if name in tensors:
            raise CheckpointError(f"{path}: tensor {name!r} appears twice")
        tensors[name] = info
    return GGUFHeader(path, metadata, tensors, np.frombuffer(data, np.uint8))


def _nbytes(path: Path, name: str, shape: tuple[int, ...], quantization: gguf.GGMLQuantizationType) -> int:
    block, size = gguf.GGML_QUANT_SIZES[quantization]
    if shape and shape[-1] % block:
        raise CheckpointError(f"{path}: tensor {name!r} has rows of {shape[-1]}, not a multiple of {block}")
    return prod(shape) // block * size


class _Cursor:
    """Reads the header from front to back, never past the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.offset = 4
        self.num_values = 0

    def count(self, values: int) -> None:
        """Counts values before they are read; raises CheckpointError if there are too many."""
        self.num_values += values
        if self.num_values > _MAX_VALUES:
            raise CheckpointError(
                f"{self.path}: states {self.num_values} values, or is truncated; at most {_MAX_VALUES}"
            )

    def take(self, nbytes: int) -> int:
        """Advances by `nbytes`; returns their offset."""
        start = self.offset
        if nbytes > len(self.data) - start:
            raise CheckpointError(f"{self.path}: truncated: the header runs past byte {len(self.data)}")
        if start + nbytes > _MAX_BYTES:
            raise CheckpointError(
                f"{self.path}: the header runs past byte {_MAX_BYTES}, the most that is read"
            )
        self.offset = start + nbytes
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        nbytes = self.scalar("Q")
        start = self.take(nbytes)
        # Some published files have token texts that are not UTF-8.
        return self.data[start : start + nbytes].decode("utf-8", errors="replace")

    def value_type(self, key: str) -> gguf.GGUFValueType:
        code = self.scalar("I")
        try:
            return gguf.GGUFValueType(code)
        except ValueError:
            raise CheckpointError(f"{self.path}: metadata {key!r} has the unknown type {code}") from None

    def value(self, kind: gguf.GGUFValueType, key: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == gguf.GGUFValueType.STRING:
            return self.string()
        item, count = self.value_type(key), self.scalar("Q")
        self.count(count)
        if item == gguf.GGUFValueType.ARRAY:
            raise CheckpointError(f"{self.path}: metadata {key!r} is an array of arrays")
        if item in _SCALARS:
            layout = struct.Struct(f"<{_SCALARS[item]}")
            start = self.take(count * layout.size)
            return [value for (value,) in layout.iter_unpack(self.data[start : self.offset])]
        return [self.value(item, key) for _ in range(count)]

    def tensor(self) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
        name = self.string()
        rank = self.scalar("I")
        if not 1 <= rank <= _MAX_RANK:
            raise CheckpointError(f"{self.path}: tensor {name!r} has {rank} dimensions, not 1 to {_MAX_RANK}")
        dimensions = [self.scalar("Q") for _ in range(rank)]
        if not all(dimensions):
            raise CheckpointError(f"{self.path}: tensor {name!r} has shape {dimensions[::-1]}, of no values")
        code = self.scalar("I")
        try:
            quantization = gguf.GGMLQuantizationType(code)
        except ValueError:
            raise CheckpointError(f"{self.path}: tensor {name!r} has the unknown type {code}") from None
        return name, tuple(reversed(dimensions)), quantization, self.scalar("Q")
