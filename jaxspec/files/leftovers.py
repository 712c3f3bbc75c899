"""Tensors of a quantized checkpoint that say nothing about its weights, which other loaders pass over too.

Sources: vLLM 0.33, `models/utils.py` (`AutoWeightsLoader`), `layers/quantization/base_config.py` and
`model_loader/weight_utils.py`; transformers 5.23, `quantizers`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxspec.files.checkpoint import TensorSource
from jaxspec.files.errors import CheckpointError

_OF_ACTIVATIONS = re.compile(
    r"""
    [._] (input|output|activation) _ (scale|scale_ub|zero_point) $
    | \. weight_scale_ub $
    | \. (q|k|v|kv|prob|prob_output) _ (scale|zero_point) $
    | \. [kv]_cache [._] scale $
    | \. [kv]_cache_scale $
    | \. self_attn \. q \. scale $
    | _quantizer \.  # the state of NVIDIA ModelOpt
    """,
    re.VERBOSE,
)
"""Names of tensors that say how activations and caches may be rounded. Here they are not."""
_SCALES = ("_scale_inv", ".weight_scale")
_OF_CODES = (
    *_SCALES,
    *(".weight_zero_point", ".weight_shape", ".weight_g_idx", ".scales", ".qzeros", ".g_idx"),
)
"""Suffixes of tensors that say what the codes of a matrix stand for."""
_CODES = (".weight_packed", ".qweight")
_LARGEST_CODE = 448.0
"""Of FP8, whose codes are the largest."""
_ROUNDING = 1.01


@dataclass(frozen=True)
class DenseTensor:
    """A dense matrix beside a scale of its own, which is not used.

    Attributes:
      key: its name, for messages.
      values: the matrix.
      scale: its scale, of any shape.
      name: the checkpoint, for messages.
    """

    key: str
    values: TensorSource
    scale: TensorSource
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    def read(self) -> np.ndarray:
        """The matrix.

        Raises:
          CheckpointError: it holds larger values than its scale allows, as codes do.
        """
        values, scale = self.values.read(), self.scale.read().astype(np.float32)
        largest = max(abs(float(values.max(initial=0))), abs(float(values.min(initial=0))))
        if largest > _LARGEST_CODE * _ROUNDING * np.abs(scale).max(initial=0):
            raise CheckpointError(
                f"{self.name}: {self.key!r} is {values.dtype} and reaches {largest:g}, which its scale does "
                "not allow: are these codes in another dtype?"
            )
        return values


def without_leftovers(tensors: Mapping[str, TensorSource], name: str) -> dict[str, TensorSource]:
    """The tensors without those about activations and caches, and without the scales of dense matrices.

    Args:
      tensors: all tensors of a quantized checkpoint, by name.
      name: the checkpoint, for messages.
    """
    kept = {key: tensor for key, tensor in tensors.items() if not _OF_ACTIVATIONS.search(key)}
    for key, tensor in tuple(kept.items()):
        suffix = next((s for s in _OF_CODES if key.endswith(s)), None)
        if suffix is None:
            continue
        stem = key.removesuffix(suffix)
        matrix = stem if suffix == "_scale_inv" else f"{stem}.weight"
        if matrix not in kept or not _is_dense(kept[matrix]) or any(f"{stem}{c}" in kept for c in _CODES):
            continue
        del kept[key]
        if suffix in _SCALES and tensor.dtype.kind not in "biu":
            kept[matrix] = DenseTensor(matrix, kept[matrix], tensor, name)
    return kept


_DENSE = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)


def _is_dense(tensor: TensorSource) -> bool:
    return tensor.dtype in map(np.dtype, _DENSE)
