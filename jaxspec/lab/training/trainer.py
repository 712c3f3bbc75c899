"""The compiled programs of training: one update, and one validation batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxspec.config import ConfigError
from jaxspec.drafters.kinds.eagle3 import Eagle3
from jaxspec.engine.device.compiling import Result, interruptible
from jaxspec.installation import needs
from jaxspec.jax_settings import Device, own_settings, training_devices
from jaxspec.lab.training.config import TrainConfig
from jaxspec.lab.training.head import cast, is_trained
from jaxspec.lab.training.loss import StepSums, unrolled_loss
from jaxspec.lab.training.operations import operations_per_token
from jaxspec.lab.training.optimizer import learning_rate_schedule, make_optimizer
from jaxspec.lab.training.packed_rows import PackedRows
from jaxspec.models.decoder import Decoder
from jaxspec.sharding import on_shards, placed, psum, replicated

with needs("train"):
    import optax

_AXIS = "data"
"""The mesh axis over which rows are split."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of training.

    Attributes:
      step: i32[], number of updates done.
      params: the head's trained parameters, in float32.
      opt_state: the optimiser's state.
    """

    step: jax.Array
    params: Any
    opt_state: Any


class Trainer:
    """Trains a head on several devices, with rows split over them and weights copied to each.

    Computes in the target's dtype; trained parameters and the optimiser's state are float32.
    """

    def __init__(
        self,
        head: Eagle3,
        target: Decoder,
        config: TrainConfig,
        device: Device | None = None,
    ):
        """Builds the programs; they compile when they are first called.

        Args:
          head, target: the head to train and its target.
          config: resolved sizes, without zeros.
          device: the device or devices to train on; see `training_devices`.

        Raises:
          ConfigError: the batch size is not a multiple of the number of devices.
        """
        devices = training_devices(device)
        if config.batch_size % len(devices):
            raise ConfigError(
                f"train.batch_size must be a multiple of the {len(devices)} devices, got {config.batch_size}"
            )
        self.devices = devices
        self._settings = partial(own_settings, devices[0])
        self._have_run: set[int] = set()
        with self._settings():
            self._build(head, target, config)

    def _build(self, head: Eagle3, target: Decoder, config: TrainConfig) -> None:
        mesh = Mesh(np.asarray(self.devices), (_AXIS,))
        self._split, self._copied = placed(mesh, PartitionSpec(_AXIS)), replicated(mesh)
        self.config = config
        self.operations_per_token = operations_per_token(
            target,
            head,
            row_length=config.row_length,
            num_unroll_steps=config.num_unroll_steps,
        )
        self.dtype = target.output_kernel.dtype
        target_graph, target_weights = nnx.split(target)
        graph, params, frozen = nnx.split(head, is_trained, ...)  # type: ignore[misc]
        self._head_graph: Any = graph
        self._initial_params: Any = params
        self.schedule = learning_rate_schedule(config)
        self.optimizer = make_optimizer(config, params)
        self._frozen = jax.device_put(
            {"target": target_weights, "head": cast(frozen, self.dtype)}, self._copied
        )
        static: dict[str, Any] = {
            "graphs": (self._head_graph, target_graph),
            "config": config,
            "dtype": self.dtype,
            "axis": _AXIS if mesh.size > 1 else None,
        }
        places = (self._copied, self._copied, self._split)
        update = partial(update_state, optimizer=self.optimizer, **static)
        self._update = jax.jit(on_shards(update, mesh, places, self._copied), donate_argnums=0)
        validate = on_shards(partial(_validate, **static), mesh, places, self._copied)
        self._validate = jax.jit(validate)

    def initial_state(self) -> TrainState:
        """The state before the first update."""
        with self._settings():
            params = jax.tree.map(lambda x: jnp.array(x, jnp.float32), self._initial_params)
            state = TrainState(jnp.int32(0), params, self.optimizer.init(jax.tree.leaves(params)))
            return jax.device_put(state, self._copied)

    def put(self, batch: dict) -> PackedRows:
        """Puts a loader's batch on the devices."""
        with self._settings():
            return PackedRows(**jax.device_put(batch, self._split))

    def update(self, state: TrainState, rows: PackedRows) -> tuple[TrainState, StepSums]:
        """One update; donates the state."""
        return self._run(self._update, state, self._frozen, rows)

    def validate(self, state: TrainState, rows: PackedRows) -> StepSums:
        """The sums of the loss on validation rows."""
        return self._run(self._validate, state.params, self._frozen, rows)

    def _run(self, program: Callable[..., Result], *arguments: Any) -> Result:
        """Runs a program; an interrupt does not wait for it to be compiled, the first time."""
        run = self._settings()(program)
        if id(program) in self._have_run:
            return run(*arguments)
        result = interruptible(run, *arguments)
        self._have_run.add(id(program))
        return result

    def averaged(self, state: TrainState, initial: nnx.State, weight: float) -> TrainState:
        """A state whose parameters are (1 - `weight`) times its own and `weight` times those of `initial`."""
        with self._settings():
            initial = jax.device_put(initial, self._copied)
            params = jax.tree.map(lambda a, b: (1 - weight) * a + weight * b, state.params, initial)
        return replace(state, params=params)

    def head(self, state: TrainState) -> Eagle3:
        """The head for an engine, in the compute dtype."""
        with self._settings():
            return self._merged(cast(state.params, self.dtype))

    def masters(self, state: TrainState) -> Eagle3:
        """The head with its float32 parameters, for export."""
        with self._settings():
            return self._merged(state.params)

    def _merged(self, params: Any) -> Eagle3:
        return nnx.merge(self._head_graph, *jax.device_put((params, self._frozen["head"]), self.devices[0]))


