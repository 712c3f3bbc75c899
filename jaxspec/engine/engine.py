"""The engine: requests in, tokens out, with the device always one dispatch ahead of the host."""

import secrets
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.checkpoints import Tokenizer
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.drafters.base import Drafter, Target
from jaxspec.engine.counters import Counters
from jaxspec.engine.packing import pack_prefill
from jaxspec.engine.pages import PageAllocator
from jaxspec.engine.programs import Programs
from jaxspec.engine.prompts import Prompt, as_prompts, encode_prompt, is_one_prompt
from jaxspec.engine.request import Delta, Generation, Request
from jaxspec.engine.scheduler import Chunk, Plan, Running, Scheduler, SlotStep
from jaxspec.engine.state import MAX_STOP_TOKENS, PrefillBatch, PrefillOutput, StepOutput, init_state
from jaxspec.engine.step import Models, StepSettings
from jaxspec.sampling import SamplingMode, SamplingParams, modes_for_sampling, required_mode, seed_words
from jaxspec.sharding import make_mesh, replicated


@dataclass(frozen=True)
class InFlight:
    """A round of dispatches whose results the host has not read."""

    plan: Plan
    prefills: list[PrefillOutput]
    decode: StepOutput | None


class Engine:
    """Speculative generation with one target and one drafter. Made by `jaxspec.load`.

    Not thread-safe; several `stream`s of one thread may be read in turn.

    Attributes:
      counters: the work so far.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: Sequence[int],
        config: EngineConfig,
        mesh: Mesh | None = None,
        sampling_modes: Sequence[str | SamplingMode] = ("greedy", "sampled"),
        progress: bool = True,
    ):
        """Allocates the cache and compiles the programs.

        Args:
          mesh: the devices that the weights lie on; one by default.
          sampling_modes: which decode programs to compile: "greedy" serves batches in which every
            temperature is 0, "sampled" serves any batch (by two programs where searching for top-k and
            top-p costs the same whether a request uses them or not: on a GPU), a `SamplingMode` one program.
        """
        self._modes = parse_modes(sampling_modes)
        mesh = mesh or make_mesh()
        self._whole = replicated(mesh)
        self.config = config.resolve(
            backend=jax.default_backend(), model_limit=target.config.max_position_embeddings
        )
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = target.config.vocab_size
        self.max_model_len = self.config.max_model_len
        self.num_speculative_tokens = drafter.num_speculative_tokens
        if drafter.trained_length is not None and self.max_model_len > drafter.trained_length:
            warnings.warn(
                f"the drafter was made for {drafter.trained_length} positions, and max_model_len is "
                f"{self.max_model_len}: expect few drafts to be accepted past the former",
                stacklevel=2,
            )
        if self.config.synthetic_acceptance_length is not None:
            warnings.warn(
                "synthetic_acceptance_length is a benchmark mode: it accepts drafts whatever they are, and "
                "the text is worthless",
                stacklevel=2,
            )
        self._scheduler = Scheduler(
            batch_size=self.config.batch_size,
            pages=PageAllocator(self.config.num_pages, self.config.page_size),
            prefill_rows=self.config.prefill_rows,
            prefill_chunk=self.config.prefill_chunk,
            steps_per_dispatch=self.config.steps_per_dispatch,
        )
        self._in_flight: deque[InFlight] = deque()
        self.counters = Counters(compiles=1 + len(self._modes))
        self._state = init_state(target, drafter, self.config, mesh=mesh)
        settings = StepSettings(
            page_size=self.config.page_size,
            steps_per_dispatch=self.config.steps_per_dispatch,
            synthetic_acceptance_length=self.config.synthetic_acceptance_length,
        )
        self.programs = Programs(
            Models(target, drafter), settings, draft_loop=self.config.draft_loop, mesh=mesh
        )
        self._live_host = list(self._scheduler.live)
        self._live = jax.device_put(np.asarray(self._live_host), self._whole)
        self.programs.compile(self._state, self._pack([]), self._live, modes=self._modes, progress=progress)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        **sampling: Any,
    ) -> Generation | list[Generation]:
        """Answers one prompt, or several in one batch.

        Args:
          prompts: a string (a user's turn, put through the model's chat template where it has one), a
            list of chat messages ({"role", "content"}), a list of token ids, or a list of any of these.
          params: how to sample; or its fields as keywords.
          raw: pass strings as they stand, without the chat template.

        Returns:
          A Generation for one prompt, a list of them, in the order of the prompts, for several.

        Raises:
          ValueError: a prompt that is empty, too long or of no known form, or a bad sampling parameter;
            nothing has been generated then.
        """
        params = _merge_params(params, sampling)
        every = as_prompts(prompts)
        requests = [self.make_request(prompt, params, raw=raw) for prompt in every]
        generations = dict(self.run(requests))
        if is_one_prompt(prompts):
            return generations[0]
        return [generations[i] for i in range(len(requests))]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        **sampling: Any,
    ) -> Iterator[Delta]:
        """Answers one prompt piece by piece; the last piece carries the whole Generation."""
        params = _merge_params(params, sampling)
        request = self.make_request(prompt, params, raw=raw, is_streamed=True)
        return self._stream(request)

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Generation]]:
        """Runs requests of `make_request`; yields (index, Generation) as they finish, in that order.

        Takes them from the iterable a few ahead of the free slots, so a long one may make them on the
        way. Closing the iterator drops the requests that are not finished.
        """
        numbered = enumerate(requests)
        pending: dict[Request, int] = {}
        try:
            while True:
                for index, request in islice(numbered, self.max_pending - len(pending)):
                    pending[request] = index
                    self.add_request(request)
                if not pending:
                    return
                self.step()
                for request in [request for request in pending if request.finish_reason is not None]:
                    yield pending.pop(request), request.generation()
        finally:
            for request in pending:
                self.abort_request(request)

    @property
    def max_pending(self) -> int:
        """Requests that keep every slot busy: one running and one waiting for each."""
        return 2 * self.config.batch_size

    def add_request(self, request: Request) -> None:
        """Queues a request of `make_request` for `step`; see `run` and `stream` for the loop around it."""
        self._scheduler.add(request)

    def step(self) -> None:
        """Schedules and enqueues the next round, then reads the one before it.

        Requests grow by what was read; those that it ended have a `finish_reason`.
        """
        plan = self._scheduler.plan()
        if plan:
            self._in_flight.append(self._dispatch(plan))
        if self._in_flight and (len(self._in_flight) > 1 or not plan):
            self._commit(self._in_flight.popleft())

    def abort_request(self, request: Request) -> None:
        """Drops a request wherever it is; a finished one stays as it is."""
        if request.finish_reason is None:
            self._scheduler.cancel(request)

    def make_request(
        self, prompt: Prompt, params: SamplingParams, *, raw: bool = False, is_streamed: bool = False
    ) -> Request:
        """Checks a prompt and its parameters, and makes a request of them.

        Raises:
          ValueError: as `generate`.
        """
        ids = encode_prompt(prompt, self.tokenizer, raw=raw, vocab_size=self.vocab_size)
        room = self.max_model_len - len(ids)
        if room < 1:
            raise ValueError(
                f"prompt of {len(ids)} tokens leaves no room to answer: max_model_len is {self.max_model_len}"
            )
        most = max(self._modes)
        if required_mode(params) > most:
            given, loaded = (
                ("top_k, top_p", "sampling without them") if most else ("temperature", "greedy decoding only")
            )
            raise ValueError(f"{given}: this engine was loaded for {loaded}")
        max_new_tokens = min(params.max_new_tokens, room)
        if not self._scheduler.pages.pages_for(len(ids) + max_new_tokens) <= self._scheduler.pages.num_pages:
            raise ValueError(
                f"prompt of {len(ids)} tokens and {max_new_tokens} new ones need more than the cache's "
                f"{self._scheduler.pages.num_pages} pages of {self.config.page_size}; raise engine.num_pages"
            )
        outside = [token for token in params.stop_token_ids if token >= self.vocab_size]
        if outside:
            raise ValueError(f"stop_token_ids: {outside[0]} is outside the vocabulary of {self.vocab_size}")
        eos = () if params.ignore_eos else self.eos_token_ids
        stop_tokens = tuple(dict.fromkeys((*params.stop_token_ids, *eos)))
        if len(stop_tokens) > MAX_STOP_TOKENS:
            raise ValueError(
                f"stop_token_ids: at most {MAX_STOP_TOKENS} with the model's own, got {len(stop_tokens)}"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: stop strings need a tokenizer, and this checkpoint has none")
        seed = secrets.randbits(64) if params.seed is None else params.seed
        return Request(
            prompt=ids,
            params=params,
            max_new_tokens=max_new_tokens,
            stop_tokens=stop_tokens,
            seed=seed_words(seed),
            tokenizer=self.tokenizer,
            is_streamed=is_streamed,
        )

    def _stream(self, request: Request) -> Iterator[Delta]:
        self.add_request(request)
        try:
            while True:
                while not request.deltas:
                    self.step()
                delta = request.deltas.pop(0)
                yield delta
                if delta.generation is not None:
                    return
        finally:
            self.abort_request(request)

    def _dispatch(self, plan: Plan) -> InFlight:
        prefills = []
        for chunks in plan.prefills:
            self._state, first = self.programs.prefill(self._state, self._pack(chunks))
            prefills.append(first)
            self.counters.prompt_passes += 1
            self.counters.prompt_rows += self.config.prefill_rows * self.config.prefill_chunk
            self.counters.prompt_rows_used += sum(chunk.count for chunk in chunks)
        output = None
        if plan.decodes:
            mode = self._mode_for(plan.decodes)
            self._state, output = self.programs.decode(self._state, self._live_mask(), mode=mode)
            self.counters.steps += self.config.steps_per_dispatch
            self.counters.slot_steps += self.config.steps_per_dispatch * self.config.batch_size
        self.counters.dispatches += len(prefills) + bool(plan.decodes)
        for array in jax.tree.leaves((prefills, output)):
            array.copy_to_host_async()
        return InFlight(plan, prefills, output)

    def _commit(self, in_flight: InFlight) -> None:
        for chunks, first in zip(in_flight.plan.prefills, in_flight.prefills, strict=True):
            tokens, done = np.asarray(first.token), np.asarray(first.done)
            for row, chunk in enumerate(chunks):
                if chunk.is_last:
                    self._scheduler.commit_first(chunk, int(tokens[row]), done=bool(done[row]))
        if in_flight.decode is not None:
            self.counters.slot_steps_used += int(np.count_nonzero(in_flight.decode.num_tokens))
            steps = _steps(in_flight.decode)
            for running in in_flight.plan.decodes:
                self._scheduler.commit_decode(running, [step[running.slot] for step in steps])

    def _mode_for(self, decodes: Sequence[Running]) -> SamplingMode:
        """The least mode that was compiled and serves all of these."""
        required = max(required_mode(running.request.params) for running in decodes)
        return min(mode for mode in self._modes if mode >= required)

    def _live_mask(self) -> jax.Array:
        if self._live_host != self._scheduler.live:
            self._live_host = list(self._scheduler.live)
            self._live = jax.device_put(np.asarray(self._live_host), self._whole)
        return self._live

    def _pack(self, chunks: Sequence[Chunk]) -> PrefillBatch:
        return pack_prefill(
            chunks,
            self._state,
            rows=self.config.prefill_rows,
            width=self.config.prefill_chunk,
            whole=self._whole,
        )


def parse_modes(sampling_modes: Sequence[str | SamplingMode]) -> tuple[SamplingMode, ...]:
    """Which decode programs to compile.

    Raises:
      ConfigError: none, or one that does not exist.
    """
    known = {"greedy": (SamplingMode.GREEDY,), "sampled": modes_for_sampling()}
    unknown = [mode for mode in sampling_modes if not isinstance(mode, SamplingMode) and mode not in known]
    if unknown or not sampling_modes or isinstance(sampling_modes, str):
        raise ConfigError(f"sampling_modes must be some of {list(known)}, got {sampling_modes!r}")
    named = ((mode,) if isinstance(mode, SamplingMode) else known[mode] for mode in sampling_modes)
    return tuple(sorted(set().union(*named)))


def _merge_params(params: SamplingParams | None, sampling: dict[str, Any]) -> SamplingParams:
    if params is None:
        return SamplingParams(**sampling)
    if sampling:
        raise ValueError(f"give {next(iter(sampling))} in params or as a keyword, not both ways")
    return params


def _steps(output: StepOutput) -> list[list[SlotStep]]:
    """What every step of a dispatch did for every slot, as Python's numbers: arrays cost more to index."""
    tokens, num_tokens, drafted, accepted, done = (
        np.asarray(array).tolist()
        for array in (output.tokens, output.num_tokens, output.drafted, output.accepted, output.done)
    )
    return [
        [SlotStep(row[:count], *rest) for row, count, *rest in zip(*step, strict=True)]
        for step in zip(tokens, num_tokens, drafted, accepted, done, strict=True)
    ]
