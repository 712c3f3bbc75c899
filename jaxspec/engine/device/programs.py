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
from jaxspec_kernels.collectives import peer_links, through_peers
from jaxspec_kernels.op import exact
from tqdm import tqdm

from jaxspec.attention import CacheShape
from jaxspec.config import ConfigError, ResolvedEngineConfig
from jaxspec.engine.device.compilation_cache import compilation_cache
from jaxspec.engine.device.compiling import Compiling, is_ending, start
from jaxspec.engine.device.outcome import PackedOutcomes, pack_outcomes
from jaxspec.engine.device.plan import NO_GRAMMARS, Plan, Size, empty_plan
from jaxspec.engine.device.score import score_chunks
from jaxspec.engine.device.state import EngineState
from jaxspec.engine.device.step import Models, num_rows, run_steps
from jaxspec.jax_settings import own_settings, platform
from jaxspec.sampling import Constraints, SamplingMode
from jaxspec.sharding import bytes_by_device, on_shards, replicated, shardings

Words = np.ndarray | jax.Array
"""A packed plan; NumPy's arrays reach the device within the call."""

_MAPPED = 0.5
"""The part of the memory mappings that a process may have from which on no more programs are compiled in the
background. The others are for programs without which a request could not be served."""

_log = logging.getLogger(__name__)


def compiler_options(
    weights: Sequence[jax.Array],
    *,
    rows: int,
    decodes: bool = True,
    num_devices: int = 1,
    is_exact: bool = False,
) -> dict[str, str | bool | int]:
    """XLA's options for a program that runs `rows` rows through these weights.

    On a GPU, XLA chooses between its own kernels and cuBLAS's for every product by timing both on operands
    that are in the GPU's cache, which real weights never are. Llama-3-8B with 128 rows took 8.49 ms a step
    with XLA's choices and 7.93 ms with cuBLAS alone (H100). With few rows or small weights XLA's kernels are
    faster, because they fuse the operations around the product.

    Large prefill programs launch their kernels one by one: a CUDA graph would first have to be
    brought up to date with new addresses, which takes longer than launching its first kernels. The first
    token of 512 took Llama-3-8B 15.1 ms instead of 16.2, that of 4096 106.5 instead of 109.8 (H200).

    Sums over several devices that are too large for our kernel use NCCL: XLA's own kernel for them fails if
    NCCL is older than 2.29.2, and failed on two H100s.

    Without excess precision every operation rounds to its dtype, whatever it is fused with; exact programs
    need that.

    Options that the variable XLA_FLAGS names are left out, so that it takes precedence.
    """
    if platform() != "gpu":
        return {}
    options: dict[str, str | bool | int] = {}
    if rows >= 64 and sum(map(bytes_by_device, weights)) >= 1 << 31:
        options["xla_gpu_enable_triton_gemm"] = False
        if not decodes:
            options["xla_gpu_graph_min_graph_size"] = 1 << 20  # more kernels than any program has
    if is_exact:
        options["xla_allow_excess_precision"] = False
    if num_devices > 1:
        options["xla_gpu_unsupported_use_all_reduce_one_shot_kernel"] = False
        if jax.__version_info__ >= (0, 12):  # earlier versions of XLA reject it
            options["xla_gpu_experimental_use_collective_kernels"] = ""
    return {flag: value for flag, value in options.items() if flag not in os.environ.get("XLA_FLAGS", "")}


