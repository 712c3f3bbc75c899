"""How checkpoints store the weights of experts: one tensor per expert, or one for all experts of a layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxspec.weights.parameters import Fused, Index, Projection, Source, Whole, array_functions


@dataclass(frozen=True)
class ExpertSources:
    """Where a checkpoint stores the experts of a layer.

    Attributes:
      gate_up: source of the gate and up projections, [E, M, 2, F].
      down: source of the down projections, [E, F, M].
      gate_up_bias, down_bias: sources of the biases, [E, 2, F] and [E, M]; None for experts without them.
    """

    gate_up: Source
    down: Source
    gate_up_bias: Source | None = None
    down_bias: Source | None = None


@dataclass(frozen=True)
class Stacked:
    """One array [E, ...] of all experts' parameters, which the checkpoint stores in separate tensors."""

    kind: ClassVar[str] = "float"
    experts: tuple[Source, ...]

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple(tensor for expert in self.experts for tensor in expert.tensors)

    def join(self, tensors: Sequence[Any], index: Index = ()) -> Any:
        each = len(self.experts[0].tensors)
        chosen, rest = (index[0], index[1:]) if index else (slice(None), ())
        return array_functions(tensors).stack(
            [
                self.experts[i].join(tensors[i * each : (i + 1) * each], rest)
                for i in range(len(self.experts))[chosen]
            ]
        )

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        return [
            tensor for expert, part in zip(self.experts, value, strict=True) for tensor in expert.split(part)
        ]


class InterleavedGateUp(Whole):
    """Gate and up projections, [..., 2, F], stored in alternating columns of one tensor [..., 2F]."""

    def join(self, tensors: Sequence[Any], index: Index = ()) -> Any:
        return tensors[0].reshape(*tensors[0].shape[:-1], -1, 2).swapaxes(-1, -2)[index]

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        return [np.swapaxes(value, -1, -2).reshape(self.shape)]


@dataclass(frozen=True)
class ExpertMatrices:
    """Matrices of all experts in one tensor [E, out, in], used as [E, in, …out]."""

    kind: ClassVar[str] = "float"
    name: str
    count: int
    in_width: int
    out_shape: tuple[int, ...]

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return ((self.name, (self.count, math.prod(self.out_shape), self.in_width)),)

    def join(self, tensors: Sequence[Any], index: Index = ()) -> Any:
        stored = tensors[0].reshape(self.count, *self.out_shape, self.in_width)
        last = stored.ndim - 1
        return stored.transpose(0, last, *range(1, last))[index]

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        ((_, shape),) = self.tensors
        return [np.ascontiguousarray(np.moveaxis(value, 1, -1)).reshape(shape)]


def stacked_experts(name: str, count: int, width: int, inner: int) -> ExpertSources:
    """Experts that are stored as `{name}.gate_up_proj`, gate first, and `{name}.down_proj`; arguments as of
    `tensor_per_expert`."""
    return ExpertSources(
        gate_up=ExpertMatrices(f"{name}.gate_up_proj", count, width, (2, inner)),
        down=ExpertMatrices(f"{name}.down_proj", count, inner, (width,)),
    )


def tensor_per_expert(
    name: str,
    count: int,
    width: int,
    inner: int,
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> ExpertSources:
    """Experts [E, M, 2, F] and [E, F, M] that are stored as `{name}.{j}.{leaf}.weight`.

    Args:
      count: E.
      width: M.
      inner: F.
      leaves: the names of gate, up and down.
    """
    gate, up, down = leaves
    experts = [f"{name}.{i}" for i in range(count)]

    def gate_up(expert: str) -> Fused:
        names = (f"{expert}.{leaf}.weight" for leaf in (gate, up))
        return Fused(tuple(Projection(each, (width,), (1, inner)) for each in names), axis=-2)

    return ExpertSources(
        gate_up=Stacked(tuple(map(gate_up, experts))),
        down=Stacked(tuple(Projection(f"{expert}.{down}.weight", (inner,), (width,)) for expert in experts)),
    )
