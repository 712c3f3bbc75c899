"""The compiled programs: a few when an engine is loaded, further sizes in the background."""

import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from jaxspec.attention import CacheShape
from jaxspec.config import ConfigError, ResolvedEngineConfig
from jaxspec.engine.device.compilation_cache import compilation_cache
from jaxspec.engine.device.compiling import Compiling, is_ending, start
from jaxspec.engine.device.lowering import Lowering, shapes
from jaxspec.engine.device.outcome import PackedOutcomes
from jaxspec.engine.device.plan import NO_GRAMMARS, Size
from jaxspec.engine.device.state import EngineState
from jaxspec.engine.device.step import Models
from jaxspec.jax_settings import own_settings, platform
from jaxspec.sampling import Constraints, SamplingMode
from jaxspec.sharding import replicated

Words = np.ndarray | jax.Array
"""A packed plan; NumPy's arrays reach the device within the call."""

_MAPPED = 0.5
"""The part of the memory mappings that a process may have from which on no more programs are compiled in the
background. The others are for programs without which a request could not be served."""

_log = logging.getLogger(__name__)


class Programs:
    """Programs by size, compiled ahead of time.

    They take the weights as a flat list of arrays, because flattening a tree of modules at each call would
    cost the host more than the dispatch.

    Attributes:
      leaves: the models' arrays; none after `close`.
      lowering: the models' static structure, and what makes programs of it.
      compiled: the programs by size; grows while the background threads compile.
      num_uncompiled: programs that the background threads have still to compile.
      when_compiled: called by a background thread when none are left.
    """

    def __init__(
        self,
        models: Models,
        config: ResolvedEngineConfig,
        *,
        state: EngineState,
        mesh: Mesh,
        slab: Callable[[], jax.Array] | None = None,
    ):
        """Reads only the shapes, dtypes and shardings of `state`.

        Args:
          slab: gives the slab of grammars, for programs that have them; None if there are none.
        """
        if config.exact:
            _check_has_exact_kernels(models, config)
        self.leaves = jax.tree.leaves(nnx.state(models))
        self.lowering = Lowering(models, config, state, mesh)
        self.config = config
        self.mesh, self._replicated = mesh, replicated(mesh)
        self._settings = partial(own_settings, mesh.devices.flat[0])
        self._no_slab = jax.device_put(NO_GRAMMARS, self._replicated)
        self._slab = slab or (lambda: self._no_slab)
        self._shape_without_slab = shapes(self._no_slab)
        self.compiled: dict[Size, Callable] = {}
        self._serving: dict[Size, list[Size]] = {}
        self._num_searched = 0
        if models.drafter.needs.history:
            self.compile_put_history()
        self._left: deque[Size] = deque()
        self._background: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._compiling: set[Size] = set()
        self._num_urgent = 0
        self._is_closed = False
        self.num_uncompiled = 0
        self._is_full = False
        self.when_compiled: Callable[[], object] = lambda: None

    def compile_put_history(self) -> None:
        """Compiles what `put_history` needs; compiled again, it is found in JAX's cache."""
        with self._settings():
            history = self.lowering.state.history
            tokens = jax.ShapeDtypeStruct(history.shape, history.dtype, sharding=self._replicated)
            put = jax.jit(_put_tokens, donate_argnums=0, out_shardings=self._replicated)
            self._put_history = put.lower(history, tokens).compile()

    def compile(self, sizes: Sequence[Size], *, progress: bool) -> None:
        """Compiles those of these that are not compiled yet, in parallel; returns when all are.

        Meanwhile the background threads begin with no other.
        """
        with self._urgently():
            mine = self._claim(sizes)
            try:
                with self._settings():
                    self._compile(mine, progress)
            finally:
                self._end(mine)
            # What the background threads were compiling already, and what failed there, for its error.
            with self._changed:
                self._changed.wait_for(lambda: self._compiling.isdisjoint(sizes))
            if failed := [size for size in sizes if size not in self.compiled]:
                self.compile(failed, progress=progress)

    @contextmanager
    def _urgently(self) -> Iterator[None]:
        """Keeps the background threads from beginning with another program: somebody waits for this one."""
        with self._changed:
            self._num_urgent += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_urgent -= 1
                self._changed.notify_all()

    def _claim(self, sizes: Sequence[Size]) -> list[Size]:
        """Those of these that nobody has compiled or is compiling; the caller must compile them and call
        `_end`."""
        with self._changed:
            mine = [size for size in sizes if size not in self.compiled and size not in self._compiling]
            self._compiling.update(mine)
        return mine

    def _end(self, mine: Sequence[Size]) -> None:
        with self._changed:
            self._compiling.difference_update(mine)
            self._changed.notify_all()

    def _compile(self, sizes: Sequence[Size], progress: bool) -> None:
        lowered = {size: self.lowering.lower(size, self._shape_of_grammars(size)) for size in sizes}
        hidden = not progress or sys.stderr is None  # it is closed
        with (
            ExitStack() as interruptible,
            tqdm(total=len(lowered), desc="compile", unit="program", disable=hidden, leave=False) as bar,
        ):
            every = {}
            for size, program in lowered.items():
                compile_it = partial(self._settings()(program.compile), self.lowering.options(size))
                every[size] = interruptible.enter_context(Compiling(compile_it))
            for size, compiling in every.items():
                self.compiled[size] = compiling.future.result()
                bar.update()

    def compile_in_background(self, sizes: Sequence[Size]) -> None:
        """Compiles these in background threads, in this order and after those that are still to be compiled,
        until this object is closed or garbage-collected, or the process ends. Those that are compiled by then
        are passed over."""
        with self._changed:
            if self._is_closed:
                return
            self.num_uncompiled += len(sizes)
            self._left.extend(sizes)
            # Each thread occupies a core, and serving needs some too.
            most = max((os.cpu_count() or 1) // 4, 1) - len(self._background)
            compile_rest = partial(self._settings()(_compile_in_background), weakref.ref(self))
            self._background += [start(compile_rest) for _ in range(min(len(sizes), most))]

    def wait_compiled(self) -> None:
        """Waits until the background threads have compiled everything."""
        for thread in list(self._background):
            thread.join()

    def replace_weights(self, replaced: Mapping[int, jax.Array], models: Models) -> None:
        """Takes other arrays of the same shapes, dtypes and shardings for all later dispatches.

        Args:
          replaced: the new array of every old one's `id`.
          models: the models, which hold the new ones.
        """
        is_known = replaced.keys() <= set(map(id, self.leaves))
        # Only somebody who changed the models from outside has put in others. Finding them takes longer.
        found = self.leaves if is_known else jax.tree.leaves(nnx.state(models))
        # In place, because the oracle, which runs the phases one by one, shares this list.
        self.leaves[:] = [replaced.get(id(leaf), leaf) for leaf in found]

    def close(self) -> None:
        """Lets go of the weights and leaves uncompiled what is; nothing can run any more."""
        with self._changed:
            self._is_closed = True
            num_left = len(self._left)
            self._left.clear()
        for _ in range(num_left):
            self.one_less()
        self.leaves.clear()
        self.__dict__.pop("_no_slab", None)

    def best(self, need: Size) -> Size | None:
        """The compiled size with the fewest rows that serves `need`; None if there is none."""
        return min(self.serving(need), key=self._cost, default=None)

    def by_drafts(self, need: Size) -> dict[int, Size]:
        """The cheapest size that serves `need` for each compiled K; the K of `need` is ignored."""
        sizes: dict[int, Size] = {}
        for size in self.serving(replace(need, width=1)):
            known = sizes.setdefault(size.drafts, size)
            if self._cost(size) < self._cost(known):
                sizes[size.drafts] = size
        return sizes

    def serving(self, need: Size) -> list[Size]:
        """The compiled sizes that serve `need`. They are searched once until another program is compiled,
        because every dispatch asks several times."""
        compiled = list(self.compiled)
        if len(compiled) != self._num_searched:
            self._serving, self._num_searched = {}, len(compiled)
        if need not in self._serving:
            self._serving[need] = [size for size in compiled if size.serves(need)]
        return self._serving[need]

    def _cost(self, size: Size) -> tuple[int, ...]:
        """Orders programs by their costs, as far as these are known without running them."""
        return self.lowering.rows(size), size.mode, size.constraints.bit_count(), size.logprobs, size.scores

    def enqueue(self, state: EngineState, words: Words, *, size: Size) -> tuple[EngineState, PackedOutcomes]:
        """Enqueues a program (see `run_steps` and `score_chunks`); donates the state. Its output is for
        `read_outcomes`.

        Args:
          words: i32[N] of `pack`.
        """
        return self.compiled[size](self.leaves, state, words, self.grammars(size), self.lowering.links)

    def grammars(self, size: Size) -> jax.Array:
        """The slab of grammars for a program; of size zero if it has none."""
        return self._slab() if size.constraints & Constraints.GRAMMAR else self._no_slab

    def put_history(self, state: EngineState, tokens: Words) -> EngineState:
        """Puts tokens i32[B, X] into the slots' histories, except where they are -1; donates the history.

        Only after `compile_put_history`.
        """
        return replace(state, history=self._put_history(state.history, tokens))

    def compiled_decode(self, *, mode: SamplingMode) -> Any:
        """The largest decode program of `mode`, for its HLO and its memory analysis."""
        of_mode = [size for size in self.compiled if size.width and size.mode == mode and not size.chunks]
        return self.compiled[max(of_mode, key=self.lowering.rows)]

    def one_less(self) -> None:
        """Counts one program less for the background threads to compile."""
        with self._changed:
            self.num_uncompiled -= 1
        if not self.num_uncompiled:
            self.when_compiled()

    def has_room(self) -> bool:
        """Whether more programs than are needed may be compiled; logs the first time that they may not.

        Linux allows a process 65,530 memory mappings by default. A program on a CPU takes some 300, and XLA
        ends the process that gets no more.
        """
        count, most = memory_mappings()
        if count < _MAPPED * most:
            return True
        if not self._is_full:
            self._is_full = True
            _log.warning(
                "no more programs are compiled in the background, so some requests take larger ones: "
                "the process has %d memory mappings of at most %d (sysctl vm.max_map_count)",
                count,
                most,
            )
        return False

    def next_left(self) -> Size | None:
        """The next program for a background thread, once nothing is urgent; None ends the thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_urgent)
            with suppress(IndexError):
                return self._left.popleft()
            self._background.remove(threading.current_thread())
            return None

    def begin(self, size: Size) -> Callable[[], Callable] | None:
        """What compiles a program without this object, and `end` is to follow; None if somebody else has or
        does, if there is no room, or after `close`, which takes away the slab."""
        if self._is_closed or not self._claim([size]):
            return None
        if not self.has_room():
            self._end([size])
            return None
        return partial(self.lowering.compile, size, self._shape_of_grammars(size))

    def end(self, size: Size, program: Callable | None) -> None:
        """Takes the program that was begun; None if it does not compile."""
        if program is not None:
            self.compiled[size] = program
        self._end([size])

    def _shape_of_grammars(self, size: Size) -> Any:
        has_slab = size.constraints & Constraints.GRAMMAR
        return shapes(self._slab()) if has_slab else self._shape_without_slab


def _check_has_exact_kernels(models: Models, config: ResolvedEngineConfig) -> None:
    """Raises ConfigError if the target's attention would depend on the number of rows."""
    target = models.target
    on_cpu = platform() == "cpu"
    if not all(isinstance(shape, CacheShape) and shape.planes == 2 for shape in target.cache_shapes) or (
        on_cpu and target.config.attention_sinks
    ):
        raise ConfigError(
            f"engine.exact is not supported for {target.config.family}: its attention has no kernel for it"
        )
    if on_cpu:
        from jaxspec_kernels.paged_attention.numba_kernel import MAX_ROWS  # imports slowly

        rows = {"drafts and one more": 1 + models.drafter.num_speculative_tokens}
        rows |= {"engine.prefill_chunk": config.prefill_chunk}
        for name, count in rows.items():
            if count > MAX_ROWS:
                raise ConfigError(f"engine.exact on a CPU allows {MAX_ROWS} rows, and {name} is {count}")


def _put_tokens(history: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.where(tokens < 0, history, tokens)


def memory_mappings() -> tuple[int, float]:
    """How many memory mappings this process has, and how many it may have; 0 and infinity except on Linux."""
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        return Path("/proc/self/maps").read_bytes().count(b"\n"), most
    except (OSError, ValueError):
        return 0, float("inf")


def _compile_in_background(programs: "weakref.ref[Programs]") -> None:
    while (alive := programs()) is not None and not is_ending() and (size := alive.next_left()) is not None:
        compile_it = program = None
        try:
            compile_it = alive.begin(size)
            del alive  # else several threads keep it for one another, once its engine is dropped
            if compile_it is not None:
                with compilation_cache():
                    program = compile_it()
        except Exception as error:
            # Larger programs serve the requests that this one would have served.
            if not is_ending():  # JAX clears its caches then, also those that a trace is using
                _log.warning("the program for %s does not compile: %s", size, error)
        if (alive := programs()) is not None:
            if compile_it is not None:
                alive.end(size, program)
            alive.one_less()
            del alive