class Programs:
    """Programs by size, compiled ahead of time.

    They take the weights as a flat list of arrays, because flattening a tree of modules at each call would
    cost the host more than the dispatch.

    Attributes:
      graph, leaves, treedef: the models, split into static structure, arrays and the arrays' tree; without
        arrays after `close`.
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
        self.graph, parameters = nnx.split(models)
        self.leaves, self.treedef = jax.tree.flatten(parameters)
        self.config = config
        self.mesh, self._replicated = mesh, replicated(mesh)
        self._settings = partial(own_settings, mesh.devices.flat[0])
        self._links = peer_links(mesh)
        self._no_slab = jax.device_put(NO_GRAMMARS, self._replicated)
        self._slab = slab or (lambda: self._no_slab)
        # Threads that compile read these alone: the arrays are gone once it is closed.
        self._weights, self._state = _shapes(self.leaves), _shapes(state)
        self._shape_without_slab = _shapes(self._no_slab)
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
            history = self._state.history
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
        lowered = {size: self._lower(size) for size in sizes}
        hidden = not progress or sys.stderr is None  # it is closed
        with (
            ExitStack() as interruptible,
            tqdm(total=len(lowered), desc="compile", unit="program", disable=hidden, leave=False) as bar,
        ):
            every = {}
            for size, program in lowered.items():
                compile_it = partial(self._settings()(program.compile), self._compiler_options(size))
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

    @property
    def is_closed(self) -> bool:
        """Whether nothing can run any more."""
        return self._is_closed

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
        return self.rows(size), size.mode, size.constraints.bit_count(), size.logprobs, size.scores

    def rows(self, size: Size) -> int:
        """Rows of the target's forward pass in a step."""
        return size.slots * num_rows(size) + size.chunks * self.config.prefill_chunk

    def enqueue(self, state: EngineState, words: Words, *, size: Size) -> tuple[EngineState, PackedOutcomes]:
        """Enqueues a program (see `run_steps` and `score_chunks`); donates the state. Its output is for
        `read_outcomes`.

        Args:
          words: i32[N] of `pack`.
        """
        return self.compiled[size](self.leaves, state, words, self.grammars(size), self._links)

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
        return self.compiled[max(of_mode, key=self.rows)]

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

    def compile_next(self, size: Size) -> None:
        """Compiles a program in the background, unless somebody else has or does."""
        mine = self._claim([size])
        try:
            if mine and self.has_room():
                with compilation_cache():
                    self.compile_one(size)
        finally:
            self._end(mine)

    def compile_one(self, size: Size) -> None:
        """Compiles one program."""
        self.compiled[size] = self._lower(size).compile(self._compiler_options(size))

    def _compiler_options(self, size: Size) -> dict[str, str | bool | int]:
        return compiler_options(
            self._weights,
            rows=self.rows(size),
            decodes=bool(size.width),
            num_devices=self.mesh.size,
            is_exact=self.config.exact,
        )

    @property
    def compiler_options_of_phases(self) -> dict[str, str | bool | int]:
        """XLA's options for a single phase of a step."""
        return compiler_options((), rows=0, is_exact=self.config.exact)

    def _lower(self, size: Size) -> Any:
        def program(leaves, state, words, grammars, links):
            with through_peers(links), exact(self.config.exact):
                models = nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))
                plan = Plan.unpack(words, size, self.config, grammars)
                if size.scores:
                    state, (logprobs, hidden) = score_chunks(models, plan, state)
                    return state, pack_outcomes(logprobs, hidden)
                state, outcomes = run_steps(models, plan, state)
            return state, pack_outcomes(outcomes)

        count = len(empty_plan(size, self.config))
        words = jax.ShapeDtypeStruct((count,), np.int32, sharding=self._replicated)
        # The state keeps its shardings, so that it can be donated and passed to the next dispatch.
        kept = shardings(self._state)
        places = (shardings(self._weights), kept, self._replicated, self._replicated, shardings(self._links))
        program = on_shards(program, self.mesh, places, (kept, self._replicated))
        program.__name__ = "decode" if size.width else "scores" if size.scores else "prompts"
        return jax.jit(program, donate_argnums=1, out_shardings=(kept, self._replicated)).lower(
            self._weights, self._state, words, self._shape_of_grammars(size), self._links
        )

    def _shape_of_grammars(self, size: Size) -> Any:
        has_slab = size.constraints & Constraints.GRAMMAR
        return _shapes(self._slab()) if has_slab else self._shape_without_slab


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


def _shapes(arrays: Any) -> Any:
    """The arrays' shapes, dtypes and shardings, in the same tree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)


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
        # Larger programs serve the requests that a program left out would have served.
        try:
            alive.compile_next(size)
        except Exception as error:
            if not alive.is_closed:  # it takes away the slab, for example
                _log.warning("the program for %s does not compile: %s", size, error)
        alive.one_less()
        del alive
