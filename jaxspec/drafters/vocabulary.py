"""Draft vocabularies: the subset of the target's tokens that a head can propose."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jaxspec.config import ConfigError
from jaxspec.files import Tokenizer
from jaxspec.weights.parameters import Buffer, Index, array_functions


@dataclass(frozen=True)
class Offsets:
    """The source of i32[W] target ids: a checkpoint's `d2t`, which stores target id minus draft id."""

    kind: ClassVar[str] = "int"
    draft_vocab_size: int

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return (("d2t", (self.draft_vocab_size,)),)

    def join(self, tensors: Sequence[Any], index: Index = ()) -> Any:
        return (tensors[0] + np.arange(self.draft_vocab_size)).astype(np.int32)[index]

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        return [value.astype(np.int64) - np.arange(self.draft_vocab_size)]


@dataclass(frozen=True)
class Membership:
    """The source of i32[V] draft ids, -1 for ids not drafted: a checkpoint's `t2d`, which stores booleans."""

    kind: ClassVar[str] = "bool"
    vocab_size: int

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return (("t2d", (self.vocab_size,)),)

    def join(self, tensors: Sequence[Any], index: Index = ()) -> Any:
        member = tensors[0].astype(bool)
        functions = array_functions(tensors)
        return functions.where(member, functions.cumsum(member) - 1, -1).astype(np.int32)[index]

    def split(self, value: np.ndarray) -> list[np.ndarray]:
        return [value >= 0]


def vocabulary_buffers(draft_vocab_size: int, vocab_size: int) -> tuple[Buffer | None, Buffer | None]:
    """The two maps of a drafter, i32[W] draft to target and i32[V] target to draft; None if W = V.

    Until they are loaded from a checkpoint, they map ids to themselves. If W > V, draft ids that the target
    lacks are mapped to its last one; they must never be drafted.
    """
    if draft_vocab_size == vocab_size:
        return None, None
    ids = jnp.minimum(jnp.arange(draft_vocab_size, dtype=jnp.int32), vocab_size - 1)
    inverse = jnp.arange(vocab_size, dtype=jnp.int32)
    inverse = jnp.where(inverse < draft_vocab_size, inverse, -1)
    return (
        Buffer(ids, axes=(None,), source=Offsets(draft_vocab_size)),
        Buffer(inverse, axes=(None,), source=Membership(vocab_size)),
    )


def check_vocabulary(d2t: np.ndarray, t2d: np.ndarray) -> str | None:
    """The error in a checkpoint's two maps; None if there is none."""
    ids = d2t.astype(np.int64) + np.arange(d2t.size)
    if (np.diff(ids) <= 0).any():
        return "d2t does not give increasing token ids: it must hold target id minus draft id"
    if ids.size and not (ids[0] >= 0 and ids[-1] < t2d.size):
        return f"d2t reaches token {ids[-1]}, past the vocabulary of {t2d.size}"
    if not np.array_equal(np.flatnonzero(t2d), ids):
        return "d2t and t2d name different tokens"
    return None


def check_tokens(what: str, own: Tokenizer | None, target: Tokenizer | None) -> None:
    """Checks that ids of two tokenizers stand for the same tokens, as far as the tokens are known.

    Added tokens may differ: a chat model's are often reserved ids in other models of its series.

    Args:
      what: the owner of the first tokenizer, with an article.

    Raises:
      ConfigError: an id stands for different tokens.
    """
    if own is None or target is None:
        return
    added = own.added_ids | target.added_ids
    texts = {token_id: text for text, token_id in target.vocabulary.items()}
    for text, token_id in sorted(own.vocabulary.items(), key=itemgetter(1)):
        if token_id not in added and texts.get(token_id, text) != text:
            raise ConfigError(
                f"drafter.source: {what} must have the target's tokens, but token "
                f"{token_id} is {text!r}, in the target {texts[token_id]!r}"
            )
