"""What a program of a size is, and XLA's options for it."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxspec_kernels.collectives import peer_links, through_peers
from jaxspec_kernels.op import exact

from jaxspec.config import ResolvedEngineConfig
from jaxspec.engine.device.outcome import pack_outcomes
from jaxspec.engine.device.plan import Plan, Size, empty_plan
from jaxspec.engine.device.score import score_chunks
from jaxspec.engine.device.state import EngineState
from jaxspec.engine.device.step import Models, num_rows, run_steps
from jaxspec.jax_settings import platform
from jaxspec.sharding import bytes_by_device, on_shards, replicated, shardings


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


class Lowering:
    """Lowers the programs of an engine.

    It has shapes, no arrays, so that a thread that compiles keeps nothing of an engine that is dropped.
    """

    def __init__(self, models: Models, config: ResolvedEngineConfig, state: EngineState, mesh: Mesh):
        self._graph, parameters = nnx.split(models)
        leaves, self.treedef = jax.tree.flatten(parameters)
        self.config, self.mesh = config, mesh
        self.weights, self.state = shapes(leaves), shapes(state)
        self.links = peer_links(mesh)
        self._replicated = replicated(mesh)

    def merge(self, leaves: Sequence[jax.Array]) -> Models:
        """The models of these arrays."""
        return nnx.merge(self._graph, jax.tree.unflatten(self.treedef, leaves))

    def lower(self, size: Size, grammars: jax.ShapeDtypeStruct) -> Any:
        """The program of a size, which takes weights, state, packed plan, grammars and links.

        Args:
          grammars: the shape of the slab of grammars.
        """

        def program(leaves, state, words, grammars, links):
            with through_peers(links), exact(self.config.exact):
                models = self.merge(leaves)
                plan = Plan.unpack(words, size, self.config, grammars)
                if size.scores:
                    state, (logprobs, hidden) = score_chunks(models, plan, state)
                    return state, pack_outcomes(logprobs, hidden)
                state, outcomes = run_steps(models, plan, state)
            return state, pack_outcomes(outcomes)

        count = len(empty_plan(size, self.config))
        words = jax.ShapeDtypeStruct((count,), np.int32, sharding=self._replicated)
        # The state keeps its shardings, so that it can be donated and passed to the next dispatch.
        kept = shardings(self.state)
        places = (shardings(self.weights), kept, self._replicated, self._replicated, shardings(self.links))
        program = on_shards(program, self.mesh, places, (kept, self._replicated))
        program.__name__ = "decode" if size.width else "scores" if size.scores else "prompts"
        return jax.jit(program, donate_argnums=1, out_shardings=(kept, self._replicated)).lower(
            self.weights, self.state, words, grammars, self.links
        )

    def compile(self, size: Size, grammars: jax.ShapeDtypeStruct) -> Callable[..., Any]:
        """The same, compiled."""
        return self.lower(size, grammars).compile(self.options(size))

    def options(self, size: Size) -> dict[str, str | bool | int]:
        """XLA's options for the program of a size."""
        return compiler_options(
            self.weights,
            rows=self.rows(size),
            decodes=bool(size.width),
            num_devices=self.mesh.size,
            is_exact=self.config.exact,
        )

    @property
    def options_of_phases(self) -> dict[str, str | bool | int]:
        """XLA's options for a single phase of a step."""
        return compiler_options((), rows=0, is_exact=self.config.exact)

    def rows(self, size: Size) -> int:
        """Rows of the target's forward pass in a step."""
        return size.slots * num_rows(size) + size.chunks * self.config.prefill_chunk


def shapes(arrays: Any) -> Any:
    """The arrays' shapes, dtypes and shardings, in the same tree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)
