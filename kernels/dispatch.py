"""Choosing an implementation of an operation by name."""

from collections.abc import Callable
from typing import Any

import jax


class UnavailableImplementationError(RuntimeError):
    """An implementation was asked for by name and cannot run here; the message says why."""


class Op:
    """An operation with one signature and several implementations.

    Args:
      name: what error messages call it.
      xla: the pure-JAX reference, which runs on every platform.
      triton: loads the Triton kernel, or is None where the operation has none yet. It is called
        only when the kernel is chosen, so importing this package needs no Triton.
    """

    def __init__(self, name: str, *, xla: Callable, triton: Callable[[], Callable] | None = None):
        self.name = name
        self._xla = xla
        self._triton = triton

    def __call__(self, *args: Any, implementation: str | None = None, **kwargs: Any) -> Any:
        """Runs the operation.

        `implementation` is "xla", "triton", or None: the kernel on a GPU that has one, else the
        reference.

        Raises:
          UnavailableImplementationError: the implementation named cannot run here.
          ValueError: there is no implementation of that name.
        """
        return self.select(implementation)(*args, **kwargs)

    def select(self, implementation: str | None) -> Callable:
        """The function that `implementation` stands for on this machine."""
        if implementation == "xla":
            return self._xla
        if implementation == "triton":
            reason = self.why_not_triton()
            if reason:
                raise UnavailableImplementationError(f"{self.name}: implementation 'triton' {reason}")
            assert self._triton is not None
            return self._triton()
        if implementation is None:
            return self._xla if self.why_not_triton() else self.select("triton")
        raise ValueError(f"{self.name}: unknown implementation {implementation!r}; use 'xla' or 'triton'")

    def why_not_triton(self) -> str | None:
        """Why the Triton kernel cannot run here, or None when it can."""
        if self._triton is None:
            return "does not exist for this operation"
        if jax.default_backend() != "gpu":
            return f"needs a GPU, and jax runs on {jax.default_backend()!r} here"
        try:
            import jax_triton  # noqa: F401
            import triton  # noqa: F401
        except ImportError as error:
            return f"needs the package jax-triton (extra cuda12 or cuda13): {error}"
        return None
