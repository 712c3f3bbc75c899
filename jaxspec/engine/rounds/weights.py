"""New weights for an engine that runs: found and checked by a client, put in place by the engine's thread."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from jaxspec.drafters.base import Drafter
from jaxspec.files import Checkpoint, CheckpointError
from jaxspec.models.decoder import Decoder
from jaxspec.models.target import plan_target_update
from jaxspec.weights.array_weights import (
    Batch,
    Parameters,
    are_gone,
    array_of,
    batches,
    finite_check,
    flatten,
    variables,
)
from jaxspec.weights.loading import plan_update
from jaxspec.weights.memory import Names, array_tensors

InFlight = Literal["finish", "abort"]


@dataclass(frozen=True, eq=False)
class WeightUpdate:
    """New weights, checked.

    Attributes:
      batches: the target's parameters, then the drafter's, in the order of writing.
      in_flight: what becomes of requests that have begun.
      done: gets the new version, or the error.
    """

    batches: list[Batch]
    in_flight: InFlight
    done: Future[int] = field(default_factory=Future)


def plan_weight_update(
    target: Decoder,
    drafter: Drafter,
    weights: Any,
    drafter_weights: Any,
    *,
    in_flight: InFlight,
    names: Names | None,
) -> WeightUpdate:
    """Finds and checks new weights; changes nothing. Arguments and errors as of `Engine.update_weights`."""
    if in_flight not in ("finish", "abort"):
        raise ValueError(f"in_flight must be 'finish' or 'abort', got {in_flight!r}")
    if weights is None and drafter_weights is None:
        raise ValueError("update_weights: there are no weights, neither of the target nor of the drafter")
    of_target: Parameters = []
    of_drafter: Parameters = []
    if weights is not None:
        check_dense(target, "target")
        weights = flatten(weights)
        of_target = plan_target_update(target, weights, names)
        if drafter_weights is None:
            of_drafter = follow(target, drafter, weights, names)
    if drafter_weights is not None:
        if not variables(drafter):
            raise ValueError("update_weights: the drafter has no weights")
        of_drafter = _plan(target, drafter, drafter_weights, names)
    check = finite_check([*of_target, *of_drafter])
    update = WeightUpdate(batches(of_target) + batches(of_drafter), in_flight)
    check()
    return update


def follow(target: Decoder, drafter: Drafter, weights: Any, names: Names | None) -> Parameters:
    """The drafter's parameters that change with the target's: copies, and a layer of the same checkpoint.

    Raises:
      CheckpointError: the layer's tensors are not what the drafter needs, or the drafter's copy is packed.
    """
    arrays = flatten(weights)
    if drafter.weights_from == "target" and not (names is None and variables(target).keys() & arrays.keys()):
        given = Checkpoint("weights", {}, array_tensors(arrays, names, "weights"))
        if drafter.update_tensors(given, target).tensors:
            return _plan(target, drafter, weights, names)
    copies = _copies(target, drafter)
    if copies:
        check_dense(drafter, "drafter")
    return copies


def _copies(target: Decoder, drafter: Drafter) -> Parameters:
    """The drafter's parameters that are copies of the target's weights."""
    copies = drafter.copies(target)
    named = [(variable, variable.get_metadata("source").tensors) for variable in variables(drafter).values()]
    return [
        (variable, [copies[name] for name, _ in tensors])
        for variable, tensors in named
        if all(name in copies for name, _ in tensors)
    ]


def _plan(target: Decoder, drafter: Drafter, weights: Any, names: Names | None) -> Parameters:
    check_dense(drafter, "drafter")

    def prepare(checkpoint: Checkpoint) -> Checkpoint:
        return drafter.update_tensors(checkpoint, target)

    found = plan_update(drafter, weights, names, prepare=prepare, ignore=drafter.ignored)
    if not any(are_gone(stored) for _, stored in found):
        return found
    # A copy that has followed the target since the caller took it follows on.
    copies = {id(variable): stored for variable, stored in _copies(target, drafter)}
    return [
        (variable, copies.get(id(variable), stored) if are_gone(stored) else stored)
        for variable, stored in found
    ]


def check_dense(module: Any, what: str) -> None:
    """Checks that every parameter is an array.

    Raises:
      CheckpointError: one is packed.
    """
    for path, variable in variables(module).items():
        if not isinstance(array_of(variable), jax.Array):
            raise CheckpointError(
                f"weights: the {what}'s {path!r} is packed as in its checkpoint and cannot be replaced by "
                f"an array; load the engine with engine.packed = false"
            )
