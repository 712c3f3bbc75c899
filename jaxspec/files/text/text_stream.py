"""Incremental decoding of token ids."""

import codecs
import re
from collections.abc import Iterable
from functools import lru_cache

from tokenizers import Tokenizer, decoders


class TextStream:
    """Decodes token ids as they arrive, in constant time per token.

    The concatenated pieces equal jaxspec's `Tokenizer.decode` of all ids. A character spread over several
    tokens is returned once it is complete, and returned text never changes. (`decoders.DecodeStream` holds
    bytes that are not UTF-8 back for ever, and with them the text that follows.)

        stream = TextStream(tokenizer.backend)
        text = stream.feed([16, 42]) + stream.feed([7]) + stream.finish()
    """

    def __init__(self, backend: Tokenizer, skip_special_tokens: bool = True):
        byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        decoder = _ByteLevelStream if byte_level else _WindowStream
        self._decoder = decoder(backend)
        self._special = _special_ids(backend) if skip_special_tokens else frozenset()

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these ids add; text that later ids may change is held back."""
        return "".join(self._decoder.feed(i) for i in ids if i not in self._special)

    def finish(self) -> str:
        """The text still held back; incomplete characters become U+FFFD."""
        return self._decoder.finish()


class _ByteLevelStream:
    """For byte-level BPE: tokens are bytes written as printable characters, and only UTF-8 spans tokens."""

    def __init__(self, backend: Tokenizer):
        self._backend = backend
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        token = self._backend.id_to_token(token_id)
        return "" if token is None else self._utf8.decode(_token_bytes(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """For any other decoder: decodes the last token whose text is known with the tokens after it.

    Tokens of SentencePiece that are bytes are decoded apart from the others, as UTF-8. The decoder would
    replace all of a run of them if one is wrong, and so could not decode the run before its end.
    """

    def __init__(self, backend: Tokenizer):
        self._backend = backend
        self._window: list[int] = []
        self._known = ""  # decoded text of the first token in the window, which was returned before
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_begun = False

    def feed(self, token_id: int) -> str:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return ""
        byte = _byte(self._backend, token, token_id)
        if byte is not None:
            text = self._flush() + self._utf8.decode(byte)
            if text and not self._is_begun:
                text = self._decode([token_id])  # which may strip a text's first space
        else:
            text = self._utf8.decode(b"", final=True)
            if self._is_begun and not self._window:
                # Alone, the token would be decoded as the first of the text, without the space before it.
                self._keep(token_id)
            self._window.append(token_id)
            decoded = self._decode(self._window)
            if not decoded.endswith("\N{REPLACEMENT CHARACTER}"):
                text += decoded[len(self._known) :]
                self._keep(token_id)
        self._is_begun = True
        return text

    def finish(self) -> str:
        text = self._utf8.decode(b"", final=True) + self._flush()
        self._window, self._known, self._is_begun = [], "", False
        return text

    def _keep(self, token_id: int) -> None:
        self._window = [token_id]
        self._known = self._decode(self._window)

    def _flush(self) -> str:
        """The text of the window that was held back."""
        text = self._decode(self._window)[len(self._known) :]
        if self._window:
            self._keep(self._window[-1])
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


def token_bytes(backend: Tokenizer, token_id: int) -> bytes:
    """See `Tokenizer.token_bytes`."""
    token = backend.id_to_token(token_id)
    if token is None:
        return b""
    if isinstance(backend.decoder, decoders.ByteLevel):
        return _token_bytes(token)
    byte = _byte(backend, token, token_id)
    if byte is not None:
        return byte
    # Behind itself, as decoders may strip the first space of a text.
    alone, twice = (backend.decode([token_id] * times, skip_special_tokens=False) for times in (1, 2))
    return twice[len(alone) :].encode("utf-8")


def _byte(backend: Tokenizer, token: str, token_id: int) -> bytes | None:
    """The byte that a token of SentencePiece is; None for any other token."""
    found = re.fullmatch("<0x([0-9A-F]{2})>", token)
    is_byte = found is not None and backend.decode([token_id], skip_special_tokens=False) != token
    return bytes.fromhex(found[1]) if found is not None and is_byte else None


def _special_ids(backend: Tokenizer) -> frozenset[int]:
    added = backend.get_added_tokens_decoder()
    return frozenset(i for i, token in added.items() if token.special)


def _token_bytes(token: str) -> bytes:
    table = byte_level_alphabet()
    try:
        return bytes([table[character] for character in token])
    except KeyError:  # an added token is plain text
        return token.encode("utf-8")


@lru_cache(maxsize=1)
def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 stands for itself, the other bytes for characters from 256 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
