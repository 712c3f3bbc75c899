"""Runs one answer step by step from Python, and records what the compiled programs do not show.

The phases are those of `engine/device/step.py`: draft, verify, accept, refresh. Here each phase, and each
draft of the draft loop, is a program of its own, so that intermediate results can be recorded and phases
timed. Tokens and acceptance are the same as in the compiled step.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from statistics import median
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.attention import LayerCache, PagedMemory, PageTable, RowBlock, join_rows
from jaxspec.checkpoints import Tokenizer
from jaxspec.config import ResolvedEngineConfig
from jaxspec.drafters.base import Context, HostPropose, Proposal, Rows
from jaxspec.drafters.checks import checked_proposal
from jaxspec.engine import Engine, EngineError, Generation, Request
from jaxspec.engine.compilation_cache import compilation_cache
from jaxspec.engine.device.state import MAX_STOP_TOKENS, Batch, Chunks, Emitted, EngineState, init_state
from jaxspec.engine.device.step import Models, accept, commit_emitted, engine_step, refresh
from jaxspec.engine.host import show
from jaxspec.engine.programs import Programs
from jaxspec.engine.prompts import Prompt
from jaxspec.errors import optional
from jaxspec.sampling import (
    SamplingMode,
    SamplingParams,
    SamplingState,
    process_logits,
    required_mode,
    seed_words,
)

if TYPE_CHECKING:  # optional, and slow to import
    import pandas

PHASES = ("draft", "verify", "accept", "refresh")
Fate = Literal["accepted", "rejected", "bonus", "not reached", "no draft"]
COLOURS: dict[Fate, str] = {
    "accepted": show.COLOURS["accepted"],
    "rejected": show.COLOURS["recovered"],
    "bonus": show.COLOURS["bonus"],
    "not reached": show.COLOURS["plain"],
    "no draft": show.COLOURS["plain"],
}


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
      seconds: the time of each phase, by its name in `PHASES`.
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
        return optional("pandas", extra="notebooks").DataFrame(rows)

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
        before = show.token(self.text(self.last_token), "plain", "the last token")
        places = "".join(self._place_html(place, fate) for place, fate in enumerate(self.fates))
        return (
            f"<div>after {before} at position {self.position}"
            f'<div style="display:flex;flex-wrap:wrap;gap:1.5em">{places}</div></div>'
        )

    def _place_html(self, place: int, fate: Fate) -> str:
        colour = COLOURS[fate]
        title = f"draft {place}" if place < len(self.draft_tokens) else "after the drafts"
        rows = "".join(
            f'<tr><td style="text-align:left">{self._candidate_html(row, fate)}</td>'
            f"<td>{show.bar(row['draft'] or 0.0, colour + '80')}</td>"
            f"<td>{show.bar(row['target'], colour)}</td><td>{row['target']:.2f}</td></tr>"
            for row in self.candidates(place)
        )
        head = "<tr><th></th><th>draft</th><th>target</th><th></th></tr>"
        return f"<div><b>{title}</b>, {fate}<table>{head}{rows}</table></div>"

    def _candidate_html(self, row: Mapping[str, Any], fate: Fate) -> str:
        if row["is_own"]:
            own = {"bonus": "bonus", "no draft": "plain"}.get(fate, "recovered")
            return show.token(row["text"], own, "the target's own")
        if row["is_draft"]:
            return show.token(row["text"], "accepted" if row["is_accepted"] else "plain", "the draft")
        return escape(row["text"])


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
        return {phase: 1e3 * median(step.seconds[phase] for step in timed) for phase in PHASES if timed}


def inspect_steps(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams | None = None,
    *,
    raw: bool = False,
    **sampling: Any,
) -> Inspection:
    """Answers one prompt step by step and records every step.

    It shares only the weights with the engine and has a cache of its own. Every step stores 2 K + 1
    distributions over the vocabulary; K is the drafter's, or the request's own.

    Args:
      engine: an engine on one device.
      prompt, params, raw, **sampling: as in `Engine.generate`.

    Raises:
      ValueError: as in `Engine.generate`.
      EngineError: the engine is closed.
    """
    if engine.core.error is not None:
        raise EngineError(str(engine.core.error))
    request = engine.make_request(prompt, SamplingParams.merge(params, sampling), raw=raw)
    with compilation_cache():
        run = _Run(engine, request)
        steps = []
        run.read_prompt()
        while request.finish_reason is None:
            steps.append(run.step())
    return Inspection(steps, request.generation())


class _Phases:
    """The phases of a step as programs, for one engine's weights and one sampling mode.

    Attributes:
      num_drafts: K.
      propose: maps context and the drafter's cache to a proposal and the cache, one program per draft.
      read, verify, accept, refresh, distributions: the functions below, compiled and without the argument
        `models`.
    """

    def __init__(self, programs: Programs, mode: SamplingMode):
        self._graph, self._treedef, self._leaves = programs.graph, programs.treedef, programs.leaves
        models = self.models = self._merge(self._leaves)
        self.num_drafts = models.drafter.num_speculative_tokens
        config = programs.config
        self.read = self._program(partial(_read, config=config))
        self.verify = self._program(_verify)
        self.accept = self._program(partial(_accept, config=config, mode=mode), donates=False)
        self.refresh = self._program(_refresh)
        self.distributions = self._program(partial(_distributions, mode=mode), donates=False)
        self.propose: HostPropose = _propose_nothing
        if self.num_drafts:
            self.propose = models.drafter.host_propose(self._compiled, mode=mode)

    def _merge(self, leaves: Any) -> Models:
        return nnx.merge(self._graph, jax.tree.unflatten(self._treedef, leaves))

    def _program(self, function: Callable[..., Any], *, donates: bool = True) -> Callable[..., Any]:
        def program(leaves: Any, state: EngineState, *args: Any) -> Any:
            return function(self._merge(leaves), state, *args)

        return partial(jax.jit(program, donate_argnums=1 if donates else ()), self._leaves)

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def program(leaves: Any, context: Any, state: Any, *rest: Any) -> Any:
            models = self._merge(leaves)
            return function(models.drafter, models.target, context, state, *rest)

        return partial(jax.jit(program, donate_argnums=2), self._leaves)


_PHASES: WeakKeyDictionary[Programs, dict[SamplingMode, _Phases]] = WeakKeyDictionary()
"""The phases of every inspected engine, so that inspecting it again compiles nothing."""


class _Run:
    """One request, with a state of its own."""

    def __init__(self, engine: Engine, request: Request):
        self.request = request
        mode = max(required_mode(request.params), SamplingMode.TEMPERATURE)
        if engine.programs not in _PHASES:
            engine.core.when_closed.append(partial(_PHASES.pop, engine.programs, None))
        made = _PHASES.setdefault(engine.programs, {})
        if mode not in made:
            made[mode] = _Phases(engine.programs, mode)
        self.phases = made[mode]
        models = self.phases.models
        pages = engine.config.table_width
        # The same pages as in the engine, since what a drafter sees may end with the last one.
        own = engine.core.scheduler.pages.pages_for(len(request.prompt) + request.max_new_tokens)
        page = jnp.arange(1, pages + 1, dtype=jnp.int32)
        config = replace(engine.config, batch_size=1, num_pages=pages)
        self.chunk_size = config.prefill_chunk
        mesh = engine.programs.leaves[0].sharding.mesh
        self.state = init_state(models.target, models.drafter, config, mesh=mesh)
        stop_tokens = np.full((1, MAX_STOP_TOKENS), -1, np.int32)
        stop_tokens[0, : len(request.stop_tokens)] = request.stop_tokens
        sampled = request.params
        limit = self.phases.num_drafts if request.num_drafts is None else request.num_drafts
        self.batch = Batch(
            slot=jnp.zeros(1, jnp.int32),
            is_decoding=jnp.ones(1, bool),
            limit=jnp.full(1, limit, jnp.int32),
            steps=jnp.ones(1, jnp.int32),
            page_table=PageTable(jnp.where(page <= own, page, 0)[None], config.page_size),
            stop_tokens=jnp.asarray(stop_tokens),
            sampling=SamplingState(
                temperature=jnp.full(1, sampled.temperature, jnp.float32),
                top_k=jnp.full(1, min(sampled.top_k, np.iinfo(np.int32).max), jnp.int32),
                top_p=jnp.full(1, sampled.top_p, jnp.float32),
                min_p=jnp.full(1, sampled.min_p, jnp.float32),
                seed=jnp.asarray([seed_words(request.seed)], jnp.uint32),
            ),
        )

    def read_prompt(self) -> None:
        """Reads the prompt chunk by chunk and appends the answer's first token."""
        prompt, size = self.request.prompt, self.chunk_size
        for start in range(0, len(prompt), size):
            chunk = prompt[start : start + size + 1]
            tokens = np.zeros((1, size + 1), np.int32)
            tokens[0, : len(chunk)] = chunk
            is_last = start + size >= len(prompt)
            chunks = Chunks(
                batch_index=jnp.zeros(1, jnp.int32),
                tokens=jnp.asarray(tokens[:, :-1]),
                next_tokens=jnp.asarray(tokens[:, 1:]),
                start=jnp.full(1, start, jnp.int32),
                count=jnp.full(1, min(len(prompt) - start, size), jnp.int32),
                is_last=jnp.full(1, is_last),
                given_token=jnp.full(1, -1, jnp.int32),
                remaining=jnp.full(1, self.request.max_new_tokens, jnp.int32),
            )
            self.state, first = self.phases.read(self.state, self.batch, chunks)
        self._take([int(first.token[0])], done=bool(first.done[0]), failed=bool(first.failed[0]))

    def step(self) -> Step:
        """Runs the four phases of a step and appends the emitted tokens to the request."""
        seconds: dict[str, float] = {}

        def timed(phase: str, call: Callable[..., Any], *args: Any) -> Any:
            began = time.perf_counter()
            result = jax.block_until_ready(call(*args))
            seconds[phase] = time.perf_counter() - began
            return result

        position = int(self.state.length[0])
        last_token = int(self.state.history[0, position])
        phases, batch = self.phases, self.batch
        context = self.state.context(batch)
        target, drafter, cache = phases.models.target, phases.models.drafter, self.state.draft_cache
        proposed = timed("draft", phases.propose, context, cache)
        proposal, cache = checked_proposal(drafter, target, context, cache, proposed)
        proposal = replace(proposal, count=jnp.minimum(proposal.count, batch.limit))
        state = replace(self.state, draft_cache=cache)
        state, logits, rows = timed("verify", phases.verify, state, batch, proposal)
        emitted, num_accepted = timed("accept", phases.accept, state, batch, proposal, logits)
        drawn, judged = phases.distributions(state, batch, proposal, logits)
        self.state = timed("refresh", phases.refresh, state, batch, rows, emitted, num_accepted)
        count, accepted = int(proposal.count[0]), int(num_accepted[0])
        tokens = emitted.tokens[0].tolist()
        kept = tokens[: int(emitted.num_tokens[0])]
        self._take(kept, [(count, accepted)], done=bool(emitted.done[0]), failed=bool(emitted.failed[0]))
        return Step(
            position=position,
            last_token=last_token,
            draft_tokens=proposal.tokens[0, :count].tolist(),
            draft_probabilities=np.asarray(drawn[0, :count]),
            target_probabilities=np.asarray(judged[0, : count + 1]),
            num_accepted=accepted,
            token=tokens[accepted],
            tokens=kept,
            seconds=seconds,
            tokenizer=self.request.tokenizer,
        )

    def _take(
        self, tokens: list[int], verified: Sequence[tuple[int, int]] = (), *, done: bool, failed: bool
    ) -> None:
        if tokens:
            self.request.append(tokens, verified, ended=done and not failed)
        if failed:
            self.request.end("failed", "the target's logits are NaN or infinite")


