"""Compiled programs kept on disk between runs."""

import os
from pathlib import Path

import jax

from jaxspec.checkpoints.cache import cache_folder


def enable_compilation_cache() -> Path | None:
    """Points JAX's persistent compilation cache at a folder that only this user can read or write.

    A cache that others can write would let them run code here. Does nothing where the user chose a cache
    (`JAX_COMPILATION_CACHE_DIR`), or switched it off (`JAX_ENABLE_COMPILATION_CACHE=0`), or where the
    folder cannot be had.

    Returns:
      The folder in use, or None for no cache of ours.
    """
    chosen, enabled = (
        jax.config.values[f"jax_{name}"] for name in ("compilation_cache_dir", "enable_compilation_cache")
    )
    if chosen is not None or not enabled:
        return None
    folder = cache_folder() / "xla"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
            return None
        folder.chmod(0o700)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder
