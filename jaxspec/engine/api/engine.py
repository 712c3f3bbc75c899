"""The engine: requests in, tokens out."""

import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count, islice
from numbers import Integral, Real
from queue import SimpleQueue
from threading import Lock
from time import monotonic
from typing import Any, Unpack, cast, overload

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxspec.attention import has_states
from jaxspec.config import ConfigError, EngineConfig
from jaxspec.documents import plain_number
from jaxspec.drafters.base import Drafter, Target
from jaxspec.engine.api.calls import Call, Result
from jaxspec.engine.api.prompts import Prompt, encode_prompt
from jaxspec.engine.api.requests import (
    bad_words,
    check_biases,
    check_mode,
    num_drafts,
    num_new_tokens,
    stop_tokens,
)
from jaxspec.engine.api.samples import Params, Samples, generate_call, sample_call
from jaxspec.engine.api.scores import Scores, score_call
from jaxspec.engine.device.programs import Programs
from jaxspec.engine.errors import EngineError
from jaxspec.engine.host.answer import Delta, Generation
from jaxspec.engine.host.counters import Counters
from jaxspec.engine.host.grammars import GrammarStore
from jaxspec.engine.host.metrics import Metric, metrics
from jaxspec.engine.host.request import Listener, Request
from jaxspec.engine.rounds.core import EngineCore
from jaxspec.engine.rounds.options import (
    AskManyOptions,
    AskOptions,
    GenerateOptions,
    Layer,
    Lengths,
    PromptOptions,
    split_options,
)
from jaxspec.engine.rounds.thread import EngineThread
from jaxspec.engine.rounds.weights import InFlight, WeightUpdate, plan_weight_update
from jaxspec.files import CheckpointError, Tokenizer
from jaxspec.jax_settings import own_settings
from jaxspec.models.decoder import Decoder
from jaxspec.sampling import (
    Asked,
    Constraints,
    Kind,
    SamplingMode,
    SamplingOptions,
    SamplingParams,
    generation_defaults,
    modes_for_sampling,
    required_mode,
)
from jaxspec.sharding import bytes_by_device, make_mesh, replicated
from jaxspec.weights.memory import Names
from jaxspec.weights.packed_weights import rounds_activations