def _propose_nothing(context: Context, cache: tuple[LayerCache, ...]) -> tuple[Proposal, tuple]:
    nothing = jnp.zeros((len(context.length), 0), jnp.int32)
    return Proposal(nothing, jnp.zeros_like(context.length), None), cache


def _read(
    models: Models, state: EngineState, batch: Batch, chunks: Chunks, *, config: ResolvedEngineConfig
) -> Any:
    state, output = engine_step(models, state, batch, chunks, config=config, mode=None)
    return state, output.first


def _verify(models: Models, state: EngineState, batch: Batch, proposal: Proposal) -> Any:
    """Runs the target over the last token and the drafts; returns state, logits [1, K+1, V] and rows."""
    tokens = jnp.concatenate([state.context(batch).last_token[:, None], proposal.tokens], axis=1)
    positions = state.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    valid = jnp.broadcast_to(state.active[:, None], positions.shape)
    block = RowBlock(positions, valid, batch.page_table)
    hidden, captured, memory = models.target(
        join_rows([tokens]),
        join_rows([positions]),
        PagedMemory.build(models.target.kinds, state.target_cache, (block,)),
        capture=models.drafter.capture,
    )
    logits = models.target.logits(hidden).reshape(*tokens.shape, -1)
    features = hidden if models.drafter.reads_hidden else None
    rows = Rows(join_rows([tokens]), join_rows([tokens]), features, captured, (block,))
    return replace(state, target_cache=memory.caches), logits, rows


