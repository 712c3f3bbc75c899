"""Running the decode program of an engine on slots with a given context."""

import argparse
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from bench.shapes import SHAPES, build_models
from jaxspec.attention import has_states
from jaxspec.commands.command_line import Parser
from jaxspec.config import EngineConfig
from jaxspec.engine.device.outcome import Outcome, PackedOutcomes, read_outcomes
from jaxspec.engine.device.plan import Size, pack
from jaxspec.engine.device.programs import Programs
from jaxspec.engine.device.state import EngineState, init_state
from jaxspec.engine.device.step import Models
from jaxspec.engine.host.request import Request
from jaxspec.engine.host.scheduler import Dispatch
from jaxspec.engine.host.scheduler import Running as Slot
from jaxspec.sampling import Asked, SamplingParams, required_mode
from jaxspec.sharding import make_mesh, replicated


@cache
def _noise(shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding) -> Any:
    def noise(key: jax.Array) -> jax.Array:
        if dtype == jnp.uint8:  # exponents of scales of one
            return jnp.full(shape, 127, dtype)
        return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)

    return jax.jit(noise, out_shardings=sharding)


@dataclass
class Running:
    """A compiled decode program and its state, with `context` committed tokens in every slot."""

    programs: Programs
    size: Size
    words: jax.Array
    state: EngineState
    context: int
    new_tokens: int

    @property
    def compiled(self) -> Any:
        """The executable."""
        return self.programs.compiled[self.size]

    def rewind(self) -> None:
        """Resets every slot to the start of its answer."""
        batch_size, whole = self.state.length.size, replicated(self.programs.mesh)
        length, remaining = (np.full(batch_size, n, np.int32) for n in (self.context, 1 << 30))
        active = np.ones(batch_size, bool)
        length, remaining, active = jax.device_put((length, remaining, active), whole)
        self.state = replace(self.state, length=length, remaining=remaining, active=active)

    def enqueue(self) -> PackedOutcomes:
        """Enqueues one dispatch; returns its output, for `read`."""
        self.state, output = self.programs.enqueue(self.state, self.words, size=self.size)
        return output

    def read(self, output: PackedOutcomes) -> Outcome:
        """The emitted tokens of a dispatch."""
        return read_outcomes(output)[0]


def start(
    models: Models,
    *,
    batch_size: int,
    context: int,
    new_tokens: int,
    max_model_len: int,
    page_size: int,
    steps_per_dispatch: int,
    acceptance: float | None,
    dtype: jnp.dtype,
    params: SamplingParams,
    mesh: Mesh | None = None,
    exact: bool = False,
    cache_dtype: str | None = None,
) -> Running:
    """Compiles the decode program and fills the slots' caches with noise.

    Args:
      models: target and drafter.
      batch_size: B, number of slots.
      context: committed tokens of every slot.
      new_tokens: room for new tokens in every slot.
      max_model_len, page_size, steps_per_dispatch, exact, cache_dtype: as in `EngineConfig`.
      acceptance: synthetic tokens per step; None verifies the drafts.
      dtype: of weights, and of the cache if `cache_dtype` is None.
      params: of every slot; they decide what the program can do.
      mesh: the devices of the models; one device by default.
    """
    mesh = mesh or make_mesh()
    whole = replicated(mesh)
    pages_per_slot = -(-(context + new_tokens) // page_size)
    config = EngineConfig(
        batch_size=batch_size,
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=batch_size * pages_per_slot,
        steps_per_dispatch=steps_per_dispatch,
        dtype=str(dtype),
        exact=exact,
        cache_dtype=cache_dtype,
        synthetic_acceptance_length=acceptance,
    )
    limit = models.target.config.max_position_embeddings
    resolved = config.resolve(
        backend=jax.default_backend(), model_limit=limit, has_states=has_states(models.target.kinds)
    )
    state = init_state(models.target, models.drafter, resolved, mesh=mesh)
    keys = iter(jax.random.split(jax.random.key(0), 1000))

    def noise(key: jax.Array, cache: Any) -> Any:
        return jax.tree.map(lambda x: _noise(x.shape, x.dtype, x.sharding)(key), cache)

    history = jax.random.randint(next(keys), state.history.shape, 0, models.target.config.vocab_size)
    state = replace(
        state,
        target_cache=tuple(noise(next(keys), layer) for layer in state.target_cache),
        draft_cache=tuple(noise(next(keys), layer) for layer in state.draft_cache),
        history=jax.device_put(history, whole),
        hidden=noise(next(keys), state.hidden) if state.hidden.size else state.hidden,
    )
    programs = Programs(models, resolved, state=state, mesh=mesh)
    size = Size(batch_size, 0, required_mode(params), models.drafter.num_speculative_tokens + 1)
    size = size.doing(Asked.of(params))
    programs.compile([size], progress=False)
    pages = 1 + np.random.default_rng(0).permutation(batch_size * pages_per_slot)
    slots = [
        Slot(
            Request([0] * context, params, new_tokens, (), slot, None),
            slot,
            pages.reshape(batch_size, pages_per_slot)[slot].tolist(),
            [],
            None,
        )
        for slot in range(batch_size)
    ]
    limits = [size.drafts] * batch_size
    is_decoding = [True] * batch_size
    everyone = Dispatch(slots, is_decoding, True, steps_per_dispatch, [], [], [], size.drafts, limits)
    words = jax.device_put(pack(everyone, size, resolved), whole)
    running = Running(programs, size, words, state, context, new_tokens)
    running.rewind()
    return running


def add_program_options(parser: Parser, *, context: int, steps_per_dispatch: int) -> None:
    """Adds what `network` and `start_program` read.

    Args:
      context, steps_per_dispatch: defaults.
    """
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--k", type=int, default=4, help="drafts per step")
    parser.add_argument("--acceptance", type=float, default=3.0, help="tokens per step")
    parser.add_argument("--no-speculation", action="store_true", help="plain decoding")
    parser.add_argument("--context", type=int, default=context, help="tokens in the cache")
    parser.add_argument("--steps-per-dispatch", type=int, default=steps_per_dispatch)
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="devices")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--cache-dtype", metavar="DTYPE", help="`engine.cache_dtype`")
    parser.add_argument("--gpu-activations", metavar="DTYPE", help="`engine.gpu_activations`")
    parser.add_argument("--exact", action="store_true", help="with `engine.exact`")


def network(args: argparse.Namespace, *, split_drafter: bool = True) -> tuple[Mesh, Models]:
    """The devices and the networks that options ask for; errors as of `build_models`."""
    mesh = make_mesh(args.tensor_parallel)
    models = build_models(
        SHAPES[args.shape],
        num_drafts=0 if args.no_speculation else args.k,
        dtype=jnp.dtype(args.dtype),
        mesh=mesh,
        split_drafter=split_drafter,
        activations=args.gpu_activations,
    )
    return mesh, models


def start_program(args: argparse.Namespace, models: Models, mesh: Mesh, **more: Any) -> Running:
    """`start` with these options and more arguments."""
    return start(
        models,
        context=args.context,
        steps_per_dispatch=args.steps_per_dispatch,
        acceptance=None if args.no_speculation else args.acceptance,
        dtype=jnp.dtype(args.dtype),
        mesh=mesh,
        exact=args.exact,
        cache_dtype=args.cache_dtype,
        **more,
    )
