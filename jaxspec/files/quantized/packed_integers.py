"""Matrices of four- or eight-bit integers packed into words, in groups of inputs that share a scale.

Sources: AutoAWQ, `awq/modules/linear/gemm.py` and `awq/utils/packing_utils.py`; AutoGPTQ,
`auto_gptq/nn_modules/qlinear/qlinear_cuda.py`; compressed-tensors, `compressors/pack_quantized`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.files.checkpoint import TensorSource
from jaxspec.files.errors import CheckpointError
from jaxspec.files.quantized.blocks import Blocks
from jaxspec.files.quantized.codes import Codes, QuantizedTensor

BITS = (4, 8)
"""Supported sizes of an integer."""

_CPU_BLOCK = 32

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word of AWQ has its eight outputs, counted from the lowest bits."""


@dataclass(frozen=True)
class PackedTensor(QuantizedTensor):
    """A matrix of integers in words.

    Attributes:
      name: of the tensor of words, for messages.
      bits: of an integer.
      words: the integers.
      scale: floats, one for each group of every output.
      zero: words of zero points; None if they are all half of the range.
      group: i32[in], the group of every input, or None if groups are adjacent inputs.
    """

    name: str
    bits: int
    words: TensorSource
    scale: TensorSource
    zero: TensorSource | None = None
    group: TensorSource | None = None

    @property
    def kind(self) -> str:
        return f"INT{self.bits}"

    def read_blocks(self) -> Blocks | None:
        """The same values as a CPU's kernels read them (see `BlockSource`); None if they cannot."""
        if self.bits != 4 or self.block[1] % _CPU_BLOCK:
            return None
        codes = self.read_codes()
        scale = codes.scale.astype(np.float32)
        # A float32 scale with all its bits would not give exact products.
        if codes.group is not None or codes.zero is None or (scale.view(np.uint32) & 0xFFF).any():
            return None
        times = self.block[1] // _CPU_BLOCK
        scale, offset = (np.repeat(each, times, axis=1) for each in (scale, -scale * codes.zero))
        return Blocks(codes.values, scale, offset)

    @property
    def groups(self) -> int:
        """The groups of inputs of an output."""
        return -(-self.shape[1] // self.block[1])

    def _codes(self, values: np.ndarray, scale: np.ndarray, zero: np.ndarray | None) -> Codes:
        """Codes from arrays [out, in] and [out, groups]."""
        if zero is None:
            zero = np.full(scale.shape, 1 << self.bits - 1, np.uint8)
        return Codes(values, scale, self.block, zero, self._read_group())

    def _read_group(self) -> np.ndarray | None:
        """The group of every input; None if groups are adjacent inputs."""
        if self.group is None:
            return None
        group = self.group.read()
        if group.min() < 0 or group.max() >= self.groups:
            raise CheckpointError(
                f"the groups of {self.name!r} are {group.min()} to {group.max()}, and it has {self.groups}"
            )
        return None if np.array_equal(group, np.arange(len(group)) // self.block[1]) else group


class AwqTensor(PackedTensor):
    """Words i32[in, out / 8], scales [groups, out], and words of zero points i32[groups, out / 8].

    Groups are adjacent inputs; some tools write so beside them.
    """

    def read_codes(self) -> Codes:
        assert self.zero is not None
        if self._read_group() is not None:
            raise CheckpointError(f"the groups of {self.name!r} are not adjacent inputs, as AWQ has them")
        values, zero = (self._outputs(words.read()).T for words in (self.words, self.zero))
        return self._codes(np.ascontiguousarray(values), self.scale.read().T, zero)

    def _outputs(self, words: np.ndarray) -> np.ndarray:
        eights = unpack(words, self.bits, self.shape[0]).reshape(len(words), -1, 8)
        return eights[:, :, _AWQ_ORDER].reshape(len(words), -1)


@dataclass(frozen=True)
class GptqTensor(PackedTensor):
    """Words i32[in / n, out], scales [groups, out], and words of zero points i32[groups, out / n].

    Attributes:
      zero_offset: what is added to stored zero points: 1 in the first version of the format.
    """

    zero_offset: int = 1

    def read_codes(self) -> Codes:
        assert self.zero is not None
        outputs, inputs = self.shape
        zero = unpack(self.zero.read(), self.bits, outputs) + np.uint8(self.zero_offset)
        zero &= np.uint8((1 << self.bits) - 1)
        return self._codes(unpack(self.words.read().T, self.bits, inputs), self.scale.read().T, zero.T)


class CompressedTensor(PackedTensor):
    """Words i32[out, in / n], scales [out, groups], and words of zero points i32[out / n, groups].

    Older files have zero points i8[out, groups], less half of the range. A group of -1 says that all groups
    are adjacent inputs, whatever the others say.
    """

    def _read_group(self) -> np.ndarray | None:
        is_unset = self.group is not None and (self.group.read() == -1).any()
        return None if is_unset else super()._read_group()

    def read_codes(self) -> Codes:
        outputs, inputs = self.shape
        zero = None if self.zero is None else self._zeros(self.zero.read())
        scale = self.scale.read().reshape(outputs, self.groups)
        return self._codes(unpack(self.words.read(), self.bits, inputs), scale, zero)

    def _zeros(self, stored: np.ndarray) -> np.ndarray:
        if stored.dtype == np.int8:
            return stored.view(np.uint8) + np.uint8(1 << self.bits - 1)
        return unpack(stored.T, self.bits, self.shape[0]).T


def unpack(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """u8[rows, count] from words i32[rows, n], whose first integer is in the lowest bits."""
    integers = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 4:
        integers = np.stack([integers & 15, integers >> 4], axis=-1).reshape(len(words), -1)
    return integers[:, :count]


@dataclass(frozen=True)
class Parts:
    """Takes the tensors of one matrix out of a checkpoint's, and checks them.

    Attributes:
      tensors: what is left of the checkpoint's tensors.
      stem: the name that the matrix's tensors begin with.
      suffix: of the tensor of words.
      name: the checkpoint, for messages.
    """

    tensors: dict[str, TensorSource]
    stem: str
    suffix: str
    name: str

    def find(self, leaf: str) -> TensorSource | None:
        """The tensor `{stem}{leaf}`; None if there is none."""
        return self.tensors.pop(f"{self.stem}{leaf}", None)

    def take(self, leaf: str) -> TensorSource:
        """The tensor `{stem}{leaf}`, which has to be there."""
        tensor = self.find(leaf)
        if tensor is None:
            raise CheckpointError(
                f"{self.name}: tensor '{self.stem}{leaf}' is missing; '{self.stem}{self.suffix}' needs it"
            )
        return tensor

    def check(self, leaf: str, tensor: TensorSource | None, kinds: str, *shapes: Sequence[int]) -> None:
        """Checks a tensor's shape and kind of dtype, "i" for 32-bit words or "f" for floats."""
        if tensor is None:
            return
        is_float = tensor.dtype.kind not in "biu"
        if is_float != (kinds == "f") or (not is_float and tensor.dtype != np.int32):
            expected = "floats" if kinds == "f" else "int32"
            raise CheckpointError(f"{self.name}: '{self.stem}{leaf}' is {tensor.dtype}, expected {expected}")
        if tensor.shape not in map(tuple, shapes):
            raise CheckpointError(
                f"{self.name}: '{self.stem}{leaf}' has shape {list(tensor.shape)}, expected "
                f"{list(shapes[0])} beside '{self.stem}{self.suffix}'"
            )


def awq_tensors(
    tensors: Mapping[str, TensorSource], bits: int, group: int, name: str
) -> dict[str, TensorSource]:
    """Replaces the tensors `qweight`, `scales` and `qzeros` of every matrix by `weight`.

    Args:
      tensors: all tensors of a checkpoint, by name.
      bits: of an integer.
      group: inputs that share a scale; -1 for all.
      name: the checkpoint, for messages.

    Raises:
      CheckpointError: a tensor is missing, or of another shape or dtype.
    """
    dequantized = dict(tensors)
    each = 32 // bits
    for key in _matrices(tensors, ".qweight", name):
        part = Parts(dequantized, key.removesuffix(".qweight"), ".qweight", name)
        words, scale, zero = (part.take(leaf) for leaf in (".qweight", ".scales", ".qzeros"))
        order = part.find(".g_idx")
        inputs, outputs = words.shape[0], words.shape[1] * each
        size, groups = _groups(inputs, group, key, name)
        part.check(".qweight", words, "i", words.shape)
        part.check(".scales", scale, "f", (groups, outputs))
        part.check(".qzeros", zero, "i", (groups, words.shape[1]))
        part.check(".g_idx", order, "i", (inputs,))
        dequantized[f"{part.stem}.weight"] = AwqTensor(
            (outputs, inputs), (1, size), key, bits, words, scale, zero, order
        )
    return dequantized


def gptq_tensors(
    tensors: Mapping[str, TensorSource], bits: int, group: int, zero_offset: int, name: str
) -> dict[str, TensorSource]:
    """Replaces the tensors `qweight`, `scales`, `qzeros` and `g_idx` of every matrix by `weight`.

    Args:
      zero_offset: see `GptqTensor`.
      tensors, bits, group, name: see `awq_tensors`.

    Raises:
      CheckpointError: a tensor is missing, or of another shape or dtype.
    """
    dequantized = dict(tensors)
    each = 32 // bits
    for key in _matrices(tensors, ".qweight", name):
        part = Parts(dequantized, key.removesuffix(".qweight"), ".qweight", name)
        words, scale, zero = (part.take(leaf) for leaf in (".qweight", ".scales", ".qzeros"))
        order = part.find(".g_idx")
        inputs, outputs = words.shape[0] * each, words.shape[1]
        size, groups = _groups(inputs, group, key, name)
        part.check(".qweight", words, "i", words.shape)
        part.check(".scales", scale, "f", (groups, outputs))
        part.check(".qzeros", zero, "i", (groups, -(-outputs // each)))
        part.check(".g_idx", order, "i", (inputs,))
        dequantized[f"{part.stem}.weight"] = GptqTensor(
            (outputs, inputs), (1, size), key, bits, words, scale, zero, order, zero_offset
        )
    return dequantized


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint of compressed-tensors packs some of its matrices.

    Attributes:
      bits: of an integer.
      group: inputs that share a scale; -1 for all.
      symmetric: whether there are no zero points.
    """

    bits: int
    group: int
    symmetric: bool


def compressed_tensors(
    tensors: Mapping[str, TensorSource], schemes: Sequence[Scheme], name: str
) -> dict[str, TensorSource]:
    """Replaces the tensors `weight_packed`, `weight_scale`, … of every matrix by `weight`.

    A matrix's scheme is found by the shapes of its tensors.

    Args:
      tensors, name: see `awq_tensors`.
      schemes: those that the config states.

    Raises:
      CheckpointError: a tensor is missing, or of another shape or dtype.
    """
    dequantized = dict(tensors)
    for key in _matrices(tensors, ".weight_packed", name):
        part = Parts(dequantized, key.removesuffix(".weight_packed"), ".weight_packed", name)
        words, scale, stated = (part.take(f".weight_{leaf}") for leaf in ("packed", "scale", "shape"))
        zero, order = (part.find(f".weight_{leaf}") for leaf in ("zero_point", "g_idx"))
        if stated.shape != (2,) or stated.dtype.kind != "i":
            raise CheckpointError(
                f"{name}: '{part.stem}.weight_shape' is {stated.dtype} of shape {list(stated.shape)}, "
                "expected two integers"
            )
        outputs, inputs = map(int, stated.read())
        fitting = [s for s in schemes if words.shape == (outputs, -(-inputs * s.bits // 32))]
        if not fitting or min(outputs, inputs) < 1:
            raise CheckpointError(
                f"{name}: {key!r} has shape {list(words.shape)}, which does not hold [{outputs}, {inputs}] "
                f"integers of {' or '.join(sorted({str(s.bits) for s in schemes})) or 'no'} bits"
            )
        shapes = [(outputs, _groups(inputs, s.group, key, name)[1]) for s in fitting]
        scheme = next(
            (s for s, shape in zip(fitting, shapes, strict=True) if scale.shape == shape), fitting[0]
        )
        size, groups = _groups(inputs, scheme.group, key, name)
        part.check(".weight_packed", words, "i", words.shape)
        part.check(".weight_scale", scale, "f", (outputs, groups), *([(outputs,)] if groups == 1 else []))
        if zero is None and not any(s.symmetric for s in fitting):
            part.take(".weight_zero_point")
        if zero is None or zero.dtype != np.int8 or zero.shape != (outputs, groups):
            part.check(".weight_zero_point", zero, "i", (-(-outputs * scheme.bits // 32), groups))
        part.check(".weight_g_idx", order, "i", (inputs,))
        dequantized[f"{part.stem}.weight"] = CompressedTensor(
            (outputs, inputs), (1, size), key, scheme.bits, words, scale, zero, order
        )
    return dequantized


def _matrices(tensors: Mapping[str, TensorSource], suffix: str, name: str) -> list[str]:
    """The names of the tensors of words."""
    found = [key for key in tensors if key.endswith(suffix)]
    for key in found:
        shape = tensors[key].shape
        if len(shape) != 2 or 0 in shape:
            raise CheckpointError(f"{name}: {key!r} has shape {list(shape)}, expected a matrix of words")
        if f"{key.removesuffix(suffix)}.weight" in tensors:
            raise CheckpointError(f"{name}: '{key.removesuffix(suffix)}.weight' stands beside {key!r}")
    return found


def _groups(inputs: int, group: int, key: str, name: str) -> tuple[int, int]:
    """The inputs of a group, and the number of groups."""
    size = inputs if group == -1 else group
    if inputs % size:
        raise CheckpointError(f"{name}: {key!r} has {inputs} inputs, which groups of {size} do not divide")
    return size, inputs // size