def _loss(
    params: Any,
    frozen: dict,
    rows: PackedRows,
    step: jax.Array,
    *,
    graphs: tuple,
    config: TrainConfig,
    dtype: jnp.dtype,
    axis: str | None,
) -> tuple[jax.Array, StepSums]:
    head_graph, target_graph = graphs
    head = nnx.merge(head_graph, cast(params, dtype), frozen["head"])
    target = nnx.merge(target_graph, frozen["target"])
    # Falls from 1 at the start to 0 halfway, if there is an end.
    cross_entropy_weight = jnp.maximum(0, 1 - 2 * step / config.steps) if config.steps else 0.0
    return unrolled_loss(
        head,
        target,
        rows,
        num_steps=config.num_unroll_steps,
        step_decay=config.step_decay,
        objective=config.objective,
        cross_entropy_weight=cross_entropy_weight,
        axis=axis,
    )


def update_state(
    state: TrainState,
    frozen: dict,
    rows: PackedRows,
    *,
    optimizer: optax.GradientTransformation,
    axis: str | None,
    **static: Any,
) -> tuple[TrainState, StepSums]:
    """One update.

    Args:
      state: before it.
      frozen: the weights that stay: all of the "target", and the other variables of the "head".
      rows: the batch, or this device's part of it.
      optimizer: of the leaves of `state.params`.
      axis: the mesh axis over which the batch is split, if it is.
      static: "graphs", the definitions of head and target, "config" and "dtype", of the computation.
    """
    loss = partial(_loss, axis=axis, **static)
    found = jax.grad(loss, has_aux=True)(state.params, frozen, rows, state.step)
    grads, sums = jax.tree.map(lambda part: psum(part, axis), found)
    params, structure = jax.tree.flatten(state.params)
    updates, opt_state = optimizer.update(jax.tree.leaves(grads), state.opt_state, params)
    params = jax.tree.unflatten(structure, optax.apply_updates(params, updates))
    return TrainState(state.step + 1, params, opt_state), sums


def _validate(params: Any, frozen: dict, rows: PackedRows, *, axis: str | None, **static: Any) -> StepSums:
    _, sums = _loss(params, frozen, rows, jnp.int32(0), axis=axis, **static)
    return jax.tree.map(lambda part: psum(part, axis), sums)
