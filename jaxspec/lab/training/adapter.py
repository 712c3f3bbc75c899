"""Keeping an engine's head up with its target: training it on the answers that the engine has just given.

A policy that reinforcement learning moves away from the model that its head was trained for is drafted for
worse and worse. Its rollouts are what the head is to learn, so a few updates on them after each of the
policy's keep acceptance where it was.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.config.errors import at_least, positive
from jaxspec.documents import plain_number
from jaxspec.drafters.autoregressive import AutoregressiveDrafter
from jaxspec.drafters.registry import DRAFTERS
from jaxspec.engine import Engine, Generation
from jaxspec.engine.api.samples import Samples
from jaxspec.engine.device.compilation_cache import compilation_cache
from jaxspec.engine.device.programs import Programs
from jaxspec.engine.rounds.weights import InFlight, check_dense
from jaxspec.installation import needs
from jaxspec.jax_settings import own_settings
from jaxspec.lab.training.config import TrainConfig
from jaxspec.lab.training.head import is_trained
from jaxspec.lab.training.loss import StepSums
from jaxspec.lab.training.optimizer import make_optimizer
from jaxspec.lab.training.packed_rows import PackedRows
from jaxspec.lab.training.packing import Conversations, PackedSource, pack
from jaxspec.lab.training.trainer import TrainState, update_state
from jaxspec.sharding import replicated
from jaxspec.weights.array_weights import variables

with needs("train"):
    import optax

_SHORTEST_ROW = 512


@dataclass(frozen=True)
class Adaptation:
    """What a call of `adapt` has done.

    Attributes:
      updates: how many updates of the head.
      tokens: how many tokens of answers it was trained on.
      overlap: for each draft step, how likely a draft is accepted at temperature 1 if those before it are:
        the mean over the answers, each before the update that it was used for.
      accuracy: the same at temperature 0.
      weights_version: of the engine since then.
    """

    updates: int
    tokens: int
    overlap: list[float]
    accuracy: list[float]
    weights_version: int


def adapt(
    engine: Engine,
    answers: Any,
    *,
    epochs: int = 1,
    learning_rate: float = 1e-3,
    batch_tokens: int | None = None,
    in_flight: InFlight = "finish",
) -> Adaptation:
    """Trains the engine's head on answers of its present weights, and puts the result in its place.

    Every call goes on where the last one ended: the head's weights in float32 and the optimiser's state
    (Muon) are kept for as long as the engine is, beside its own weights. Only the head changes, so answers
    stay what they are; its embedding and its output rows stay, too. Nothing is compiled but at the first call
    with answers of about this length: rows have a power of two of tokens and are filled with padding.

    Requests may run meanwhile; `Engine.update_weights` says what becomes of them at the end, and of updates
    by other threads meanwhile: they come one after another.

    Args:
      engine: an engine on one device, that drafts by a head which reads the target's hidden states and drafts
        token by token ("eagle3", "eagle1") or by multi-token prediction ("mtp").
      answers: what it has generated, in lists of any depth, as `Engine.generate` returns them, or what
        `Engine.sample` returns.
      epochs: how often each answer is used.
      learning_rate: of an update; the first ten of an engine use less.
      batch_tokens: the most tokens of an update, unless an answer is longer; by default 16,384, and 2,048
        on a CPU. Memory beside the weights is proportional to it.
      in_flight: as for `Engine.update_weights`.

    Raises:
      ValueError: the drafter cannot be trained, no answer has two tokens, an argument is wrong, or the
        loss is not finite; the head stays as it was, and the next call begins anew.
      CheckpointError: the drafter's weights are packed.
      EngineError: the engine is closed, or its device failed.
    """
    head = _head_of(engine)
    at_least("epochs", epochs, 1)
    positive("learning_rate", learning_rate)
    if batch_tokens is None:
        batch_tokens = 2048 if engine.core.device.platform == "cpu" else 16384
    at_least("batch_tokens", batch_tokens, 1)
    epochs, batch_tokens = plain_number(epochs), plain_number(batch_tokens)
    conversations = Conversations.of(_conversations(answers))
    if not len(conversations):
        raise ValueError("adapt: no answer has two tokens, so that there is nothing to draft")
    lengths = np.diff(conversations.start)
    longest = int(lengths.max())
    row_length = 1 << (max(longest, min(batch_tokens, _SHORTEST_ROW)) - 1).bit_length()
    config = TrainConfig(
        batch_size=max(batch_tokens // row_length, 1),
        row_length=row_length,
        optimizer="muon",
        learning_rate=learning_rate,
        warmup_steps=10,
        clip_norm=1.0,
        objective="total_variation",
        num_unroll_steps=engine.num_speculative_tokens,
    )
    with head.lock, own_settings(engine.core.device), compilation_cache(), head.undone_by_errors():
        sums = []
        for epoch in range(epochs):
            packed = PackedSource(conversations, pack(lengths, row_length, epoch), row_length)
            sums += [head.update(engine, batch, config) for batch in packed.padded_batches(config.batch_size)]
        means = jax.tree.map(lambda *parts: np.sum(parts, axis=0), *jax.device_get(sums)).means()
        if not np.isfinite(means["loss"]).all():
            raise ValueError(
                f"adapt: the loss is not finite; learning_rate {learning_rate:g} may be too high"
            )
        version = head.put(engine, in_flight)
    return Adaptation(
        updates=len(sums),
        tokens=int((lengths - conversations.prompt_length).sum()),
        overlap=np.asarray(means["overlap"]).tolist(),
        accuracy=np.asarray(means["accuracy"]).tolist(),
        weights_version=version,
    )


class _TrainedHead:
    """The head of an engine, while it is trained; holds neither the engine nor its target's weights.

    Attributes:
      lock: held by the one who trains it.
      state: its weights in float32 and the optimiser's state; None before the first update.
      _in_place: the engine's arrays that the state's weights began as, or were put into.
    """

    def __init__(self, engine: Engine):
        self.lock = Lock()
        self.state: TrainState | None = None
        self._graphs = nnx.split(engine.drafter)[0], nnx.split(engine.target)[0]
        self._dtype = jnp.dtype(engine.config.dtype)
        # For the first state and for those that follow: from another place, the program would be another.
        self._place = replicated(engine.programs.mesh)
        self._programs: dict[TrainConfig, tuple[optax.GradientTransformation, Any]] = {}
        self._in_place: dict[str, jax.Array] = {}

    @contextmanager
    def undone_by_errors(self) -> Iterator[None]:
        """After an error, the next update begins with the engine's weights and a new optimiser."""
        try:
            yield
        except BaseException:
            self.state = None
            raise

    def update(self, engine: Engine, batch: dict[str, np.ndarray], config: TrainConfig) -> StepSums:
        """One update on the batch, with the engine's present weights."""
        rows = PackedRows(**jax.device_put(batch, engine.core.device))
        # An update of the engine's weights donates those that are read here.
        with engine.core.weights_lock:
            _, params, rest = nnx.split(engine.drafter, is_trained, ...)  # type: ignore[misc]
            optimizer, program = self._program(config, params)
            state = self._present(params, optimizer)
            frozen = {"target": nnx.state(engine.target), "head": rest}
            self.state, sums = jax.block_until_ready(program(state, frozen, rows))
        return sums

    def put(self, engine: Engine, in_flight: InFlight) -> int:
        """Puts the trained weights into the engine; returns the new version of its weights."""
        assert self.state is not None
        trained = _by_path(self.state.params)
        with engine.core.updating:  # otherwise another update could delete what is kept
            kept = {path: variable.get_value() for path, variable in variables(engine.drafter).items()}
            version = engine.update_weights(drafter=kept | trained, in_flight=in_flight)
        with engine.core.weights_lock:
            self._in_place = {path: variables(engine.drafter)[path].get_value() for path in trained}
        return version

    def _present(self, params: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
        """The state to go on from; its weights are the engine's if others than ours are in place there."""
        present = _by_path(params)
        if self.state is not None and all(self._in_place.get(path) is present[path] for path in present):
            return self.state
        self._in_place = present
        masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
        if self.state is not None:
            state = replace(self.state, params=masters)
        else:
            state = TrainState(jnp.int32(0), masters, optimizer.init(jax.tree.leaves(masters)))
        return jax.device_put(state, self._place)

    def _program(self, config: TrainConfig, params: nnx.State) -> tuple[optax.GradientTransformation, Any]:
        if config not in self._programs:
            optimizer = make_optimizer(config, params)
            update = partial(
                update_state,
                optimizer=optimizer,
                axis=None,
                graphs=self._graphs,
                config=config,
                dtype=self._dtype,
            )
            self._programs[config] = optimizer, jax.jit(update, donate_argnums=0, out_shardings=self._place)
        return self._programs[config]


_HEADS: WeakKeyDictionary[Programs, _TrainedHead] = WeakKeyDictionary()
"""The heads of all engines that were adapted and are open."""


def _head_of(engine: Engine) -> _TrainedHead:
    """The engine's head; the same one at every call.

    Raises:
      ValueError: it cannot be trained.
      CheckpointError: its weights are packed.
      EngineError: the engine is closed.
    """
    drafter, programs = engine.drafter, engine.programs
    if programs not in _HEADS:
        if not (isinstance(drafter, AutoregressiveDrafter) and drafter.is_trainable):
            kinds = [kind for kind, each in DRAFTERS.items() if getattr(each, "is_trainable", False)]
            raise ValueError(
                f"adapt: a drafter of class {type(drafter).__name__} cannot be trained; those of kind "
                f"{', '.join(sorted(kinds))} can"
            )
        devices = programs.mesh.size
        if devices > 1:
            raise ValueError(f"adapt: the engine's weights are split over {devices} devices; it needs one")
        check_dense(drafter, "drafter")
        engine.core.when_closed.append(partial(_HEADS.pop, programs, None))
        _HEADS.setdefault(programs, _TrainedHead(engine))  # another thread may come first
    return _HEADS[programs]


def _by_path(params: nnx.State) -> dict[str, jax.Array]:
    return {".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(params)}


def _conversations(answers: Any) -> Iterator[tuple[list[int], list[int]]]:
    """The ids of the prompts and of the answers, of those that have something to draft."""
    if isinstance(answers, Generation):
        if len(answers.token_ids) > 1:
            yield answers.prompt_token_ids, answers.token_ids
    elif isinstance(answers, Samples):
        yield from _conversations(answers.generations)
    elif isinstance(answers, Iterable) and not isinstance(answers, str):
        for each in answers:
            yield from _conversations(each)
    else:
        raise ValueError(f"adapt: expected answers of the engine, got {type(answers).__name__}")
