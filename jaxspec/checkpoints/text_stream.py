"""Incremental decoding of token ids."""

import codecs
from collections.abc import Iterable
from functools import lru_cache

from tokenizers import decoders

from jaxspec.checkpoints.tokenizer import Tokenizer


class TextStream:
    """Decodes token ids as they arrive, in constant time per token.

    The concatenated pieces equal `Tokenizer.decode` of all ids. A character spread over several tokens is
    returned once it is complete, and returned text never changes.

        stream = TextStream(tokenizer)
        text = stream.feed([16, 42]) + stream.feed([7]) + stream.finish()
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        byte_level = isinstance(tokenizer.backend.decoder, decoders.ByteLevel)
        decoder = _ByteLevelStream if byte_level else _WindowStream
        self._decoder = decoder(tokenizer)
        self._special = _special_ids(tokenizer) if skip_special_tokens else frozenset()

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these ids add; text that later ids may change is held back."""
        return "".join(self._decoder.feed(i) for i in ids if i not in self._special)

    def finish(self) -> str:
        """The text still held back; incomplete characters become U+FFFD."""
        return self._decoder.finish()


class _ByteLevelStream:
    """For byte-level BPE: tokens are bytes written as printable characters, and only UTF-8 spans tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self._backend = tokenizer.backend
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        token = self._backend.id_to_token(token_id)
        return "" if token is None else self._utf8.decode(_token_bytes(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """For any other decoder: decodes the last token whose text is known with the tokens after it."""

    def __init__(self, tokenizer: Tokenizer):
        self._backend = tokenizer.backend
        self._window: list[int] = []
        self._known = ""  # decoded text of the first token in the window, which was returned before

    def feed(self, token_id: int) -> str:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return ""
        self._window.append(token_id)
        # SentencePiece decodes a run of byte tokens as a whole.
        if token.startswith("<0x") and token.endswith(">"):
            return ""
        text = self._decode(self._window)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new = text[len(self._known) :]
        self._window = [token_id]
        self._known = self._decode(self._window)
        return new

    def finish(self) -> str:
        new = self._decode(self._window)[len(self._known) :]
        self._window, self._known = [], ""
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.backend.get_added_tokens_decoder()
    return frozenset(i for i, token in added.items() if token.special)


def _token_bytes(token: str) -> bytes:
    table = _byte_level_alphabet()
    try:
        return bytes([table[character] for character in token])
    except KeyError:  # an added token is plain text
        return token.encode("utf-8")


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 stands for itself, the other bytes for characters from 256 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
