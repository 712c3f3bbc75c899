"""Compiled programs kept on disk between runs."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from jaxspec.checkpoints import CheckpointError
from jaxspec.checkpoints.cache import cache_folder, private_folder

_SETTING = "jax_compilation_cache_dir"

_lock = threading.Lock()
_in_use: list[Path] = []  # the folder, once for everyone inside


@contextmanager
def compilation_cache() -> Iterator[Path | None]:
    """Keeps what is compiled inside in a folder that only this user can read or write.

    A cache that others can write would let them run code here. Does nothing where the user chose a cache
    (`JAX_COMPILATION_CACHE_DIR`) or switched it off (`JAX_ENABLE_COMPILATION_CACHE=0`); where the folder
    cannot be had safely, it warns and does nothing. Several threads may be inside at once.

    Yields:
      The folder in use, or None for no cache of ours.
    """
    # JAX has one cache for the process: a setting of this thread would not reach those that compile for it,
    # and a cache once opened stays open whatever is set later. So it is set for all, and taken back whole.
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
    try:
        folder = cache_folder() / "xla"
        private_folder(folder)
    except (CheckpointError, OSError) as error:
        warnings.warn(f"compiled programs are not kept: {error}", stacklevel=4)
        return None
    return folder
