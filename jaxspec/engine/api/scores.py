"""Scores of texts: what a model says of tokens that it is given."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np

from jaxspec.documents import plain, plain_number
from jaxspec.engine.api.calls import Call, check_answers
from jaxspec.engine.api.prompts import as_prompts, encode_prompt
from jaxspec.engine.host.answer import Generation
from jaxspec.engine.host.request import Request
from jaxspec.engine.host.scoring import Scoring
from jaxspec.engine.rounds.options import Layer
from jaxspec.errors import OneLineError
from jaxspec.sampling import MAX_LOGPROBS, Logprobs, SamplingParams


@dataclass(frozen=True)
class Scores:
    """What a model says of B sequences of at most T tokens; NumPy arrays, padded with zeros.

    Attributes:
      tokens: i32[B, T].
      lengths: i32[B], the tokens of each sequence.
      logprobs: f32[B, T], the natural logarithm of every token's probability, given those before it; 0 for
        the first token, which has none before it, and for padding.
      mask: bool[B, T], where `logprobs` has a value.
      top_tokens, top_logprobs: i32 and f32[B, T, k], the most likely tokens in the place of every token, the
        likeliest first, and their log-probabilities; k is 0 if none were asked for.
      hidden: the hidden states that were asked for, [B, T, M] each, in the engine's dtype.
      weights_version: see `Generation`; that of all sequences.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    logprobs: np.ndarray
    mask: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray
    hidden: dict[Layer, np.ndarray] = field(default_factory=dict)
    weights_version: int = 0


def score_call(
    engine: Any,
    sequences: Any,
    *,
    lengths: Any = None,
    top: int = 0,
    hidden: Sequence[Layer] | Layer = (),
    temperature: float = 1.0,
) -> Call[Scores]:
    """The requests of the method `score` of an Engine, which has these arguments and their errors."""
    num_layers, vocab_size = len(engine.target.kinds), engine.vocab_size
    params = SamplingParams(temperature=temperature)
    if not params.temperature:
        raise OneLineError(f"temperature must be above 0, got {temperature!r}")
    num_top = min(_top(top), vocab_size)
    wanted = plain(hidden)
    names = tuple(wanted) if isinstance(wanted, list | tuple) else (wanted,)
    index_of = {name: _layer(name, num_layers) for name in names}
    layers = tuple(sorted(set(index_of.values())))
    report = Logprobs.TOP if num_top else Logprobs.CHOSEN
    told = min(MAX_LOGPROBS, vocab_size) if num_top else 0
    texts, width = _texts(sequences, lengths), getattr(sequences, "shape", (0,))[-1]
    requests: list[Request] = []
    for i, text in enumerate(texts):
        ids = _encode(i, text, engine)
        scoring = Scoring.of(len(ids), report, layers, told)
        requests.append(Request(ids, params, 0, (), 0, None, id=i, scoring=scoring, together=requests))
    if requests:
        engine.core.preparation.prepare_scores(report, layers)

    def finish(answers: Sequence[Generation]) -> Scores:
        version = check_answers("sequence", answers)
        known = [request.scoring for request in requests if request.scoring]
        sizes = [len(request.prompt) for request in requests]
        shape = len(requests), max([width if width else 0, *sizes])
        scores = Scores(
            tokens=np.zeros(shape, np.int32),
            lengths=np.array(sizes, np.int32),
            logprobs=np.zeros(shape, np.float32),
            mask=np.zeros(shape, bool),
            top_tokens=np.zeros((*shape, num_top), np.int32),
            top_logprobs=np.zeros((*shape, num_top), np.float32),
            hidden={
                name: _padded([each.hidden[layers.index(layer)] for each in known], shape[1])
                for name, layer in index_of.items()
                if known
            },
            weights_version=version,
        )
        for i, (request, of_text) in enumerate(zip(requests, known, strict=True)):
            size = len(request.prompt)
            scores.tokens[i, :size] = request.prompt
            # A row tells of the token behind it.
            scores.logprobs[i, 1:size] = of_text.logprobs[:-1]
            scores.mask[i, 1:size] = True
            scores.top_tokens[i, 1:size] = of_text.top_tokens[:-1, :num_top]
            scores.top_logprobs[i, 1:size] = of_text.top[:-1, :num_top]
        return scores

    return Call(requests, finish)


def _texts(sequences: Any, lengths: Any) -> list[Any]:
    """The sequences, those of an array without padding."""
    if getattr(sequences, "ndim", None) != 2:
        if lengths is not None:
            raise OneLineError("lengths: only the rows of an array [B, T] have lengths beside them")
        return as_prompts(sequences)
    rows = np.asarray(sequences).tolist()
    if lengths is None:
        return rows
    sizes = np.asarray(lengths).tolist()
    if np.shape(sizes) != (len(rows),) or not all(type(n) is int and 0 < n <= len(rows[0]) for n in sizes):
        raise OneLineError(
            f"lengths must be {len(rows)} integers from 1 to {len(rows[0]) if rows else 0}, got {lengths!r}"
        )
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def _encode(i: int, text: Any, engine: Any) -> list[int]:
    config = engine.config
    most = min(config.max_model_len, config.num_pages * config.page_size)
    try:
        ids = encode_prompt(text, engine.tokenizer, raw=True, vocab_size=engine.vocab_size, max_tokens=most)
    except ValueError as error:
        raise OneLineError(f"sequence {i}: {error}") from None
    if len(ids) > config.max_model_len:
        raise OneLineError(f"sequence {i} of {len(ids)} tokens: max_model_len is {config.max_model_len}")
    if len(ids) > most:
        raise OneLineError(
            f"sequence {i} of {len(ids)} tokens needs more than the cache's {config.num_pages} pages of "
            f"{config.page_size}; raise engine.num_pages"
        )
    return ids


def _top(top: Any) -> int:
    number = plain_number(top)
    if not isinstance(number, Integral) or isinstance(number, bool) or not 0 <= int(number) <= MAX_LOGPROBS:
        raise OneLineError(f"top must be an integer, 0 to {MAX_LOGPROBS}, got {top!r}")
    return int(number)


def _layer(name: Any, num_layers: int) -> int:
    """The number of a hidden state, as in `Size.layers`."""
    if name == "last":
        return num_layers + 1
    if type(name) is not int or not 0 <= name <= num_layers:
        raise OneLineError(f"hidden must be of 0 to {num_layers} and 'last', got {name!r}")
    return int(name)


def _padded(rows: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Arrays [T_i, M] as one [B, T, M]."""
    into = np.zeros((len(rows), size, rows[0].shape[1]), rows[0].dtype)
    for i, values in enumerate(rows):
        into[i, : len(values)] = values
    return into
