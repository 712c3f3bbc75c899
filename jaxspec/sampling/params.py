"""The sampling parameters of one request."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, get_args

from jaxspec.documents import plain_number, whole_number
from jaxspec.errors import OneLineError
from jaxspec.sampling.grammar import Grammar
from jaxspec.spelling import known_names

if TYPE_CHECKING:  # command lines are read without them
    import jax
    import numpy as np

DEFAULT_MAX_NEW_TOKENS = 256
MAX_LOGPROBS = 20
"""The most tokens whose log-probabilities are reported in each place."""

MAX_LOGIT_BIAS = 300
"""The most tokens with a `logit_bias`."""
MAX_BAD_WORD_TOKENS = 512
"""The most tokens of all `bad_words` of a request."""
MAX_SEQUENCE = 16
"""The most tokens of one of the `bad_words`, and the largest `no_repeat_ngram_size`."""

Kind = Literal["logprobs", "json", "penalties", "bias", "words"]
"""A kind of what requests may ask for; see `Engine.prepare`."""
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

_COLDEST, _HOTTEST = 1e-30, 1e30
_WEAKEST, _STRONGEST = 0.01, 100.0


class _Options(TypedDict, total=False):
    """The fields of `SamplingParams` but the seed, as callers may give them, for type checkers."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_new_tokens: int | None
    stop: str | Sequence[str]
    stop_token_ids: "Sequence[int] | np.ndarray | jax.Array"
    ignore_eos: bool
    num_speculative_tokens: int | None
    logprobs: int | None
    logprobs_mode: LogprobsMode
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]]
    bad_words: str | Sequence[str | Sequence[int]]
    min_tokens: int
    no_repeat_ngram_size: int
    choice: Sequence[str]
    regex: str | None
    json_schema: Any


class SamplingOptions(_Options, total=False):
    """For one prompt."""

    seed: int | None


