"""What a request asks for, checked against what an engine can give."""

from collections.abc import Iterable, Sequence

from jaxspec.config import ResolvedEngineConfig
from jaxspec.engine.device.plan import MAX_STOP_TOKENS
from jaxspec.files import Tokenizer
from jaxspec.files.text.tokenizer import LONGER
from jaxspec.sampling import (
    DEFAULT_MAX_NEW_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_SEQUENCE,
    SamplingMode,
    SamplingParams,
    required_mode,
)


def check_mode(params: SamplingParams, modes: Sequence[SamplingMode]) -> None:
    """Checks that some of an engine's programs sample as a request asks.

    Raises:
      ValueError: none do.
    """
    most = max(modes)
    if required_mode(params) > most:
        given, loaded = (
            ("top_k, top_p", "sampling without them") if most else ("temperature", "greedy decoding only")
        )
        raise ValueError(f"{given}: this engine was loaded for {loaded}")


def num_drafts(params: SamplingParams, most: int, *, is_adaptive: bool) -> int | None:
    """The K of a request; None if the engine chooses it for every dispatch.

    Args:
      most: the largest K of the engine.

    Raises:
      ValueError: the request asks for more.
    """
    wanted = params.num_speculative_tokens
    if wanted is not None and wanted > most:
        raise ValueError(f"num_speculative_tokens: this engine drafts at most {most}, got {wanted}")
    # The answer to a seed must not depend on the other requests or on the machine's speed.
    is_reproducible = params.temperature > 0 and params.seed is not None
    return most if wanted is None and (is_reproducible or not is_adaptive) else wanted


def num_new_tokens(params: SamplingParams, num_tokens: int, config: ResolvedEngineConfig) -> int:
    """The most tokens of the answer to a prompt of `num_tokens` tokens.

    Raises:
      ValueError: the prompt leaves no room for so many, in the model's positions or in the cache.
    """
    room, wanted = config.max_model_len - num_tokens, params.max_new_tokens
    in_cache = config.num_pages * config.page_size - num_tokens
    if room < 1:
        raise ValueError(
            f"prompt of {num_tokens} tokens leaves no room to answer: "
            f"max_model_len is {config.max_model_len}; {LONGER}"
        )
    if wanted is None:
        most = max(min(room, in_cache), 1)
        if params.min_tokens > most:
            raise ValueError(
                f"min_tokens: {params.min_tokens} do not fit: after a prompt of {num_tokens} tokens there is "
                f"room for {most}"
            )
        wanted = min(max(DEFAULT_MAX_NEW_TOKENS, params.min_tokens), most)
    elif wanted > room:
        raise ValueError(
            f"max_new_tokens: {wanted} do not fit: after a prompt of {num_tokens} tokens, "
            f"max_model_len {config.max_model_len} leaves room for {room}"
        )
    if wanted > in_cache:
        raise ValueError(
            f"prompt of {num_tokens} tokens and {wanted} new ones need more than the cache's "
            f"{config.num_pages} pages of {config.page_size}; raise engine.num_pages"
        )
    return wanted


def stop_tokens(
    params: SamplingParams, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int], vocab_size: int
) -> tuple[int, ...]:
    """The ids that end an answer: those asked for, special tokens in `stop`, and the model's own.

    Raises:
      ValueError: a stop string cannot be found in any text, or there are too many ids.
    """
    if params.stop and tokenizer is None:
        raise ValueError("stop: stop strings need a tokenizer, and this checkpoint has none")
    # No text of an answer has special tokens, so a string with one would never be found.
    special = tokenizer.special_token_ids if tokenizer is not None and params.stop else {}
    named = [special[text] for text in params.stop if text in special]
    for text in params.stop:
        inside = next((token for token in special if token in text and text not in special), None)
        if inside is not None:
            raise ValueError(
                f"stop: {text!r} has the special token {inside!r}, which is not part of the text; give "
                f"that token alone"
            )
    asked = (*params.stop_token_ids, *named)
    _check_ids("stop_token_ids", asked, vocab_size)
    ends = tuple(dict.fromkeys((*asked, *(() if params.ignore_eos else eos_token_ids))))
    if len(ends) > MAX_STOP_TOKENS:
        raise ValueError(f"stop_token_ids: at most {MAX_STOP_TOKENS} with the model's own, got {len(ends)}")
    return ends


def check_biases(params: SamplingParams, vocab_size: int) -> None:
    """Checks the ids of `logit_bias`.

    Raises:
      ValueError: one is outside the vocabulary.
    """
    _check_ids("logit_bias", dict(params.logit_bias), vocab_size)


def bad_words(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """`bad_words` as tokens, a string as those at a text's start and after a space.

    Raises:
      ValueError: a string cannot be tokenized, an id is outside the vocabulary, or there are too many tokens.
    """
    words: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        if isinstance(word, tuple):
            _check_ids("bad_words", word, vocab_size)
            words[word] = None
            continue
        if tokenizer is None:
            raise ValueError("bad_words: strings need a tokenizer, and this checkpoint has none")
        for text in (word, f" {word.lstrip()}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if len(ids) > MAX_SEQUENCE:
                raise ValueError(f"bad_words: {word[:40]!r} has {len(ids)} tokens, more than {MAX_SEQUENCE}")
            words[ids] = None
    words.pop((), None)
    count = sum(map(len, words))
    if count > MAX_BAD_WORD_TOKENS:
        raise ValueError(f"bad_words: at most {MAX_BAD_WORD_TOKENS} tokens in all, got {count}")
    return tuple(words)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    outside = [token for token in ids if token >= vocab_size]
    if outside:
        raise ValueError(f"{name}: {outside[0]} is outside the vocabulary of {vocab_size}")
