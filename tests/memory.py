"""What a process of tests holds."""

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path


def collect_seldom() -> None:
    """Exempts imported objects from garbage collection, which tracing triggers often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def is_large() -> bool:
    """Whether this process holds more than 2 GB, or comes near Linux's limit of 65,530 memory maps, even
    after `give_back`."""
    # Nearly always it is memory that nothing holds, and looking for garbage takes half a second.
    for free in (_trim, give_back):
        if not _exceeds():
            return False
        free()
    return _exceeds()


def give_back() -> None:
    """Returns garbage and what is left over from compiling to the system."""
    gc.collect()
    _trim()


def _trim() -> None:
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _exceeds() -> bool:
    maps, pages = Path("/proc/self/maps"), Path("/proc/self/statm")
    if not maps.exists():
        return False
    resident = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident > 2e9 or maps.read_text().count("\n") > 35_000


def live_bytes() -> int:
    """The bytes of all arrays of this process's devices; memory that several share counts once."""
    import jax  # slow, and not needed by the others

    parts = [shard.data for array in jax.live_arrays() for shard in array.addressable_shards]
    return sum({part.unsafe_buffer_pointer(): part.nbytes for part in parts if part.size}.values())