class ManySamplingOptions(_Options, total=False):
    """For one prompt or several, each of which may have its own seed."""

    seed: "int | Sequence[int | None] | np.ndarray | jax.Array | None"


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Attributes:
      temperature: 0 is greedy; otherwise the logits are divided by it, 1e-30 to 1e30.
      top_k: keep the k most likely tokens and tokens that tie with the last of them; 0 or -1 keeps all.
      top_p: keep the smallest set of most likely tokens with at least this probability, in (0, 1].
      min_p: keep tokens with at least this fraction of the best token's probability, in [0, 1].
      seed: 0 to 2**64 - 1; the same seed gives the same tokens. None draws a new one for every request.
      max_new_tokens: the most tokens of the output, which must fit into the engine's max_model_len with the
        prompt. None takes 256, or `min_tokens` if they are more, or as many as fit.
      stop: strings that end the output and are cut off.
      stop_token_ids: token ids that end the output.
      ignore_eos: go on after an end-of-sequence token.
      num_speculative_tokens: drafts per step, at most the engine's; 0 decodes without drafts, and None takes
        the engine's choice.
      logprobs: report the log-probability of every emitted token, and of so many of the most likely tokens
        in its place, 0 to 20; None reports nothing.
      logprobs_mode: of which distribution: "raw_logprobs" of the model's own, before the penalties and other
        constraints below; "processed_logprobs" of the one that was sampled from, after these, temperature,
        min-p, top-k and top-p. They are the same where the
        temperature is 0 and there are no constraints.
      repetition_penalty: divides the positive logits of tokens that are in the prompt or the output, and
        multiplies the negative ones; above 0, 1 is off.
      presence_penalty: is subtracted from the logits of tokens that are in the output, -2 to 2.
      frequency_penalty: is subtracted once for every time that they are in it, -2 to 2.
      logit_bias: a mapping of at most 300 token ids to what is added to their logits, -100 to 100; kept as
        pairs.
      bad_words: sequences that the output must not complete, where the prompt may hold their beginning: token
        ids, at most 16 each, or strings, which stand for their tokens at the beginning of a text and after a
        space. All together have at most 512 tokens.
      min_tokens: the least tokens before a stop token, an end-of-sequence token or a stop string may end the
        output.
      no_repeat_ngram_size: no sequence of so many tokens is in the prompt and the output twice because the
        output completes it; at most 16, 0 is off.
      choice: texts, one of which the output is.
      regex: a regular expression, in Python's syntax, that the output matches from its beginning to its end.
      json_schema: a JSON schema of the output, which is written as `json.dumps` writes it, with properties in
        the schema's order: a mapping, its text, or a class of pydantic; kept as text. At most one of choice,
        regex and json_schema may be given. An output that is cut by its length is the beginning of a valid
        one.

    Raises:
      ValueError: a value has the wrong type or is out of its range.
      TypeError: there is no field of a name.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_speculative_tokens: int | None = None
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    min_tokens: int = 0
    no_repeat_ngram_size: int = 0
    choice: tuple[str, ...] = ()
    regex: str | None = None
    json_schema: Any = None

    if TYPE_CHECKING:
        # The fields have what this makes of them. A dataclass makes the same function.
        def __init__(self, **fields: Unpack[SamplingOptions]) -> None: ...
    else:

        def __new__(cls, *values, **fields):
            cls._check_names(fields, TypeError)
            return super().__new__(cls)

    @classmethod
    def _check_names(cls, names: Iterable[str], error: type[Exception]) -> None:
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := [name for name in names if name not in known]:
            raise error(f"unknown sampling parameter {unknown[0]!r}; {known_names(unknown[0], known)}")

    def __post_init__(self) -> None:
        top_k = _integer("top_k", self.top_k, "1 or more (0 or -1 is off)", lambda x: x >= -1)
        top_p = _real("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1)
        checked: dict[str, Any] = {
            "temperature": _temperature(self.temperature),
            # The device holds both in 32 bits. Values beyond these limits have the same effect.
            "top_k": min(max(top_k, 0), 2**31 - 1),
            "top_p": max(top_p, 1e-30),
            "min_p": _real("min_p", self.min_p, "0 to 1", lambda x: 0 <= x <= 1),
            "stop": _strings("stop", self.stop),
            "stop_token_ids": _ids("stop_token_ids", self.stop_token_ids),
        }
        if self.seed is not None:
            checked["seed"] = _integer("seed", self.seed, "0 to 2**64 - 1", lambda x: 0 <= x < 2**64)
        if self.max_new_tokens is not None:
            checked["max_new_tokens"] = _integer(
                "max_new_tokens", self.max_new_tokens, "1 or more", lambda x: x >= 1
            )
        checked["ignore_eos"] = plain_number(self.ignore_eos)
        if not isinstance(checked["ignore_eos"], bool):
            raise _error("ignore_eos", checked["ignore_eos"], "True or False")
        drafts = self.num_speculative_tokens
        if drafts is not None:
            checked["num_speculative_tokens"] = _integer(
                "num_speculative_tokens", drafts, "0 or more", lambda x: x >= 0
            )
        if self.logprobs is not None:
            checked["logprobs"] = _integer(
                "logprobs", self.logprobs, f"0 to {MAX_LOGPROBS}", lambda x: 0 <= x <= MAX_LOGPROBS
            )
        checked |= self._checked_constraints()
        checked |= self._checked_grammar()
        if self.max_new_tokens is not None and checked["min_tokens"] > checked["max_new_tokens"]:
            raise _error("min_tokens", self.min_tokens, f"at most max_new_tokens, {self.max_new_tokens}")
        modes = get_args(LogprobsMode)
        if self.logprobs_mode not in modes:
            raise _error("logprobs_mode", self.logprobs_mode, " or ".join(map(repr, modes)))
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def _checked_grammar(self) -> dict[str, Any]:
        asked = [
            name
            for name, value in (
                ("choice", self.choice),
                ("regex", self.regex),
                ("json_schema", self.json_schema),
            )
            if value is not None and value != ()
        ]
        if len(asked) > 1:
            raise OneLineError(f"{asked[1]}: only one of choice, regex and json_schema may be given")
        checked: dict[str, Any] = {"choice": ()}
        if asked == ["choice"]:
            checked["choice"] = tuple(json.loads(Grammar.of_choice(self.choice).source))
        elif asked == ["regex"]:
            checked["regex"] = Grammar.of_regex(self.regex).source
        elif asked == ["json_schema"]:
            checked["json_schema"] = Grammar.of_json_schema(self.json_schema).source
        return checked

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that the output follows; None if there is none."""
        if self.choice:
            return Grammar.of_choice(self.choice)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        return None if self.json_schema is None else Grammar("json_schema", self.json_schema)

    def _checked_constraints(self) -> dict[str, Any]:
        return {
            "repetition_penalty": _real(
                "repetition_penalty",
                self.repetition_penalty,
                f"{_WEAKEST:g} to {_STRONGEST:g} (1 is off)",
                lambda x: _WEAKEST <= x <= _STRONGEST,
            ),
            **{
                name: _real(name, getattr(self, name), "-2 to 2", lambda x: -2 <= x <= 2)
                for name in ("presence_penalty", "frequency_penalty")
            },
            "logit_bias": _biases(self.logit_bias),
            "bad_words": _sequences("bad_words", self.bad_words),
            "min_tokens": _integer("min_tokens", self.min_tokens, "0 or more", lambda x: x >= 0),
            "no_repeat_ngram_size": _integer(
                "no_repeat_ngram_size",
                self.no_repeat_ngram_size,
                f"0 (off) to {MAX_SEQUENCE}",
                lambda x: 0 <= x <= MAX_SEQUENCE,
            ),
        }

    @classmethod
    def merge(
        cls, params: "SamplingParams | Mapping[str, Any] | None", fields: Mapping[str, Any]
    ) -> "SamplingParams":
        """Sampling parameters that a call takes as one argument or as keywords.

        Args:
          params: `SamplingParams`, a mapping of its fields, or None.
          fields: the keywords; empty unless `params` is None.

        Raises:
          ValueError: both are given, `params` has another type, a field is unknown, or a value is bad.
        """
        if params is not None and fields:
            raise ValueError(f"give {next(iter(fields))} in params or as a keyword, not both")
        if isinstance(params, cls):
            return params
        if not isinstance(params, Mapping | None):
            raise ValueError(f"params must be SamplingParams or a mapping of its fields, got {params!r}")
        values = fields if params is None else params
        cls._check_names(values, ValueError)
        return cls(**values)


def sample_seed(seed: int, sample: int) -> int:
    """The seed of a sample of a prompt, counted from 0: that of the first is `seed` itself, those of the
    others are hashes of both numbers, so that neighbouring seeds share no draws."""
    if not sample:
        return seed
    return int.from_bytes(blake2b(f"{seed} {sample}".encode("ascii"), digest_size=8).digest(), "little")


def _error(name: str, value: object, wanted: str) -> ValueError:
    return OneLineError(f"{name} must be {wanted}, got {value!r}")


def _real(name: str, value: Any, wanted: str, allowed: Callable[[float], bool]) -> float:
    value = plain_number(value)
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and allowed(number)):
        raise _error(name, value, f"a number, {wanted}")
    return number


def _temperature(value: Any) -> float:
    """Checks that the temperature is 0 or in the range for which the divided logits fit float32."""
    temperature = _real("temperature", value, "0 or more", lambda x: x >= 0)
    if temperature and not _COLDEST <= temperature <= _HOTTEST:
        raise _error("temperature", value, f"a number, 0 (greedy) or {_COLDEST:g} to {_HOTTEST:g}")
    return temperature


def _integer(name: str, value: Any, wanted: str, allowed: Any) -> int:
    value = whole_number(value)
    if not isinstance(value, Integral) or isinstance(value, bool) or not allowed(value):
        raise _error(name, value, f"an integer, {wanted}")
    return int(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) and s for s in strings):
        raise _error(name, value, "a string or a list of strings, none of them empty")
    if any("\ud800" <= character <= "\udfff" for string in strings for character in string):
        raise _error(name, value, "valid Unicode, without lone surrogates")
    return tuple(strings)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    value = value.tolist() if getattr(value, "ndim", 0) == 1 else value
    if not isinstance(value, list | tuple):
        raise _error(name, value, "a list of token ids")
    return tuple(_integer(f"every id of {name}", token, "0 or more", lambda x: x >= 0) for token in value)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of an id and a bias, from a mapping, whose keys may be text as in JSON, or from such pairs."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    wanted = "a mapping of token ids to numbers"
    if not isinstance(pairs, list | tuple):
        raise _error("logit_bias", value, wanted)
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise _error("logit_bias", value, wanted)
        token, bias = pair
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 20:
            token = int(token)  # Python refuses texts of thousands of digits with an error of its own
        token = _integer("every id of logit_bias", token, "0 or more", lambda x: 0 <= x < 2**31)
        if token in biases:
            raise OneLineError(f"logit_bias: token {token} is given twice")
        biases[token] = _real(f"logit_bias of token {token}", bias, "-100 to 100", lambda x: -100 <= x <= 100)
    if len(biases) > MAX_LOGIT_BIAS:
        raise OneLineError(f"logit_bias: at most {MAX_LOGIT_BIAS} tokens, got {len(biases)}")
    return tuple(biases.items())


def _sequences(name: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Strings and sequences of ids, none of them empty."""
    words = (value,) if isinstance(value, str) else value
    if not isinstance(words, list | tuple):
        raise _error(name, value, "a list of strings or of lists of token ids")
    _strings(name, [word for word in words if isinstance(word, str)])
    return tuple(word if isinstance(word, str) else _sequence(name, word) for word in words)


def _sequence(name: str, value: Any) -> tuple[int, ...]:
    ids = _ids(name, value)
    if not 1 <= len(ids) <= MAX_SEQUENCE:
        raise OneLineError(f"{name}: a sequence has 1 to {MAX_SEQUENCE} tokens, got {len(ids)}")
    return ids
