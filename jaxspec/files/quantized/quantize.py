"""Rounds the matrices of a checkpoint to FP8 or INT4, in the format of compressed-tensors.

Source: compressed-tensors 0.20, `quantization/lifecycle/forward_helpers.py` and `compressors/pack_quantized`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.files.checkpoint import TensorSource
from jaxspec.files.errors import CheckpointError
from jaxspec.files.quantized.codes import Codes, QuantizedTensor

FORMATS = ("fp8", "int4")
"""FP8 with a scale for every output, and integers of four bits with one for every output and 128 inputs."""

_GROUP = 128
_FP8, _LARGEST_FP8 = np.dtype(ml_dtypes.float8_e4m3fn), 448.0
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)
"""The scales that are tried, as shares of the one that holds the largest weight."""
_ROWS = 256


def form_of(dtype: str) -> str:
    """The one of `FORMATS` that an option names as "float8_e4m3fn" or "int4"."""
    return {"float8_e4m3fn": "fp8"}.get(dtype, dtype)


def is_rounded(name: str, tensor: TensorSource, form: str) -> bool:
    """Whether a tensor is a matrix that is rounded: of a layer, and not its router."""
    if not (".layers." in name and name.endswith("_proj.weight") and len(tensor.shape) == 2):
        return False
    return form == "fp8" or tensor.shape[1] % _GROUP == 0


def rounded(name: str, matrix: np.ndarray, form: str) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a rounded matrix [out, in], by name.

    Raises:
      CheckpointError: the matrix holds NaN or infinity.
    """
    stem = name.removesuffix(".weight")
    codes, scale = _round_parts(name, matrix, form)
    if form == "fp8":
        yield name, codes
        yield f"{stem}.weight_scale", scale
        return
    nibbles = (codes + np.int8(8)).view(np.uint8)
    yield f"{stem}.weight_packed", (nibbles[:, ::2] | nibbles[:, 1::2] << 4).view("<i4")
    yield f"{stem}.weight_scale", scale
    yield f"{stem}.weight_shape", np.array(matrix.shape, np.int64)


@dataclass(frozen=True, eq=False)
class RoundedTensor(QuantizedTensor):
    """A matrix [out, in] that is rounded when it is read.

    Attributes:
      name: the tensor's, for messages.
      tensor: the matrix.
      format: one of `FORMATS`.
    """

    name: str
    tensor: TensorSource
    format: str

    @property
    def kind(self) -> str:
        return self.format.upper()

    def read_codes(self) -> Codes:
        codes, scale = _round_parts(self.name, self.tensor.read(), self.format)
        if self.format == "fp8":
            return Codes(codes, scale, self.block)
        return Codes(
            (codes + np.int8(8)).view(np.uint8), scale, self.block, np.full(scale.shape, 8, np.uint8)
        )


def round_matrices(tensors: Mapping[str, TensorSource], form: str) -> dict[str, TensorSource]:
    """The tensors of a head with its projections and output rows rounded when they are read."""

    def each(name: str, tensor: TensorSource) -> TensorSource:
        is_matrix = len(tensor.shape) == 2 and name.endswith(("_proj.weight", "fc.weight", "lm_head.weight"))
        if (
            not is_matrix
            or isinstance(tensor, QuantizedTensor)
            or (form == "int4" and tensor.shape[1] % _GROUP)
        ):
            return tensor
        outputs, inputs = tensor.shape
        return RoundedTensor((outputs, inputs), (1, _GROUP if form == "int4" else inputs), name, tensor, form)

    return {name: each(name, tensor) for name, tensor in tensors.items()}


def round_output_rows(tensors: Mapping[str, TensorSource], form: str) -> dict[str, TensorSource]:
    """The tensors of a model with its output rows rounded when they are read; its embedding stays as it is.

    Args:
      tensors: by their names in a checkpoint of the language model.
      form: one of `FORMATS`.

    Raises:
      CheckpointError: the rows' width does not divide into groups.
    """
    rows = tensors.get("lm_head.weight") or tensors["model.embed_tokens.weight"]
    if form == "int4" and rows.shape[1] % _GROUP:
        raise CheckpointError(
            f"output rows of {rows.shape[1]} inputs cannot be rounded in groups of {_GROUP}"
        )
    return {**tensors, **round_matrices({"lm_head.weight": rows}, form)}


def _round_parts(name: str, matrix: np.ndarray, form: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes of float8_e4m3fn, or i8 from -8 to 7, [out, in], and scales bf16[out, groups].

    Raises:
      CheckpointError: the matrix holds NaN or infinity.
    """
    if not np.isfinite(matrix).all():
        raise CheckpointError(f"tensor {name!r} holds NaN or infinity")
    group = _GROUP if form == "int4" else matrix.shape[1]
    largest, to_codes = (7.0, _to_int4) if form == "int4" else (_LARGEST_FP8, _to_fp8)
    parts = (matrix[start : start + _ROWS] for start in range(0, len(matrix), _ROWS))
    codes, scales = zip(*(_round(part, group, largest, to_codes) for part in parts), strict=True)
    return np.concatenate(codes), np.concatenate(scales)


def _round(matrix: np.ndarray, group: int, largest: float, to_codes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Codes [out, in] and scales bf16[out, in / group] with the least sum of squared errors."""
    groups = matrix.astype(np.float32).reshape(len(matrix), -1, group)
    full = np.abs(groups).max(axis=-1) / largest
    best_error = np.full(full.shape, np.inf, np.float32)
    best_scale = np.zeros(full.shape, ml_dtypes.bfloat16)
    best: Any = None
    for share in _SHARES:
        scale = (full * np.float32(share)).astype(ml_dtypes.bfloat16)
        wide = np.where(scale, scale, 1).astype(np.float32)[..., None]
        codes = to_codes(groups / wide)
        error = np.square(codes.astype(np.float32) * wide - groups).sum(axis=-1)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, wide[..., 0].astype(ml_dtypes.bfloat16), best_scale)
        best = codes if best is None else np.where(better[..., None], codes, best)
    return best.reshape(matrix.shape), best_scale


def _to_fp8(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -_LARGEST_FP8, _LARGEST_FP8).astype(_FP8)


def _to_int4(values: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(values), -8, 7).astype(np.int8)


def quantization_config(tensors: Mapping[str, TensorSource], form: str) -> dict[str, Any]:
    """The `quantization_config` of the rounded checkpoint."""
    matrices = [
        name for name, tensor in tensors.items() if name.endswith(".weight") and len(tensor.shape) == 2
    ]
    ignored = [name.removesuffix(".weight") for name in matrices if not is_rounded(name, tensors[name], form)]
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel"}
    if form == "int4":
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP}
    weights |= {"symmetric": True, "dynamic": False}
    stored = "float-quantized" if form == "fp8" else "pack-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": stored}},
        "ignore": sorted({*ignored, "lm_head"}),
        "kv_cache_scheme": None,
    }
