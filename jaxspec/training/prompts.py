"""The user's turns: read from files, sampled from the target itself, and cleared of evaluation prompts."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoints import Tokenizer
from jaxspec.config import ConfigError
from jaxspec.engine import Engine
from jaxspec.sampling import SamplingParams
from jaxspec.training.answers import generate_answers
from jaxspec.training.config import PromptsConfig
from jaxspec.training.held_out import HeldOut, normalise
from jaxspec.training.stage_folder import StageFolder, write_atomically
from jaxspec.training.token_rows import TokenRows

PROMPTS = "prompts.npz"
_PLACE = "@@the user's turn@@"
_SHORTEST = 3  # words of a sampled user turn that is worth an answer


def read_turns(path: Path) -> list[str]:
    """Every user's turn of a JSONL file of prompts.

    Raises:
      ConfigError: the file cannot be read, or a row is not an object with "prompt" or "turns".
    """
    return [turn for turns in _rows(path) for turn in turns]


def read_prompts(path: Path) -> list[str]:
    """The first user's turn of every row; as `read_turns` otherwise."""
    return [turns[0] for turns in _rows(path)]


def _rows(path: Path) -> Iterator[list[str]]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a file of prompts: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _turns(line, f"{path}:{number}")


def _turns(line: str, where: str) -> list[str]:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where}: not a JSON object") from None
    turns = row.get("turns", [row.get("prompt")]) if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ConfigError(f'{where}: needs a text "prompt" or a list of texts "turns"')
    return turns


def encode_turn(tokenizer: Tokenizer, turn: str) -> list[int]:
    """A user's turn through the chat template, as the engine encodes it."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": turn}])
    return tokenizer.encode(chat, add_special_tokens=False)


def user_turn_prefix(tokenizer: Tokenizer) -> list[int]:
    """What the chat template puts before a user's turn: the prompt that makes the target write one."""
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
) -> None:
    """The stage "prompts": writes `prompts.npz`, token ids in a random order, and `synthetic.jsonl`.

    Args:
      data: the folder that the configuration's file names start from.
      engine: samples the synthetic turns; None where there are none to sample.

    Raises:
      ConfigError: a file is missing or malformed, or nothing is left of them.
    """
    held_out = HeldOut(turn for name in config.held_out for turn in read_turns(data / name))
    turns = [turn for name in config.files for turn in read_prompts(data / name)]
    from_files = len(turns)
    if config.synthetic:
        assert engine is not None
        sampled = _sample_turns(config, tokenizer, engine, folder)
        lines = "".join(json.dumps({"prompt": turn}, ensure_ascii=False) + "\n" for turn in sampled)
        write_atomically(folder.path / "synthetic.jsonl", lines.encode())
        turns += sampled
    distinct = list({normalise(turn): turn for turn in turns}.values())
    kept = [turn for turn in distinct if turn not in held_out]
    encoded = [ids for turn in kept if len(ids := encode_turn(tokenizer, turn)) <= config.max_tokens]
    if not encoded:
        raise ConfigError("prompts: none is left after removing repeated, held-out and long ones")
    order = np.random.default_rng(config.seed).permutation(len(encoded))
    TokenRows.of((i, encoded[at], True) for i, at in enumerate(order)).save(folder.path / PROMPTS)
    folder.finish(
        from_files=from_files,
        synthetic=len(turns) - from_files,
        repeated=len(turns) - len(distinct),
        held_out=len(distinct) - len(kept),
        too_long=len(kept) - len(encoded),
        prompts=len(encoded),
    )


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
