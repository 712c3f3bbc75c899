"""The compiled programs: made once when an engine is loaded, never again."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

from jaxspec.engine.state import EngineState, PrefillBatch, PrefillOutput, StepOutput
from jaxspec.engine.step import Models, StepSettings, decode, prefill, verify_and_commit
from jaxspec.sampling import SamplingMode
from jaxspec.sharding import replicated


def compiler_options(weights: Sequence[jax.Array], *, rows: int) -> dict[str, str | bool]:
    """How XLA is to compile a program that runs so many rows through these weights.

    On a GPU, XLA picks for every product between kernels of its own and cuBLAS's by timing them on operands
    that are in the cache, where real weights never are. Llama-3-8B with 128 rows took 8.49 ms a step with its
    picks and 7.93 with cuBLAS alone (H100). With few rows or small weights its kernels are the better ones,
    for they fuse what surrounds the product. XLA_FLAGS take precedence.
    """
    flag = "xla_gpu_enable_triton_gemm"
    size = sum(weight.nbytes for weight in weights)
    if (
        jax.default_backend() != "gpu"
        or rows < 64
        or size < 1 << 31
        or flag in os.environ.get("XLA_FLAGS", "")
    ):
        return {}
    return {flag: False}


class Programs:
    """`prefill` and `decode` for one engine, compiled ahead of time.

    The weights travel as a flat tuple of arrays: flattening a tree of modules at each call would cost
    the host more than the dispatch.
    """

    def __init__(self, models: Models, settings: StepSettings, *, draft_loop: str, mesh: Mesh):
        self.graph, parameters = nnx.split(models)
        self.leaves, self.treedef = jax.tree.flatten(parameters)
        self.settings = settings
        self.draft_loop = draft_loop
        self._replicated = replicated(mesh)
        self.num_drafts = models.drafter.num_speculative_tokens
        self._prefill: Callable | None = None
        self._decode: dict[SamplingMode, Callable] = {}

    def compile(
        self,
        state: EngineState,
        batch: PrefillBatch,
        live: jax.Array,
        *,
        modes: tuple[SamplingMode, ...],
        progress: bool,
    ) -> None:
        """Compiles everything, side by side.

        Args:
          modes: which decode programs to make.
        """
        jobs: dict[str, Callable[[], Any]] = {
            "prefill": partial(self._lower, prefill, (state, batch), settings=self.settings)
        }
        if self.draft_loop == "compiled":
            for mode in modes:
                jobs[_job_name(mode)] = partial(
                    self._lower, decode, (state, live), settings=self.settings, mode=mode
                )
        lowered = {name: job() for name, job in jobs.items()}
        compiled = {}
        with (
            ThreadPoolExecutor(len(lowered)) as pool,
            tqdm(
                total=len(lowered), desc="compile", unit="program", disable=not progress, leave=False
            ) as bar,
        ):
            rows = {"prefill": batch.tokens.size}
            decoded = live.size * (self.num_drafts + 1)
            futures = {
                name: pool.submit(
                    program.compile, compiler_options(self.leaves, rows=rows.get(name, decoded))
                )
                for name, program in lowered.items()
            }
            for name, future in futures.items():
                bar.set_postfix_str(name)
                compiled[name] = future.result()
                bar.update()
        self._prefill = compiled["prefill"]
        for mode in modes:
            if self.draft_loop == "host":
                self._decode[mode] = self._host_decode(mode)
            else:
                self._decode[mode] = compiled[_job_name(mode)]

    def prefill(self, state: EngineState, batch: PrefillBatch) -> tuple[EngineState, PrefillOutput]:
        """See `step.prefill`; donates the state."""
        assert self._prefill is not None
        return self._prefill(self.leaves, state, batch)

    def decode(
        self, state: EngineState, live: jax.Array, *, mode: SamplingMode
    ) -> tuple[EngineState, StepOutput]:
        """See `step.decode`; donates the state."""
        return self._decode[mode](self.leaves, state, live)

    def compiled_decode(self, *, mode: SamplingMode) -> Any:
        """The executable behind `decode`, for its HLO and its memory analysis."""
        return self._decode[mode]

    def _models(self, leaves: list[jax.Array]) -> Models:
        return nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves))

    def _lower(self, function: Callable, args: tuple, **static: Any) -> Any:
        def program(leaves, state, *rest):
            return function(self._models(leaves), state, *rest, **static)

        program.__name__ = function.__name__
        # The state comes back as it went in, so that it can be donated and passed on.
        kept = jax.tree.map(lambda array: array.sharding, args[0])
        return jax.jit(program, donate_argnums=1, out_shardings=(kept, self._replicated)).lower(
            self.leaves, *args
        )

    def _host_decode(self, mode: SamplingMode) -> Callable:
        """`decode` driven from Python, one call per draft: the oracle that the compiled loop is held to."""

        def compiled(function: Callable) -> Callable:
            def program(leaves, context, state, *rest):
                models = self._models(leaves)
                return function(models.drafter, models.target, context, state, *rest)

            return partial(jax.jit(program, donate_argnums=2), self.leaves)

        propose = self._models(self.leaves).drafter.host_propose(compiled, mode=mode)

        def commit_program(leaves, state, proposal):
            return verify_and_commit(self._models(leaves), state, proposal, settings=self.settings, mode=mode)

        commit = jax.jit(commit_program, donate_argnums=1)

        def run(leaves, state, live):
            state = replace(state, active=state.active & live)
            outputs = []
            for _ in range(self.settings.steps_per_dispatch):
                proposal, draft_cache = propose(state.context, state.draft_cache)
                state, output = commit(leaves, replace(state, draft_cache=draft_cache), proposal)
                outputs.append(output)
            return state, jax.tree.map(lambda *steps: jnp.stack(steps), *outputs)

        return run


def _job_name(mode: SamplingMode) -> str:
    return f"decode ({mode.name.lower()})"
