"""Tensors of recurrent layers as the converter of llama.cpp changes them, changed back."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from jaxspec.files import TensorSource

if TYPE_CHECKING:
    from jaxspec.files.gguf.tensor import GGUFTensor


def log_decay(tensor: "GGUFTensor") -> TensorSource:
    """`A_log` [heads] of [heads] or [heads, 1] values of -exp(A_log)."""
    from jaxspec.files.gguf.tensor import JoinedTensor  # imports slowly

    tensor = without_last_axis(tensor)

    def log(rates: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):  # NaN and infinity are found where they are used
            return np.log(-rates)

    return JoinedTensor((tensor,), tensor.shape, log)


def without_last_axis(tensor: "GGUFTensor") -> "GGUFTensor":
    """Values [heads] of [heads, 1]; others are left as they are."""
    return _with_shape(tensor, tensor.shape[:1]) if tensor.shape[1:] == (1,) else tensor


def with_middle_axis(tensor: "GGUFTensor") -> "GGUFTensor":
    """Filters [channels, 1, W] of [channels, W]."""
    channels, *others = tensor.shape
    return _with_shape(tensor, (channels, 1, *others))


def flat(tensor: "GGUFTensor") -> "GGUFTensor":
    """All values, one after another."""
    return _with_shape(tensor, (int(np.prod(tensor.shape)),))


def _with_shape(tensor: "GGUFTensor", shape: tuple[int, ...]) -> "GGUFTensor":
    return replace(tensor, info=replace(tensor.info, shape=shape))
