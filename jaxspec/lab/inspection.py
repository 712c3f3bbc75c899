"""Runs one answer step by step from Python, and records what the compiled programs do not show.

The phases are those of `engine/device/step.py`. Here each phase, and each draft of a draft loop, is a program
of its own, so that intermediate results can be recorded and phases timed. Tokens and acceptance are the same
as in the compiled step of an engine with one slot.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, Unpack
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.engine import Engine, EngineError, Generation, Request
from jaxspec.engine.api.prompts import Prompt
from jaxspec.engine.api.samples import Params
from jaxspec.engine.device.compilation_cache import compilation_cache
from jaxspec.engine.device.oracle import Oracle
from jaxspec.engine.device.outcome import results
from jaxspec.engine.device.plan import Plan, Size, pack
from jaxspec.engine.device.programs import Programs
from jaxspec.engine.device.state import init_state
from jaxspec.engine.device.step import PHASES, Carry, Group, Models, constrain
from jaxspec.engine.host.grammars import GrammarStore, PlacedGrammar
from jaxspec.engine.host.pages import PagePool
from jaxspec.engine.host.scheduler import Dispatch, Result, Scheduler
from jaxspec.engine.rounds.options import AskOptions, split_options
from jaxspec.files import Tokenizer
from jaxspec.jax_settings import own_settings
from jaxspec.lab import show
from jaxspec.sampling import SamplingMode, SamplingParams, process_logits, required_mode
from jaxspec.sharding import replicated

if TYPE_CHECKING:  # optional, and slow to import
    import pandas

Fate = Literal["accepted", "rejected", "bonus", "not reached", "no draft"]


@dataclass(frozen=True)
class Step:
    """One step: its drafts, the drafter's and the target's probabilities, and what was emitted.

    Attributes:
      position: position of `last_token`.
      last_token: the last token before the step, which the target reads first.
      draft_tokens: the K' drafts, at most K.
      draft_probabilities: f32[K', V], the distribution that each draft was drawn from; one-hot if the drafter
        has no distribution.
      target_probabilities: f32[K' + 1, V], the target's distribution at each draft's place and after the last
        draft. At temperature 0 these are the probabilities at temperature 1, and a draft is accepted if it
        is the most likely token.
      num_accepted: how many leading drafts were accepted.
      token: the target's token after them: recovered if a draft was rejected, a bonus token otherwise.
      tokens: the emitted tokens: the accepted drafts and `token`, cut at a stop or a length limit.
      seconds: the time of each phase of `engine/device/step.py`, by its name.
      tokenizer: turns ids into text; None if the checkpoint has none.
    """

    position: int
    last_token: int
    draft_tokens: list[int]
    draft_probabilities: np.ndarray = field(repr=False)
    target_probabilities: np.ndarray = field(repr=False)
    num_accepted: int
    token: int
    tokens: list[int]
    seconds: Mapping[str, float]
    tokenizer: Tokenizer | None = field(default=None, repr=False)

    @property
    def accepted(self) -> list[bool]:
        """Whether each draft was accepted."""
        return [i < self.num_accepted for i in range(len(self.draft_tokens))]

    def text(self, token: int) -> str:
        """A token as text, special tokens by name; its id if there is no tokenizer."""
        if self.tokenizer is None:
            return str(token)
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def candidates(self, place: int, most: int = 5) -> list[dict[str, Any]]:
        """The most likely tokens at a place, of the drafter and of the target, by the target's probability.

        They include the draft and, at the first place without an accepted draft, the target's token.

        Args:
          place: 0 to K' - 1 for the drafts; K' for the place after the last draft.
          most: the number of tokens from each side.

        Returns:
          For each token: place, token_id, text, the probabilities "target" and "draft" (None after the last
          draft), and whether it is the draft, an accepted draft, and the target's token.
        """
        target = self.target_probabilities[place]
        is_draft = place < len(self.draft_tokens)
        drafted = self.draft_probabilities[place] if is_draft else np.zeros_like(target)
        likely = [*_largest(target, most), *(_largest(drafted, most) if is_draft else ())]
        if is_draft:
            likely.append(self.draft_tokens[place])
        if place == self.num_accepted:
            likely.append(self.token)
        return [
            {
                "place": place,
                "token_id": token,
                "text": self.text(token),
                "target": float(target[token]),
                "draft": float(drafted[token]) if is_draft else None,
                "is_draft": is_draft and token == self.draft_tokens[place],
                "is_accepted": place < self.num_accepted and token == self.draft_tokens[place],
                "is_own": place == self.num_accepted and token == self.token,
            }
            for token in sorted(dict.fromkeys(likely), key=lambda token: -target[token])
        ]

    def to_pandas(self, most: int = 5) -> "pandas.DataFrame":
        """The candidates of all places, one row per candidate.

        Raises:
          ModuleNotFoundError: pandas is not installed.
        """
        places = range(len(self.draft_tokens) + 1)
        rows = [row for place in places for row in self.candidates(place, most)]
        return show.frame(rows)

    @property
    def fates(self) -> list[Fate]:
        """What happened at each draft's place and after the last draft.

        Places after a rejected draft are "not reached": the target's output there belongs to a text that was
        discarded.
        """
        if not self.draft_tokens:
            return ["no draft"]
        left = len(self.draft_tokens) - self.num_accepted
        accepted: list[Fate] = ["accepted"] * self.num_accepted
        if not left:
            return [*accepted, "bonus"]
        beyond: list[Fate] = ["not reached"] * left
        return [*accepted, "rejected", *beyond]

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        candidates = [self.candidates(place) for place in range(len(self.fates))]
        return show.step(self.text(self.last_token), self.position, self.fates, candidates)


@dataclass(frozen=True)
class Inspection:
    """An answer with all of its steps.

    Attributes:
      steps: the steps in order.
      generation: the answer, as the engine would have given it.
    """

    steps: list[Step]
    generation: Generation

    def phases(self) -> dict[str, float]:
        """Milliseconds of each phase: the median over all steps but the first, which compiles."""
        timed = self.steps[1:] or self.steps
        names = [phase.__name__ for phase in PHASES]
        return {phase: 1e3 * median(step.seconds[phase] for step in timed) for phase in names if timed}


def inspect_steps(
    engine: Engine,
    prompt: Prompt,
    params: Params = None,
    **options: Unpack[AskOptions],
) -> Inspection:
    """Answers one prompt step by step and records every step.

    It shares only the weights with the engine and has a cache of its own. Every step stores 2 K + 1
    distributions over the vocabulary; K is the drafter's, or the request's own.

    Args:
      engine: an engine on one device.
      prompt, params, raw, chat_template_kwargs, continue_final_message, special_tokens_as_text,
        **sampling: as in `Engine.generate`.

    Raises:
      ValueError: as in `Engine.generate`.
      EngineError: the engine is closed, also meanwhile.
    """
    if engine.core.error is not None:
        raise EngineError(str(engine.core.error))
    how, sampling = split_options(options)
    request = engine.make_request(prompt, SamplingParams.merge(params, sampling), **how)
    try:
        with own_settings(engine.core.device), compilation_cache(), engine.core.weights_lock:
            steps = list(_Run(engine, request).steps())
    except Exception:
        if engine.core.error is not None:  # closed meanwhile, by another thread: the weights are gone
            raise EngineError(str(engine.core.error)) from None
        raise
    return Inspection(steps, request.generation())


_ORACLES: WeakKeyDictionary[Programs, Oracle] = WeakKeyDictionary()
"""The oracle of every inspected engine, so that inspecting it again compiles nothing."""


class _Run:
    """One request, with a scheduler, a state and a cache of its own."""

    def __init__(self, engine: Engine, request: Request):
        self.request = request
        self.mode = max(required_mode(request.params), SamplingMode.TEMPERATURE)
        if engine.programs not in _ORACLES:
            engine.core.when_closed.append(partial(_ORACLES.pop, engine.programs, None))
            _ORACLES[engine.programs] = Oracle(engine.programs)
        self.oracle = _ORACLES[engine.programs]
        self.oracle.renew()
        models = self.oracle.models
        self.config = replace(engine.config, batch_size=1, num_pages=engine.config.table_width)
        mesh = engine.programs.mesh
        self.state = init_state(models.target, models.drafter, self.config, mesh=mesh)
        # With a slab of its own, as the engine's belongs to the engine's thread.
        self.grammars = GrammarStore(None, engine.vocab_size, (), replicated(mesh))
        if request.grammar is not None:
            self.grammars.prepare()
            request.grammar = PlacedGrammar(request.grammar.automaton, request.grammar.packed)
        self.scheduler = Scheduler(
            batch_size=1,
            pages=PagePool(self.config.num_pages, self.config.page_size),
            steps=1,
            tokens_per_step=models.drafter.num_speculative_tokens + 1,
            chunk_size=self.config.prefill_chunk,
            max_chunks=1,
            prefix_caching=False,
            weights_version=engine.weights_version,
            hold_grammar=self.grammars.hold,
        )
        self.scheduler.add(request)

    def steps(self) -> Iterator[Step]:
        """Reads the prompt chunk by chunk, and then yields every step."""
        while self.scheduler:
            for dispatch in self.scheduler.plan():
                if dispatch.decodes:
                    yield self.step(dispatch)
                else:
                    plan = self.plan(dispatch, Size(1, len(dispatch.chunks)).doing(self.request.asked))
                    self._commit(dispatch, self.oracle.step(plan, self.state.gather(plan)))

    def plan(self, dispatch: Dispatch, size: Size) -> Plan:
        """The plan of a dispatch, as the engine packs it."""
        words = jnp.asarray(pack(dispatch, size, self.config))
        return Plan.unpack(words, size, self.config, self.grammars.slab)

    def step(self, dispatch: Dispatch) -> Step:
        """Runs a step phase by phase, and appends the emitted tokens to the request."""
        seconds: dict[str, float] = {}
        seen: list[tuple[Carry, Any]] = []

        def watch(phase: str, run: Callable[[], Carry]) -> Carry:
            began = time.perf_counter()
            carry = jax.block_until_ready(run())
            seconds[phase] = time.perf_counter() - began
            if phase == "verify":
                seen.append((carry, self.oracle.call(_distributions, carry.groups[0], carry.logits[0])))
            return carry

        plan = self.plan(dispatch, Size(1, 0, self.mode, dispatch.drafts + 1).doing(self.request.asked))
        position = int(self.state.length[0])
        carry = self.oracle.step(plan, self.state.gather(plan), watch)
        (verified, (drawn, judged)), outcome = seen[0], carry.outcomes[0]
        result = self._commit(dispatch, carry)
        tokens, count = verified.groups[0].tokens[0].tolist(), int(verified.proposal.count[0])
        accepted = int(outcome.accepted[0])
        return Step(
            position=position,
            last_token=tokens[0],
            draft_tokens=tokens[1 : count + 1],
            draft_probabilities=np.asarray(drawn[0, :count]),
            target_probabilities=np.asarray(judged[0, : count + 1]),
            num_accepted=accepted,
            token=int(outcome.tokens[0, accepted]),
            tokens=result.tokens,
            seconds=seconds,
            tokenizer=self.request.tokenizer,
        )

    def _commit(self, dispatch: Dispatch, carry: Carry) -> Result:
        self.state = carry.state
        (result,) = results(jax.tree.map(lambda x: x[None], carry.outcomes[0]))
        self.scheduler.commit(dispatch, *(([result], []) if dispatch.decodes else ([], [result])))
        return result


def _distributions(models: Models, _: Any, group: Group, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The drafts' and the target's distributions, f32[1, K, V] and f32[1, K+1, V]."""
    if group.constrained.asked:
        logits = constrain(models, group, logits)
    target = jax.nn.softmax(process_logits(logits, group.sampling, mode=group.mode))
    size, vocabulary, proposal = logits.shape[-1], models.drafter.draft_vocab, group.proposal
    if proposal.logits is None:
        return jax.nn.one_hot(proposal.tokens, size), target
    drawn = jax.nn.softmax(proposal.logits)
    if vocabulary is not None:
        known = jnp.take(drawn, jnp.maximum(vocabulary.draft_ids, 0), axis=-1)
        drawn = jnp.where(vocabulary.draft_ids >= 0, known, 0.0)
    return drawn, target


def _largest(probabilities: np.ndarray, most: int) -> list[int]:
    """The ids of the `most` largest probabilities above 0, the largest first."""
    order = np.argsort(-probabilities, kind="stable")[:most]
    return [int(token) for token in order if probabilities[token] > 0]
