"""Compiled programs and kernels kept on disk between runs."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache
from jaxspec_kernels.calls import kernel_cache

from jaxspec.files import CheckpointError
from jaxspec.files.cache import cache_folder, private_folder

_SETTING = "jax_compilation_cache_dir"

_lock = threading.Lock()
_in_use: list[Path] = []  # the folder, once for each `with` block that is active


@contextmanager
def compilation_cache() -> Iterator[Path | None]:
    """Keeps programs compiled inside the `with` block in a folder that only this user can read or write.

    A cache that others can write would let them run code here. Does nothing if the user chose a cache
    (`JAX_COMPILATION_CACHE_DIR`) or switched caching off (`JAX_ENABLE_COMPILATION_CACHE=0`); warns and does
    nothing if there is no safe folder. Several threads may be inside at once.

    Yields:
      The folder in use; None if this package keeps no cache.
    """
    # JAX has one cache per process. A thread-local setting would not reach JAX's compilation threads, and an
    # open cache ignores later settings, so the setting is global and the cache is reset at the end.
    with _lock:
        folder = _in_use[0] if _in_use else _folder()
        if folder is not None and not _in_use:
            jax.config.update(_SETTING, str(folder))
        if folder is not None:
            _in_use.append(folder)
    try:
        yield folder
    finally:
        if folder is not None:
            with _lock:
                _in_use.pop()
                if not _in_use and jax.config.values[_SETTING] == str(folder):
                    jax.config.update(_SETTING, None)
                    jax_cache.reset_cache()


def _folder() -> Path | None:
    if jax.config.values[_SETTING] is not None or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    return _private("xla")


def _private(name: str) -> Path | None:
    """A folder in the cache that is safe to run code from; warns and returns None if there is none."""
    try:
        folder = cache_folder() / name
        private_folder(folder)
    except (CheckpointError, OSError) as error:
        # At this line, so that it is shown once, however many programs and kernels follow.
        warnings.warn(f"compiled programs are not cached: {error}", stacklevel=1)
        return None
    return folder


kernel_cache.find_folder = partial(_private, "numba")
