"""What the tokens of a vocabulary stand for: bytes of text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from tokenizers import decoders

from jaxspec.files import Tokenizer
from jaxspec.sampling.grammar import GrammarError

_UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a constrained text may consist of.

    Attributes:
      size: V of the model; tokens that the tokenizer does not have are never allowed.
      texts: the bytes of each token; tokens that are special, or stand for nothing, are missing.
      ends: tokens that end an answer.
      strips_space: whether decoding drops a space that a text begins with.
      encode: the tokenizer's own tokens of a text.
    """

    size: int
    texts: dict[int, bytes]
    ends: tuple[int, ...]
    strips_space: bool
    encode: Callable[[str], Sequence[int]]

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, ends: Sequence[int]) -> "Vocabulary":
        """The vocabulary of a tokenizer, for a model with `size` tokens.

        Raises:
          GrammarError: an answer cannot end, or the tokens have no text of their own.
        """
        ends = tuple(end for end in dict.fromkeys(ends) if end < size)
        if not ends:
            raise GrammarError("an answer with a grammar needs a token that ends it, and the model has none")
        backend = tokenizer.backend
        if isinstance(backend.decoder, decoders.WordPiece | decoders.CTC):
            name = type(backend.decoder).__name__
            raise GrammarError(f"grammars need tokens that are bytes or pieces of text, not {name}'s")
        left_out = {*tokenizer.special_token_ids.values(), *ends}
        ids = [id for id in sorted(tokenizer.vocabulary.values()) if id < size and id not in left_out]
        texts = {id: tokenizer.token_bytes(id) for id in ids}
        texts = {id: text for id, text in texts.items() if text and _UNKNOWN not in text}
        spaced = next((id for id, text in texts.items() if text.startswith(b" ") and len(text) > 1), None)
        strips_space = spaced is not None and backend.decode([spaced]).encode() == texts[spaced][1:]
        return cls(size, texts, ends, strips_space, lambda text: tokenizer.encode(text, False))

    @cached_property
    def trie(self) -> "Trie":
        """The tokens by their bytes."""
        return Trie.of(self.texts, self.size)


@dataclass(frozen=True)
class Trie:
    """The prefixes of texts, by length, and of the same length by the prefix without the last byte.

    Attributes:
      parent: i32[N], the prefix without the last byte; node 0 is the empty prefix.
      byte: u8[N], the last byte.
      levels: the first node of each length, and N.
      node: i32[V], the node of every token; -1 for a token without a text.
    """

    parent: np.ndarray
    byte: np.ndarray
    levels: tuple[int, ...]
    node: np.ndarray

    @classmethod
    def of(cls, texts: dict[int, bytes], size: int) -> "Trie":
        """The trie of the texts of tokens; `size` is V."""
        order = sorted(texts, key=texts.__getitem__)
        flat = np.frombuffer(b"".join(texts[id] for id in order), np.uint8)
        length = np.array([len(texts[id]) for id in order], np.int32)
        start = np.cumsum(length) - length
        at = np.zeros(len(order), np.int32)
        parents, bytes_, levels = [np.zeros(1, np.int32)], [np.zeros(1, np.uint8)], [0, 1]
        for depth in range(int(length.max(initial=0))):
            longer = np.flatnonzero(length > depth)
            byte, parent = flat[start[longer] + depth], at[longer]
            is_new = np.ones(len(longer), bool)
            is_new[1:] = (byte[1:] != byte[:-1]) | (parent[1:] != parent[:-1])
            at[longer] = levels[-1] - 1 + np.cumsum(is_new, dtype=np.int32)
            parents.append(parent[is_new])
            bytes_.append(byte[is_new])
            levels.append(levels[-1] + int(is_new.sum()))
        node = np.full(size, -1, np.int32)
        node[order] = at
        return cls(np.concatenate(parents), np.concatenate(bytes_), tuple(levels), node)

    def merged(self, classes: np.ndarray) -> "Trie":
        """The trie of the texts with every byte replaced by its class, u8[256]."""
        into = np.zeros(len(self.parent), np.int32)
        parents, bytes_, levels = [np.zeros(1, np.int32)], [np.zeros(1, np.uint8)], [0, 1]
        for first, last in pairwise(self.levels[1:]):
            keys = into[self.parent[first:last]].astype(np.int64) * 256 + classes[self.byte[first:last]]
            kept, place = np.unique(keys, return_inverse=True)
            into[first:last] = levels[-1] + place
            parents.append((kept // 256).astype(np.int32))
            bytes_.append((kept % 256).astype(np.uint8))
            levels.append(levels[-1] + len(kept))
        node = np.where(self.node >= 0, into[self.node], -1).astype(np.int32)
        return Trie(np.concatenate(parents), np.concatenate(bytes_), tuple(levels), node)
