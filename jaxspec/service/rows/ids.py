"""A compact table from row ids to numbers, for runs of ten million rows."""

import json
from hashlib import blake2b

RowId = str | int

_KEY = 14
_ENTRY = _KEY + 8


class IdTable:
    """Maps ids to numbers. Stores hashes of 16 bytes: about 28 bytes per id, however long it is.

    Among ten million ids, the probability that two share a hash is 1e-25.
    """

    def __init__(self) -> None:
        # The first two bytes of a hash choose the bucket; an entry is the other 14 bytes and the number.
        self._buckets: dict[int, bytearray] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, row_id: RowId, number: int) -> int | None:
        """Stores a 64-bit number for the id; if the id already has a number, returns that one instead."""
        bucket, key = _place(row_id)
        entries = self._buckets.setdefault(bucket, bytearray())
        known = _find(entries, key)
        if known is None:
            entries += key + number.to_bytes(8, "little")
            self._size += 1
        return known

    def get(self, row_id: RowId) -> int | None:
        """The number stored for the id, or None."""
        bucket, key = _place(row_id)
        return _find(self._buckets.get(bucket, b""), key)


def hash_json(value: object, size: int) -> bytes:
    """A hash of `size` bytes of a JSON value; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode("ascii"), digest_size=size).digest()


def _place(row_id: RowId) -> tuple[int, bytes]:
    hashed = hash_json(row_id, 2 + _KEY)
    return int.from_bytes(hashed[:2], "little"), hashed[2:]


def _find(entries: bytes | bytearray, key: bytes) -> int | None:
    at = entries.find(key)
    while at >= 0 and at % _ENTRY:
        at = entries.find(key, at + 1)
    return None if at < 0 else int.from_bytes(entries[at + _KEY : at + _ENTRY], "little")
