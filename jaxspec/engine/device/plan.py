"""The plan of a dispatch, which reaches the device as one array, since each array costs the host time.

A table of fields gives every field's place. What the host fills, and what a program reads, are views of the
same places.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.attention import PageTable, StatePlaces
from jaxspec.config import ResolvedEngineConfig
from jaxspec.engine.host.request import Request
from jaxspec.engine.host.scheduler import Dispatch
from jaxspec.sampling import (
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIAS,
    Asked,
    Constraints,
    ConstraintState,
    Logprobs,
    SamplingMode,
    SamplingState,
    seed_words,
)

MAX_STOP_TOKENS = 16
"""The most stop tokens of a request, the model's own end-of-sequence tokens included."""

_ALIGNED = 4
"""Fields start at a multiple of so many words. XLA passes a field to a kernel without copying it, and
Triton's kernels expect arrays to start at a multiple of 16 bytes."""
_LARGEST = np.iinfo(np.int32).max
NO_GRAMMARS = np.zeros(0, np.int32)
"""In place of the slab of grammars, for programs without them."""


@dataclass(frozen=True)
class Size:
    """What a program is compiled for; a larger size also serves any smaller need.

    Attributes:
      slots: b, the slots that it serves.
      chunks: G, the chunks of prompts that it reads in its first step; 0 for none.
      mode: the most general sampling of the slots that decode.
      width: K + 1, the rows of the target's pass for every slot that decodes, without those for tokens that a
        grammar forces; 1 is plain decoding, without the drafter, and 0 decodes nothing.
      logprobs: what it reports of the distributions of emitted tokens.
      constraints: those that it applies. A program that reports or constrains serves no dispatch which needs
        neither.
      scores: what it reports of every token of the texts that it reads; such a program emits none.
      layers: the hidden states that it returns beside that: those before a layer by its index, after the last
        layer by the number of layers, and after the final norm by one more.
    """

    slots: int
    chunks: int
    mode: SamplingMode = SamplingMode.GREEDY
    width: int = 0
    logprobs: Logprobs = Logprobs.NONE
    constraints: Constraints = Constraints.NONE
    scores: Logprobs = Logprobs.NONE
    layers: tuple[int, ...] = ()

    @property
    def drafts(self) -> int:
        """K."""
        return max(self.width - 1, 0)

    @property
    def is_asked(self) -> bool:
        """Whether it does what only those pay for who ask for it."""
        return bool(self.logprobs or self.constraints)

    def doing(self, asked: Asked) -> "Size":
        """This size, in a program that does what is asked for."""
        return replace(self, logprobs=asked.logprobs, constraints=asked.constraints)

    def serves(self, need: "Size") -> bool:
        """Whether a dispatch that needs the size `need` can run in a program of this size."""
        features = ("width", "chunks", "is_asked", "scores")
        if any(bool(getattr(self, name)) != bool(getattr(need, name)) for name in features):
            return False
        return (
            self.slots >= need.slots
            and self.chunks >= need.chunks
            and self.mode >= need.mode
            and self.width >= need.width
            and self.logprobs >= need.logprobs
            and need.constraints in self.constraints
            and self.scores >= need.scores
            and self.layers == need.layers
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chunks:
    """G chunks of prompts that one step reads; several may be consecutive chunks of one prompt.

    Attributes:
      index: i32[G], index among the b slots of the plan; past the last one for an unused chunk.
      tokens: i32[G, C].
      next_tokens: i32[G, C], the token after each in the prompt; ignored for the prompt's last token.
      start: i32[G], position of the first token.
      count: i32[G], tokens in the chunk; the rest of C is padding.
      is_last: bool[G], whether the chunk ends the prompt.
      given_token: i32[G], the token after the prompt if it is given; -1 if it is to be sampled.
      remaining: i32[G], tokens that the request may still emit, the token after the prompt included.
      source, copy: i32[G, 1], the places of the state that the chunk begins with, and of the copy of the one
        that it ends with, past the last for none; [G, 0] if no copies of states are kept.
    """

    index: jax.Array
    tokens: jax.Array
    next_tokens: jax.Array
    start: jax.Array
    count: jax.Array
    is_last: jax.Array
    given_token: jax.Array
    remaining: jax.Array
    source: jax.Array
    copy: jax.Array

    def states(self, slot: jax.Array) -> StatePlaces:
        """The states of the chunks, whose slots are given, i32[G]."""
        none = jnp.full_like(slot, _LARGEST)
        source, copy = (self.source[:, 0], self.copy[:, 0]) if self.source.size else (slot, none)
        return StatePlaces(slot, source, copy, slot[:0])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """The b slots that a dispatch serves, the parameters of their requests, and the prompts to read.

    Attributes:
      slot: i32[b], index of the slot; past the last slot for an unused entry.
      is_decoding: bool[b], whether the slot decodes in the first step; False if its prompt is read, and for
        an unused entry.
      limit: i32[b], the most drafts that may be accepted, tokens that a grammar forces behind them included;
        further ones count as not drawn.
      steps: i32[b], the steps to run, the same for every slot; unused entries have a large number.
      page_table: of shape [b, T].
      stop_tokens: i32[b, MAX_STOP_TOKENS], padded with -1.
      sampling: each slot's sampling parameters.
      is_processed: bool[b], whether log-probabilities are those of the distribution that was sampled from.
      constraints: what each slot's constraints need.
      grammars: i32[N], the slab that holds the automata of grammars; of size zero if the program has none.
      chunks: the chunks that the first step reads.
      size, config: what the program is compiled for; static.
    """

    slot: jax.Array
    is_decoding: jax.Array
    limit: jax.Array
    steps: jax.Array
    page_table: PageTable
    stop_tokens: jax.Array
    sampling: SamplingState
    is_processed: jax.Array
    constraints: ConstraintState
    grammars: jax.Array
    chunks: Chunks
    size: Size = field(metadata={"static": True})
    config: ResolvedEngineConfig = field(metadata={"static": True})

    @classmethod
    def unpack(
        cls,
        words: jax.Array,
        size: Size,
        config: ResolvedEngineConfig,
        grammars: jax.Array | np.ndarray = NO_GRAMMARS,
    ) -> "Plan":
        """Reads, inside a program, what `pack` packed."""

        def read(name: str) -> jax.Array:
            place = _places(size, config)[name]
            part = words[place.words].reshape(place.shape)
            if place.dtype is np.int32:
                return part
            return part > 0 if place.dtype is np.bool_ else lax.bitcast_convert_type(part, place.dtype)

        tokens = read("tokens")
        chunks = {name: read(name) for name in _FIELDS_OF_CHUNKS if name != "tokens"}
        return cls(
            slot=read("slot"),
            is_decoding=read("is_decoding"),
            limit=read("limit"),
            steps=read("steps"),
            page_table=PageTable(read("pages"), config.page_size),
            stop_tokens=read("stop_tokens"),
            sampling=SamplingState(*map(read, ("temperature", "top_k", "top_p", "min_p", "seed"))),
            is_processed=read("is_processed"),
            constraints=ConstraintState(size.constraints, *map(read, _FIELDS_OF_CONSTRAINTS))
            if size.constraints
            else ConstraintState.none(size.slots),
            grammars=cast(jax.Array, grammars),
            chunks=Chunks(tokens=tokens[:, :-1], next_tokens=tokens[:, 1:], **chunks),
            size=size,
            config=config,
        )

    def without_chunks(self) -> "Plan":
        """The plan of the steps after the one that reads prompts."""
        chunks = jax.tree.map(lambda of_chunk: of_chunk[:0], self.chunks)
        return replace(self, chunks=chunks, size=replace(self.size, chunks=0))


class _Field(NamedTuple):
    """A row of the table of fields.

    Attributes:
      dtype: of the numbers; each takes 32 bits.
      unused: what stands in an entry of the field that is not used.
      axis: the axis behind that of slots or chunks, "" for none.
    """

    dtype: Any = np.int32
    unused: int = 0
    axis: str = ""


_FIELDS_OF_SLOTS = {
    "slot": _Field(unused=_LARGEST),
    "is_decoding": _Field(np.bool_),
    "limit": _Field(),
    "steps": _Field(unused=_LARGEST),
    "temperature": _Field(np.float32),
    "top_k": _Field(),
    "top_p": _Field(np.float32),
    "min_p": _Field(np.float32),
    "seed": _Field(np.uint32, axis="words of a seed"),
    "is_processed": _Field(np.bool_),
    "stop_tokens": _Field(unused=-1, axis="stop tokens"),
    "pages": _Field(axis="pages"),
}
_FIELDS_OF_CONSTRAINTS = {
    "prompt_length": _Field(axis="some constraint"),
    "repetition_penalty": _Field(np.float32, unused=int(np.float32(1).view(np.int32)), axis="penalties"),
    "presence_penalty": _Field(np.float32, axis="penalties"),
    "frequency_penalty": _Field(np.float32, axis="penalties"),
    "bias_tokens": _Field(unused=-1, axis="biased tokens"),
    "bias_values": _Field(np.float32, axis="biased tokens"),
    "min_tokens": _Field(axis="tokens' constraints"),
    "bad_words": _Field(unused=-1, axis="bad words"),
    "bad_word_sizes": _Field(axis="bad words"),
    "no_repeat_ngram_size": _Field(axis="sequences"),
    "grammar": _Field(axis="grammars"),
}
"""Of slots, and in the order of `ConstraintState`; of size zero if the program does not need them."""
_FIELDS_OF_CHUNKS = {
    "index": _Field(unused=_LARGEST),
    "start": _Field(),
    "count": _Field(),
    "is_last": _Field(np.bool_),
    "given_token": _Field(),
    "remaining": _Field(),
    "source": _Field(axis="copies of states"),
    "copy": _Field(unused=_LARGEST, axis="copies of states"),
    # One token more than the chunk has, because the drafter pairs every row with the token after it.
    "tokens": _Field(axis="tokens"),
}


class _Place(NamedTuple):
    """Where a field stands among the words of a plan."""

    words: slice
    shape: tuple[int, ...]
    dtype: Any
    unused: int


@cache
def _places(size: Size, config: ResolvedEngineConfig) -> dict[str, _Place]:
    axes = {
        "words of a seed": 2,
        "stop tokens": MAX_STOP_TOKENS,
        "pages": config.table_width,
        "tokens": config.prefill_chunk + 1,
        "copies of states": int(config.state_copies > 0),
    }
    tokens, sequences = (
        int(kind in size.constraints) for kind in (Constraints.TOKENS, Constraints.SEQUENCES)
    )
    axes |= {
        "some constraint": int(bool(size.constraints)),
        "penalties": int(Constraints.PENALTIES in size.constraints),
        "tokens' constraints": tokens,
        "biased tokens": tokens * MAX_LOGIT_BIAS,
        "sequences": sequences,
        "bad words": sequences * MAX_BAD_WORD_TOKENS,
        "grammars": int(Constraints.GRAMMAR in size.constraints),
    }
    places, start = {}, 0
    of_slots = _FIELDS_OF_SLOTS | _FIELDS_OF_CONSTRAINTS
    for count, fields in ((size.slots, of_slots), (size.chunks, _FIELDS_OF_CHUNKS)):
        for name, (dtype, unused, axis) in fields.items():
            shape = (count, axes[axis]) if axis else (count,)
            stop = start + int(np.prod(shape))
            places[name] = _Place(slice(start, stop), shape, dtype, unused)
            start = -(-stop // _ALIGNED) * _ALIGNED
    return places


@cache
def _nothing(size: Size, config: ResolvedEngineConfig) -> np.ndarray:
    places = _places(size, config).values()
    words = np.zeros(max(place.words.stop for place in places), np.int32)
    for place in places:
        words[place.words] = place.unused
    return words


def empty_plan(size: Size, config: ResolvedEngineConfig) -> np.ndarray:
    """i32[N] for `Plan.unpack`, with no slot in any entry and no work in any chunk."""
    return _nothing(size, config).copy()


def view(words: np.ndarray, name: str, size: Size, config: ResolvedEngineConfig) -> np.ndarray:
    """A field of a plan, by its name in the tables above, for the host to fill."""
    return _view(words, _places(size, config)[name])


def _view(words: np.ndarray, place: _Place) -> np.ndarray:
    part = words[place.words]
    if place.dtype in (np.float32, np.uint32):
        part = part.view(place.dtype)
    return part if len(place.shape) == 1 else part.reshape(place.shape)


def pack(dispatch: Dispatch, size: Size, config: ResolvedEngineConfig) -> np.ndarray:
    """i32[N] for `Plan.unpack`; floats and seeds as their bits."""
    words, places = empty_plan(size, config), _places(size, config)

    views = {np.float32: words.view(np.float32), np.uint32: words.view(np.uint32)}

    def put(name: str, rows: list) -> None:
        part, shape, dtype, _ = places[name]
        if len(shape) > 1:
            _view(words, places[name])[: len(rows)] = rows
        else:
            views.get(dtype, words)[part.start : part.start + len(rows)] = rows

    batch, chunks = dispatch.batch, dispatch.chunks
    params = [running.request.params for running in batch]
    put("slot", [running.slot for running in batch])
    put("is_decoding", dispatch.is_decoding)
    put("limit", dispatch.limits)
    put("steps", [dispatch.steps] * len(batch))
    put("temperature", [of_request.temperature for of_request in params])
    put("top_k", [min(of_request.top_k, _LARGEST) for of_request in params])
    put("top_p", [of_request.top_p for of_request in params])
    put("min_p", [of_request.min_p for of_request in params])
    put("seed", [seed_words(running.request.seed) for running in batch])
    put("is_processed", [of_request.logprobs_mode == "processed_logprobs" for of_request in params])
    stop_tokens, pages = (_view(words, places[name]) for name in ("stop_tokens", "pages"))
    for row, running in enumerate(batch):
        stop_tokens[row, : len(running.request.stop_tokens)] = running.request.stop_tokens
        pages[row, : len(running.pages)] = running.pages
    if size.constraints:
        _pack_constraints(put, [running.request for running in batch], size.constraints)
    if Constraints.GRAMMAR in size.constraints:
        put("grammar", [[running.grammar_state] for running in batch])
    if chunks:
        index_of = {running: i for i, running in enumerate(batch)}
        given = [chunk.running.given_token for chunk in chunks]
        put("index", [index_of[chunk.running] for chunk in chunks])
        put("start", [chunk.start for chunk in chunks])
        put("count", [chunk.count for chunk in chunks])
        put("is_last", [chunk.is_last for chunk in chunks])
        put("given_token", [-1 if token is None else token for token in given])
        put("remaining", [chunk.running.remaining for chunk in chunks])
        if config.state_copies:
            first = config.batch_size  # copies stand behind the slots' states
            put("source", [[_place(chunk.source, first, chunk.running.slot)] for chunk in chunks])
            put("copy", [[_place(chunk.copy, first, _LARGEST)] for chunk in chunks])
        into = _view(words, places["tokens"])
        for row, chunk in enumerate(chunks):
            tokens = chunk.running.tokens[chunk.start : chunk.start + chunk.count + 1]
            into[row, : len(tokens)] = tokens
    return words


def _place(copy: int | None, first: int, otherwise: int) -> int:
    return otherwise if copy is None else first + copy


def _pack_constraints(
    put: Callable[[str, list], None], requests: Sequence[Request], constraints: Constraints
) -> None:
    params = [request.params for request in requests]
    put("prompt_length", [[len(request.prompt)] for request in requests])
    names = {
        Constraints.PENALTIES: ("repetition_penalty", "presence_penalty", "frequency_penalty"),
        Constraints.TOKENS: ("min_tokens",),
        Constraints.SEQUENCES: ("no_repeat_ngram_size",),
    }
    for name in (name for kind, of_kind in names.items() if kind in constraints for name in of_kind):
        put(name, [[getattr(of_request, name)] for of_request in params])
    if Constraints.TOKENS in constraints:
        biases = [dict(of_request.logit_bias) for of_request in params]
        put("bias_tokens", _padded([list(bias) for bias in biases], MAX_LOGIT_BIAS, -1))
        put("bias_values", _padded([list(bias.values()) for bias in biases], MAX_LOGIT_BIAS, 0))
    if Constraints.SEQUENCES in constraints:
        words = [request.bad_words for request in requests]
        sizes = [
            [size for word in of_request for size in (*[0] * (len(word) - 1), len(word))]
            for of_request in words
        ]
        put("bad_words", _padded([list(chain(*of_request)) for of_request in words], MAX_BAD_WORD_TOKENS, -1))
        put("bad_word_sizes", _padded(sizes, MAX_BAD_WORD_TOKENS, 0))


def _padded(rows: list[list], width: int, unused: int) -> list[list]:
    return [row + [unused] * (width - len(row)) for row in rows]