class Engine:
    """Speculative generation with one target and one drafter. Made by `jaxspec.load`.

    - `generate` answers one prompt or several; `stream` answers one piece by piece.
    - `sample` draws samples as arrays, for a training step; `score` gives the log-probabilities of texts.
    - `default_params` is the sampling that the model's makers recommend.
    - `run` answers requests from `make_request` as they come, with priorities and deadlines.
    - `update_weights` replaces the weights while it runs; `weights`, `target` and `drafter` are for looking.
    - `counters` and `metrics` say what work was done; `forget_prefixes` empties the prefix cache.
    - `prepare` compiles programs before the first request that needs them; `wait_prepared` waits for all.
    - `close` frees the device's memory.

    One background thread drives the device, so any thread may call any method at any time; the requests of
    all callers share the batch. `AsyncEngine` is the client for asyncio. Use the engine in a `with` block,
    or call `close`, to choose when the device's memory is freed.
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
        is_adaptive: bool = False,
        generation: Mapping[str, Any] | None = None,
        progress: bool = True,
    ):
        """Allocates the cache and compiles the programs.

        Args:
          tokenizer: turns text into ids and back; None serves token ids alone.
          eos_token_ids: ids that end an answer unless a request ignores them.
          config: sizes; fields left open are resolved for this backend and target.
          mesh: the devices that hold the weights; the default device by default.
          sampling_modes: the decode programs to compile. "greedy" serves batches in which every temperature
            is 0, "sampled" any batch; a `SamplingMode` names a single program. On a GPU "sampled" is two
            programs, because searching for top-k and top-p there costs the same whether or not a request
            uses them.
          is_adaptive: choose K for every dispatch, up to the drafter's `num_speculative_tokens`.
          generation: the contents of the checkpoint's `generation_config.json`, for `default_params`.
          progress: show a progress bar while programs compile.

        Raises:
          ConfigError: max_model_len is past the model's limit, or a sampling mode does not exist.
        """
        mesh = mesh or make_mesh()
        device: jax.Device = mesh.devices.flat[0]
        with own_settings(device):
            modes = parse_modes(sampling_modes)
        weights = nnx.state(target)
        self.config = config.resolve(
            backend=device.platform,
            model_limit=target.config.max_position_embeddings,
            weight_bytes=sum(map(bytes_by_device, jax.tree.leaves(weights))),
            rounds_activations=rounds_activations(weights),
            has_states=has_states(target.kinds),
        )
        self.tokenizer = tokenizer
        self._generation = generation or {}
        self.eos_token_ids = tuple(eos_token_ids)
        self.vocab_size = target.config.vocab_size
        self.max_model_len = self.config.max_model_len
        self.num_speculative_tokens = drafter.num_speculative_tokens
        self.is_adaptive = is_adaptive and self.num_speculative_tokens > 0
        if drafter.trained_length is not None and self.max_model_len > drafter.trained_length:
            warnings.warn(
                f"the drafter was trained on {drafter.trained_length} positions and max_model_len is "
                f"{self.max_model_len}: expect few accepted drafts past position {drafter.trained_length}",
                stacklevel=2,
            )
        if self.config.synthetic_acceptance_length is not None:
            warnings.warn(
                "synthetic_acceptance_length is for benchmarks: it accepts drafts whether or not they are "
                "right, so the text is worthless",
                stacklevel=2,
            )
        self._made_of = (type(target).__name__, type(drafter).__name__)
        self._ids = count()
        self._submitting = Lock()
        with own_settings(device):
            self.core = EngineCore(
                target,
                drafter,
                self.config,
                mesh=mesh,
                modes=modes,
                is_adaptive=self.is_adaptive,
                progress=progress,
                grammars=GrammarStore(tokenizer, self.vocab_size, self.eos_token_ids, replicated(mesh)),
            )
        self._thread = EngineThread(self.core)

    def __repr__(self) -> str:
        (target, drafter), most = self._made_of, self.num_speculative_tokens
        drafts = f"{drafter} with K {'up to ' if self.is_adaptive else ''}{most}" if most else "no drafts"
        size = f"{self.config.batch_size} x {self.max_model_len} positions, {self.config.dtype}"
        closed = "" if self.core.error is None else ", closed"
        return f"<Engine: {target}, {drafts}, {size}{closed}>"

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # A string is a sequence of strings, too, and checkers take the first that fits.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: Params = ..., *, n: None = ..., **options: Unpack[GenerateOptions]
    ) -> Generation: ...

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompts: Prompt, params: Params = ..., *, n: int, **options: Unpack[GenerateOptions]
    ) -> list[Generation]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] = ...,
        *,
        n: None = ...,
        **options: Unpack[GenerateOptions],
    ) -> list[Generation]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] = ...,
        *,
        n: int,
        **options: Unpack[GenerateOptions],
    ) -> list[list[Generation]]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] = None,
        *,
        n: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation | list[Any]:
        """Answers one prompt, or several in one batch; with `n`, each of them several times.

        Samples of a prompt share the cache's full pages of it, which are read once; each reads the tokens
        behind them itself, at most a page and one token.

        With a seed s, the first sample of a prompt has the seed s, wherever the prompt stands in a list, and
        later ones have seeds derived from s and their number (`sample_seed`); `Generation.seed` gives it.
        Equal prompts in a list are samples of one prompt, unless `params` or the seed is a list.

        Args:
          prompts: a string (a user's turn, put through the model's chat template if it has one), a list of
            chat messages ({"role", "content"}, in any of OpenAI's forms without images), a list of token
            ids, or a list of any of these.
          params: how to sample; alternatively, its fields as keywords. For a list of prompts, `params` and
            the keyword `seed` may be lists with an item for each of them.
          raw: use strings as they are, without the chat template.
          chat_template_kwargs: arguments of the chat template, for example {"enable_thinking": False}.
          continue_final_message: the last message is the assistant's and the beginning of the answer, which
            goes on where it ends; the Generation has what follows.
          special_tokens_as_text: special tokens that somebody wrote in a text, a message or an argument of
            the template are taken as text; only the template's own are tokens.
          n: the number of samples of each prompt; None is one, which is not in a list. More than one need a
            temperature above 0.
          best_of: draw so many samples of each prompt, at least n, and return those with the largest
            `Generation.mean_logprob`, the best first. They have log-probabilities, asked for or not.

        Returns:
          A Generation for one prompt, or with `n` a list of them; for several prompts a list of these, in
          their order.

        Raises:
          ValueError: a prompt is empty, too long or of no known form, a parameter is bad, or something that
            was asked for would have no effect; nothing has been generated.
          EngineError: the engine is closed, or its device failed for good.
        """
        call = generate_call(self.make_request, prompts, params, n=n, **options)
        generations = dict(self.run(call.requests))
        return call.finish([generations[i] for i in range(len(generations))])

    def sample(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] = None,
        *,
        n: int = 1,
        length: int | None = None,
        **options: Unpack[AskManyOptions],
    ) -> Samples:
        """Draws samples for a training step, as arrays of JAX.

        Args:
          prompts, params, n, raw, chat_template_kwargs, continue_final_message, special_tokens_as_text: as in
            `generate`, with the same samples of a seed.
          length: T, the tokens that a row of the arrays has room for; None takes the longest prompt and its
            `max_new_tokens`, whatever the answers are, so that a training step need not be compiled again.

        Returns:
          The samples, all of one version of the weights, in the order of the prompts and side by side for
          each of them.

        Raises:
          ValueError: as `generate`, or a sample may be longer than `length`.
          EngineError: a sample was aborted or has failed, or the engine is closed.
        """
        return self._answer(sample_call(self, prompts, params, n=n, length=length, **options))

    def score(
        self,
        sequences: Prompt | Sequence[Prompt],
        *,
        lengths: Lengths | None = None,
        top: int = 0,
        hidden: Sequence[Layer] | Layer = (),
        temperature: float = 1.0,
    ) -> Scores:
        """The log-probability of every token of some sequences, given those before it.

        Sequences are read as prompts are, in chunks and beside other requests, and no more than 512 rows of
        logits exist at a time. Sequences that begin alike share the cache's pages and what was said of them,
        also in later calls that ask for the same and for no hidden states. An answer's prompt shares none,
        because it is read for the drafter, too. The first call of a kind compiles a program.

        Args:
          sequences: texts, used as they are, without the chat template; lists of token ids; or an array
            i32[B, T]. One sequence is a batch of one.
          lengths: i32[B], the tokens of every row of an array, the rest of which is padding.
          top: how many of the most likely tokens to report in the place of every token, at most 20.
          hidden: hidden states to return: the number i of a layer for the residual stream before it, the
            number of layers for the stream after all of them, and "last" for the state after the final norm.
          temperature: divides the logits.

        Raises:
          ValueError: a sequence is empty, too long or of no known form, or another argument is wrong.
          EngineError: a sequence was aborted, its logits are not finite, or the engine is closed.
        """
        return self._answer(
            score_call(self, sequences, lengths=lengths, top=top, hidden=hidden, temperature=temperature)
        )

    def stream(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        **options: Unpack[AskOptions],
    ) -> Iterator[Delta]:
        """Answers one prompt piece by piece; the last piece carries the whole Generation.

        The request is queued when the first piece is asked for. Closing the iterator aborts it.

        Args:
          params, raw, chat_template_kwargs, continue_final_message, special_tokens_as_text: as in `generate`.
          priority, deadline: as in `make_request`.

        Raises:
          ValueError: at the call, as `generate`.
          EngineError: while iterating: the engine is closed, or its device failed for good.
        """
        how, sampling = split_options(options)
        params = SamplingParams.merge(params, sampling)
        request = self.make_request(
            prompt, params, is_streamed=True, priority=priority, deadline=deadline, **how
        )
        return self._stream(request)

    def run(
        self, requests: Iterable[Request], *, ended: SimpleQueue[Request | None] | None = None
    ) -> Iterator[tuple[int, Generation]]:
        """Runs requests from `make_request`; yields (index, Generation) in the order in which they end.

        Takes requests from the iterable only as slots become free, at most `max_pending` ahead, so it may be
        a long generator. After its end it is asked again whenever a slot becomes free, until no request is
        left, since an answer may have led to another one. Closing the returned iterator aborts the requests
        that have not ended.

        Args:
          ended: the queue to use for requests that have ended. Whoever puts None into it has the iterable
            asked again, for example because a request has arrived.

        Raises:
          ValueError: a request has been queued before.
          EngineError: the engine is closed, or its device failed for good.
        """
        numbered = enumerate(requests)
        pending: dict[Request, int] = {}
        queue = SimpleQueue() if ended is None else ended
        try:
            while True:
                fresh = [(request, i) for i, request in islice(numbered, self.max_pending - len(pending))]
                numbers = dict(fresh)

                def listener(request: Request, numbers: dict[Request, int] = numbers) -> Listener:
                    pending[request] = numbers[request]  # before it is queued, so that an interrupt aborts it
                    return partial(_put, queue, request)

                self.submit([request for request, _ in fresh], listener)
                if not pending:
                    return
                request = queue.get()
                if request is not None:
                    yield pending.pop(request), self.checked(request.generation())
        finally:
            self.abort(*pending)

    def submit(self, requests: Sequence[Request], listener: Callable[[Request], Listener]) -> None:
        """Queues new requests from `make_request`, all of them before the next round.

        Args:
          listener: called with each request; returns the function that the engine's thread is to call with
            every piece of that request's answer.

        Raises:
          ValueError: a request has been queued before; none of them is queued then.
          EngineError: the engine is closed, or its device failed for good.
        """
        if self.core.error is not None:
            raise self.core.error
        with self._submitting:
            seen: set[Request] = set()
            for request in requests:
                if request.stage != "new" or request in seen:
                    raise ValueError(f"request {request.id} has been queued before; make a new one")
                seen.add(request)
            for request in requests:
                request.stage, request.listener = "queued", listener(request)
        if requests:
            core = self.core  # held until they are queued, so that a caller may drop the engine at once
            self._thread.put(lambda _: core.add(requests))

    def abort(self, *requests: Request) -> None:
        """Ends queued and running requests and frees their slots and pages; ignores those that have ended."""
        unfinished = [request for request in requests if request.finish_reason is None]
        if unfinished:
            with suppress(EngineError):  # closing the engine has already ended them
                self._thread.put(lambda core: core.abort(unfinished, "it was cancelled"))

    def checked(self, generation: Generation) -> Generation:
        """Returns the generation, unless it failed because the whole engine did.

        Raises:
          EngineError: the engine's device failed for good.
        """
        if generation.finish_reason == "failed" and self.core.error is not None:
            raise self.core.error
        return generation

    def update_weights(
        self,
        weights: Any = None,
        drafter: Any = None,
        *,
        in_flight: InFlight = "finish",
        names: Names | None = None,
    ) -> int:
        """Replaces the weights, and waits until they are in place.

        Everything is checked before anything is changed. The new weights are written into the memory of the
        old ones, a few parameters at a time and from device to device; the caller keeps its arrays, and may
        donate them as soon as this returns. Nothing is compiled but at the first update from arrays of these
        shapes and places. Requests that have not begun wait meanwhile, and prefixes are forgotten. Updates of
        several threads come one after another. After an interrupt the old weights go on, unless the new ones
        are in place already.

        Args:
          weights: the target's, as for `jaxspec.load`, every parameter of it; None keeps them. Copies of them
            in the drafter follow.
          drafter: the drafter's, in the same forms, by the names of its checkpoint; None keeps them.
          in_flight: what becomes of requests that have begun: "finish" waits for their end, "abort" aborts
            them. No answer is made of two versions.
          names: see `jaxspec.load`.

        Returns:
          The version of the weights, 1 after the first update; later answers have it.

        Raises:
          CheckpointError: an array is missing, unexpected, of another shape or not finite, or the weights to
            be replaced are packed; the old ones go on.
          ValueError: another argument is wrong.
          EngineError: the engine is closed, or its device failed.
        """
        if weights is not None and self.config.output_dtype is not None:
            raise CheckpointError("weights: engine.output_dtype rounds output rows only when they are loaded")
        with self.core.updating:
            target = cast(Decoder, self.target)
            with own_settings(self.core.device):
                update = plan_weight_update(
                    target, self.drafter, weights, drafter, in_flight=in_flight, names=names
                )
            self._thread.put(lambda core: core.update(update))
            try:
                return update.done.result()
            except BaseException:
                if not update.done.done():  # an interrupt
                    self._withdraw(update)
                raise

    def _withdraw(self, update: WeightUpdate) -> None:
        """Takes back new weights that are not in place yet; returns when they are, or never will be."""
        with suppress(EngineError):  # closing the engine has already ended it
            self._thread.put(lambda core: core.withdraw(update))
        wait([update.done])

    @property
    def weights_version(self) -> int:
        """How often the weights have been replaced."""
        return self.core.scheduler.weights_version

    @property
    def weights(self) -> nnx.State:
        """The target's parameters as a flax state, without a copy.

        Its arrays are the engine's own: the next update deletes them. The drafter's are those of
        `nnx.state(engine.drafter)`.

        Raises:
          EngineError: the engine is closed.
        """
        # With variables of its own, so that changing the tree changes nothing here.
        return jax.tree.map(lambda array: array, nnx.state(self.target))

    @property
    def target(self) -> Target:
        """The target network, with the present weights.

        Raises:
          EngineError: the engine is closed.
        """
        return self._network("target")

    @property
    def drafter(self) -> Drafter:
        """The drafter, with the present weights.

        Raises:
          EngineError: the engine is closed.
        """
        return self._network("drafter")

    def _network(self, name: str) -> Any:
        network = vars(self.core).get(name)
        if network is None:
            raise self.core.error or EngineError("the engine is closed")
        return network

    def forget_prefixes(self) -> None:
        """Empties the prefix cache: later prompts are computed from their first token.

        Raises:
          EngineError: the engine is closed.
        """
        self._thread.put(lambda core: core.scheduler.pages.clear())

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Waits until nothing is queued, running or in flight; False if that took over `timeout` seconds.

        Raises:
          EngineError: the engine is closed.
        """
        return self._thread.wait_idle(timeout)

    def prepare(self, *kinds: Kind) -> None:
        """Compiles the programs for what requests may ask for beside tokens; returns once all that are needed
        are there. Otherwise the first request that asks waits for them.

        Requests may then ask for all of these together, too. Smaller programs follow in the background.

        Args:
          kinds: "logprobs"; "json", also for `regex` and `choice`; "penalties"; "bias", for `logit_bias` and
            `min_tokens`; "words", for `bad_words` and `no_repeat_ngram_size`.

        Raises:
          ValueError: a kind is not known, or "json" is not supported without a tokenizer.
          EngineError: the engine has been closed meanwhile.
        """
        wanted = Asked.of_kinds(kinds)
        if wanted.constraints & Constraints.GRAMMAR:
            self.core.grammars.read_vocabulary()
        if wanted != Asked():
            self.core.preparation.prepare(wanted)

    def wait_prepared(self, timeout: float | None = None) -> bool:
        """Waits until all programs are compiled and warm; False after `timeout` seconds, or if the engine is
        closed or has failed.

        Until then, a request may run in a larger program than it needs, or wait for a first run of one. A
        benchmark should wait; a user need not. Requests that keep the engine busy delay the end of it.
        """
        return self._thread.wait_prepared(timeout) and self.core.error is None

    def close(self) -> None:
        """Aborts all requests and frees the device's memory, also that of the weights.

        Later requests raise EngineError.
        """
        self._thread.close()

    @property
    def programs(self) -> Programs:
        """The compiled programs, for their HLO and their memory analysis."""
        return self.core.programs

    @property
    def counters(self) -> Counters:
        """The work done so far, and how much of it was useful."""
        return replace(self.core.counters, compiles=len(self.programs.compiled))

    def default_params(self, **sampling: Unpack[SamplingOptions]) -> SamplingParams:
        """The sampling that the model's makers recommend in its `generation_config.json`.

        It is used only where it is asked for: `engine.generate(prompt, engine.default_params(seed=1))`.

        Args:
          **sampling: fields of `SamplingParams` in place of these.

        Raises:
          ValueError: a value, of the file or of the arguments, is bad.
        """
        return SamplingParams.merge(None, {**generation_defaults(self._generation), **sampling})

    def metrics(self) -> dict[str, Metric]:
        """What the engine has done and is doing, by the names of vLLM's metrics, without its prefix "vllm:".

        "spec_decode_num_accepted_tokens_per_pos", "time_to_first_token_seconds" and others, of all clients
        together; every count is of all requests since the engine was made that have ended.
        """
        scheduler, pages = self.core.scheduler, self.core.scheduler.pages
        return metrics(
            self.core.totals,
            self.core.counters,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            cache_usage=1 - pages.num_free / pages.num_pages,
        )

    @property
    def max_pending(self) -> int:
        """The number of requests that keeps every slot busy: for each slot one running and one waiting."""
        return 2 * self.config.batch_size

    def room(self, num_prompt_tokens: int) -> int:
        """The most tokens that an answer to a prompt of so many tokens may have."""
        positions = min(self.max_model_len, self.config.num_pages * self.config.page_size)
        return positions - num_prompt_tokens

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        is_streamed: bool = False,
        id: int | str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        **how: Unpack[PromptOptions],
    ) -> Request:
        """Checks a prompt and its parameters, and makes a request from them.

        The first request that asks for log-probabilities or for a kind of constraint waits here until
        programs that have it are compiled; other requests go on meanwhile.

        Args:
          raw, chat_template_kwargs, continue_final_message, special_tokens_as_text: as in `generate`.
          is_streamed: deliver the answer piece by piece; otherwise as one piece when it has ended.
          id: a name for the request; by default a number, counted from 0.
          priority: larger values are served first, equal ones in the order of arrival.
          deadline: seconds from now after which the request is aborted; None for no limit.

        Raises:
          ValueError: as `generate`, or the priority is not an integer, or the deadline not above 0.
        """
        if unknown := split_options(how)[1]:
            raise TypeError(f"make_request() got an unexpected keyword argument {next(iter(unknown))!r}")
        ids = encode_prompt(
            prompt, self.tokenizer, vocab_size=self.vocab_size, max_tokens=self.max_model_len, **how
        )
        max_new_tokens = num_new_tokens(params, len(ids), self.config)
        check_mode(params, self.core.preparation.modes)
        drafts = num_drafts(params, self.num_speculative_tokens, is_adaptive=self.is_adaptive)
        ends = stop_tokens(params, self.tokenizer, self.eos_token_ids, self.vocab_size)
        check_biases(params, self.vocab_size)
        priority, deadline = plain_number(priority), plain_number(deadline)
        if not isinstance(priority, Integral):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        if deadline is not None and not (isinstance(deadline, Real) and deadline > 0):
            raise ValueError(f"deadline must be a number of seconds above 0, got {deadline!r}")
        grammar = self.core.grammars.compiled(params.grammar) if params.grammar else None
        if (wanted := Asked.of(params)) != Asked():
            self.core.preparation.prepare(wanted, [required_mode(params)])
        return Request(
            prompt=ids,
            params=params,
            max_new_tokens=max_new_tokens,
            stop_tokens=ends,
            bad_words=bad_words(params, self.tokenizer, self.vocab_size),
            grammar=grammar,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            tokenizer=self.tokenizer,
            num_drafts=drafts,
            is_streamed=is_streamed,
            id=next(self._ids) if id is None else id,
            priority=priority,
            # A huge integer is no float.
            deadline=None if deadline is None else monotonic() + min(deadline, 1e9),
        )

    def _answer(self, call: Call[Result]) -> Result:
        """Queues the requests of a call at once, waits for their ends, and returns the call's result."""
        ended: SimpleQueue[Request | None] = SimpleQueue()
        try:
            self.submit(call.requests, lambda request: partial(_put, ended, request))
            for _ in call.requests:
                ended.get()
        finally:
            self.abort(*call.requests)
        return call.finish([self.checked(request.generation()) for request in call.requests])

    def _stream(self, request: Request) -> Iterator[Delta]:
        pieces: SimpleQueue[Delta] = SimpleQueue()
        try:
            self.submit([request], lambda request: pieces.put)
            while True:
                piece = pieces.get()
                if piece.generation is not None:
                    self.checked(piece.generation)
                yield piece
                if piece.generation is not None:
                    return
        finally:
            self.abort(request)


def parse_modes(sampling_modes: Sequence[str | SamplingMode]) -> tuple[SamplingMode, ...]:
    """The decode programs to compile, the least mode first.

    Raises:
      ConfigError: no mode is named, or one that does not exist.
    """
    known = {"greedy": (SamplingMode.GREEDY,), "sampled": modes_for_sampling()}
    unknown = [mode for mode in sampling_modes if not isinstance(mode, SamplingMode) and mode not in known]
    if unknown or not sampling_modes or isinstance(sampling_modes, str):
        raise ConfigError(f"sampling_modes must be some of {list(known)}, got {sampling_modes!r}")
    named = ((mode,) if isinstance(mode, SamplingMode) else known[mode] for mode in sampling_modes)
    return tuple(sorted(set().union(*named)))


def _put(queue: SimpleQueue[Request | None], request: Request, piece: Delta) -> None:
    queue.put(request)
