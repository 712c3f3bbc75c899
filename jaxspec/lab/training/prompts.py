"""Making the prompts: from files or sampled from the target, without evaluation prompts."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxspec.config import ConfigError
from jaxspec.engine import Engine
from jaxspec.files import Tokenizer
from jaxspec.lab.training.answers import generate_answers
from jaxspec.lab.training.config import PromptsConfig
from jaxspec.lab.training.held_out import HeldOut, normalise
from jaxspec.lab.training.prompt_files import PromptRow, encode_answer, encode_prompts, read_rows, read_texts
from jaxspec.lab.training.stage_folder import StageFolder, write_atomically
from jaxspec.lab.training.token_rows import TokenRows
from jaxspec.sampling import SamplingParams

PROMPTS, ANSWERS, HELD_OUT = "prompts.npz", "answers.npz", "held_out.npz"
Encoded = tuple[PromptRow, list[int]]
_FEWEST, _MOST = 8, 128  # of held-out prompts
_PLACE = "@@the user's turn@@"
_SHORTEST = 3  # words; shorter sampled turns are dropped


def user_turn_prefix(tokenizer: Tokenizer) -> list[int]:
    """The chat template's tokens before a user's turn, as a prompt for the target to write such a turn."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": _PLACE}], add_generation_prompt=False)
    return tokenizer.encode(chat[: chat.index(_PLACE)], add_special_tokens=False)


def check_tokenizer(tokenizer: Tokenizer | None, target: str) -> Tokenizer:
    """The target's tokenizer.

    Raises:
      ConfigError: there is none, or it has no chat template.
    """
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ConfigError(f"{target}: training needs a target with a tokenizer and a chat template")
    return tokenizer


def make_prompts(
    config: PromptsConfig,
    tokenizer: Tokenizer,
    folder: StageFolder,
    *,
    data: Path,
    engine: Engine | None,
    longest: int,
    ends: Sequence[int],
) -> None:
    """The stage "prompts".

    Writes `prompts.npz` (token ids in a random order), `answers.npz` (the answers that some prompts came
    with), `held_out.npz` (the prompts that are held out) and `synthetic.jsonl`.

    Args:
      config: the prompts' section of the configuration.
      tokenizer: the target's.
      folder: the stage's folder.
      data: the folder to which file names in the configuration are relative.
      engine: samples the synthetic turns; None if there are none.
      longest: a further limit on the tokens of a prompt, besides `max_tokens`, and of the part of an answer
        that is read.
      ends: the target's tokens that end an answer.

    Raises:
      ConfigError: a file is missing or malformed, or no prompt is left.
    """
    held_out = HeldOut(text for name in config.held_out for text in read_texts(data / name))
    rows = [row for name in config.files for row in read_rows(data / name)]
    sampled: list[PromptRow] = []
    if config.synthetic:
        assert engine is not None
        texts = _sample_turns(config, tokenizer, engine, folder)
        lines = "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in texts)
        write_atomically(folder.path / "synthetic.jsonl", lines.encode())
        sampled = [PromptRow(({"role": "user", "content": text},)) for text in texts]
    if not rows and not sampled:
        raise ConfigError(f"prompts: none in {', '.join(map(str, config.files)) or 'no file'}")
    distinct: dict[str, PromptRow] = {}
    for row in [*rows, *sampled]:
        known = distinct.get(row.key)
        if known is None or known.answer is None:
            distinct[row.key] = row
    kept = [row for row in distinct.values() if not any(map(held_out.__contains__, row.user_turns))]
    limit = min(config.max_tokens, longest)
    encoded = list(encode_prompts(tokenizer, kept, limit))
    if not encoded:
        raise ConfigError(
            f"prompts: none is left of {len(rows) + len(sampled)} after removing repeated and held-out ones, "
            f"and those of more than {limit} tokens (prompts.max_tokens)"
        )
    apart, trained = _split(encoded, config.held_out_share)
    order = np.random.default_rng(config.seed).permutation(len(trained)).tolist()
    answers = [
        (i, encode_answer(tokenizer, trained[at][0], longest, ends), True)
        for i, at in enumerate(order)
        if trained[at][0].answer is not None
    ]
    TokenRows.of((i, ids, True) for i, (_, ids) in enumerate(apart)).save(folder.path / HELD_OUT)
    TokenRows.of(answers).save(folder.path / ANSWERS)
    TokenRows.of((i, trained[at][1], True) for i, at in enumerate(order)).save(folder.path / PROMPTS)
    folder.finish(
        from_files=len(rows),
        synthetic=len(sampled),
        repeated=len(rows) + len(sampled) - len(distinct),
        held_out=len(distinct) - len(kept),
        too_long=len(kept) - len(encoded),
        set_aside=len(apart),
        answered=len(answers),
        prompts=len(trained),
    )


def _split(encoded: list[Encoded], share: float) -> tuple[list[Encoded], list[Encoded]]:
    """The prompts to hold out, and those to train on."""
    if not share:
        return [], encoded
    # "2 + 2" and "2 - 2" have the same words and so one place; their order in the files must not matter.
    by_place = sorted(encoded, key=lambda each: (each[0].place, each[0].key))
    count = max(sum(row.place < share for row, _ in encoded), _FEWEST)
    count = min(count, _MOST, len(encoded) // 4)
    return by_place[:count], by_place[count:]


def _sample_turns(
    config: PromptsConfig, tokenizer: Tokenizer, engine: Engine, folder: StageFolder
) -> list[str]:
    prefix = user_turn_prefix(tokenizer)

    def params(index: int) -> SamplingParams:
        return SamplingParams(
            temperature=config.synthetic_temperature,
            max_new_tokens=config.synthetic_max_tokens,
            seed=(config.seed << 32) + index,
        )

    shards = folder.path / "synthetic"
    rows = generate_answers(engine, [prefix] * config.synthetic, params, shards, label="user turns")
    sequences: Sequence[np.ndarray] = rows.sequences()
    texts = [
        tokenizer.decode(tokens[:-1].tolist()).strip()
        for tokens, stopped in zip(sequences, rows.stopped, strict=True)
        if stopped
    ]
    return [text for text in texts if len(normalise(text)) >= _SHORTEST]
