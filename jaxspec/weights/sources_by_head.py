"""How checkpoints store the weights of recurrent layers, which are used by head.

A tensor has sections of rows, such as all queries, then all keys; each section has the rows of all heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxspec.config.delta import DeltaConfig
from jaxspec.weights.parameters import Index, array_functions


@dataclass(frozen=True)
class InputsByHead:
    """What a row is projected to, [M, H, F]: for each head its part of every section.

    Attributes:
      names: of the tensors.
      sections: for each tensor, its sections one after another: of each, the rows for one head.
      grouped: whether a tensor has all rows of a head together, and not all of a section.
      heads: H.
      width: M.
    """

    kind: ClassVar[str] = "float"
    names: tuple[str, ...]
    sections: tuple[tuple[int, ...], ...]
    grouped: bool
    heads: int
    width: int

    @classmethod
    def by_kind(cls, name: str, config: DeltaConfig, width: int) -> "InputsByHead":
        """Queries, keys and values in one tensor, all heads' queries first, and three tensors more."""
        key, group, values = config.key_size, config.group, config.group * config.value_size
        names = tuple(f"{name}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
        sections = ((key, key, values), (values,), (group,), (group,))
        return cls(names, sections, False, config.num_key_heads, width)

    @classmethod
    def by_head(cls, name: str, config: DeltaConfig, width: int) -> "InputsByHead":
        """Two tensors, each key head's rows together."""
        key, group, values = config.key_size, config.group, config.group * config.value_size
        names = tuple(f"{name}.in_proj_{part}.weight" for part in ("qkvz", "ba"))
        return cls(names, ((key, key, values, values), (group, group)), True, config.num_key_heads, width)

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple(
            (name, (self.heads * sum(sections), self.width))
            for name, sections in zip(self.names, self.sections, strict=True)
        )

    def join(self, tensors: Sequence[Any], index: Index = ()) -> Any:
        index = (*index, *(slice(None) for _ in range(3 - len(index))))
        along, heads, columns = index
        parts = [
            part.T.reshape(part.shape[1], self.heads, -1)[along, heads]
            for tensor, sections in zip(tensors, self.sections, strict=True)
            for part in self._parts(tensor, sections)
        ]
        return array_functions(tensors).concatenate(parts, axis=-1)[..., columns]

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        tensors, start = [], 0
        for sections in self.sections:
            parts = []
            for size in [sum(sections)] if self.grouped else sections:
                part = value[..., start : start + size]
                parts.append(part.reshape(self.width, -1).T)
                start += size
            tensors.append(np.ascontiguousarray(np.concatenate(parts)))
        return tensors

    def _parts(self, tensor: Any, sections: tuple[int, ...]) -> list[Any]:
        return [tensor] if self.grouped else _parts(tensor, self.heads, sections)


@dataclass(frozen=True)
class BiasByHead:
    """One number for each row of a tensor in `sections`, as [H, F]."""

    kind: ClassVar[str] = "float"
    name: str
    heads: int
    sections: tuple[int, ...]

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ((self.name, (self.heads * sum(self.sections),)),)

    def join(self, tensors: Sequence[Any], index: Index = ()) -> Any:
        parts = [part.reshape(self.heads, -1) for part in _parts(tensors[0], self.heads, self.sections)]
        return array_functions(tensors).concatenate(parts, axis=-1)[index]

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        parts = np.split(value, np.cumsum(self.sections)[:-1], axis=-1)
        return [np.concatenate([part.reshape(-1) for part in parts])]


@dataclass(frozen=True)
class ConvByHead:
    """The weights of a convolution over W rows, whose channels are in `sections`, as [H, W, channels]."""

    kind: ClassVar[str] = "float"
    name: str
    heads: int
    sections: tuple[int, ...]
    width: int

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ((self.name, (self.heads * sum(self.sections), 1, self.width)),)

    def join(self, tensors: Sequence[Any], index: Index = ()) -> Any:
        parts = [
            part.reshape(self.heads, -1, self.width).swapaxes(1, 2)
            for part in _parts(tensors[0], self.heads, self.sections)
        ]
        return array_functions(tensors).concatenate(parts, axis=-1)[index]

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        parts = np.split(value, np.cumsum(self.sections)[:-1], axis=-1)
        rows = [part.swapaxes(1, 2).reshape(-1, 1, self.width) for part in parts]
        return [np.ascontiguousarray(np.concatenate(rows))]


def _parts(tensor: Any, heads: int, sections: tuple[int, ...]) -> list[Any]:
    """A tensor's sections, of which each has so many rows for every head."""
    ends = np.cumsum([heads * size for size in sections])
    return [tensor[end - heads * size : end] for size, end in zip(sections, ends, strict=True)]