def _accept(
    models: Models,
    state: EngineState,
    batch: Batch,
    proposal: Proposal,
    logits: jax.Array,
    *,
    config: ResolvedEngineConfig,
    mode: SamplingMode,
) -> tuple[Emitted, jax.Array]:
    return accept(
        logits,
        state,
        batch,
        proposal,
        models.drafter,
        config=config,
        mode=mode,
        vocab_size=models.target.config.vocab_size,
    )


def _refresh(
    models: Models, state: EngineState, batch: Batch, rows: Rows, emitted: Emitted, num_accepted: jax.Array
) -> EngineState:
    """Refreshes the drafter with the rows of committed tokens, and advances the slot."""
    (block,) = rows.blocks
    if block.shape[1] == 1:  # plain decoding leaves the drafter as it is
        return commit_emitted(state, emitted, state.hidden)
    stands = block.valid & (jnp.arange(block.shape[1]) <= num_accepted[:, None])
    block = replace(block, valid=stands, output=num_accepted)
    rows = replace(rows, next_tokens=join_rows([emitted.tokens]), blocks=(block,))
    hidden, state = refresh(models, state, rows)
    return commit_emitted(state, emitted, hidden)


def _distributions(
    models: Models,
    state: EngineState,
    batch: Batch,
    proposal: Proposal,
    logits: jax.Array,
    *,
    mode: SamplingMode,
) -> tuple[jax.Array, jax.Array]:
    """The drafts' and the target's distributions, f32[1, K, V] and f32[1, K+1, V]."""
    target = jax.nn.softmax(process_logits(logits, batch.sampling, mode=mode))
    size, vocabulary = logits.shape[-1], models.drafter.draft_vocab
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
