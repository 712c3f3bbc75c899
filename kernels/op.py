"""Choosing an implementation of an operation by name."""

import importlib
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jaxspec_kernels.calls.ffi_layout import UnknownLayoutError

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


_is_exact: ContextVar[bool] = ContextVar("is_exact", default=False)


@contextmanager
def exact(is_on: bool = True) -> Iterator[None]:
    """While a program is traced: whether a row's result must be the same bits whatever rows are beside it.

    Operations then take kernels whose sums are ordered by the shapes of weights and by positions alone, never
    by the number of rows. On a CPU nothing changes.
    """
    token = _is_exact.set(is_on)
    try:
        yield
    finally:
        _is_exact.reset(token)


def is_exact() -> bool:
    """Whether `exact` is on, on a GPU."""
    return _is_exact.get() and device().platform == "gpu"


_results: ContextVar[list[tuple[str, Any]] | None] = ContextVar("results", default=None)


@contextmanager
def recorded() -> Iterator[list[tuple[str, Any]]]:
    """While a program is traced, collects the name and the result of every operation, in order."""
    results: list[tuple[str, Any]] = []
    token = _results.set(results)
    try:
        yield results
    finally:
        _results.reset(token)


class UnavailableImplementationError(RuntimeError):
    """An implementation that was asked for by name cannot run here; the message says why."""


class Op(Generic[_Args, _Result]):
    """An operation with one signature and several implementations.

    Args:
      name: the operation's name in error messages.
      xla: the pure-JAX reference, which runs on every platform.
      triton, numba: the modules, below `jaxspec_kernels`, with the kernel for GPUs and the one for CPUs, a
        function with the operation's name; None if there is none. A module is imported only when its kernel
        is chosen, so importing this package needs neither Triton nor Numba.
      only_by_name: kernels to run only if they are named, because "xla" is faster.
      only_if_exact: kernels to run only if they are named, or inside `exact`.
    """

    def __init__(
        self,
        name: str,
        *,
        xla: Callable[_Args, _Result],
        triton: str | None = None,
        numba: str | None = None,
        only_by_name: Sequence[str] = (),
        only_if_exact: Sequence[str] = (),
    ):
        self.name = name
        self._xla = xla
        self._kernels = {"triton": triton, "numba": numba}
        self._only_by_name = only_by_name
        self._only_if_exact = only_if_exact

    def __call__(self, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        """Runs this machine's default, or the implementation that the keyword `implementation` names.

        Raises:
          UnavailableImplementationError, ValueError: see `select`.
        """
        implementation: Any = kwargs.pop("implementation", None)
        result = self.select(implementation)(*args, **kwargs)
        if (results := _results.get()) is not None:
            results.append((self.name, result))
        return result

    @property
    def implementations(self) -> list[str]:
        """The names of the implementations that there are, whether or not they can run here."""
        return ["xla", *(name for name, module in self._kernels.items() if module is not None)]

    def select(self, implementation: str | None) -> Callable[_Args, _Result]:
        """The implementation "xla", "triton" or "numba", or this machine's default for None.

        Raises:
          UnavailableImplementationError: the named implementation cannot run here.
          ValueError: there is no implementation of this name.
        """
        if implementation is None:
            left_out = [*self._only_by_name, *(() if is_exact() else self._only_if_exact)]
            offered = (name for name in self._kernels if name not in left_out)
            implementation = next((name for name in offered if not self.why_not(name)), "xla")
        if implementation == "xla":
            return self._xla
        if implementation not in self._kernels:
            raise ValueError(
                f"{self.name}: unknown implementation {implementation!r}; use 'xla', 'triton' or 'numba'"
            )
        reason = self.why_not(implementation)
        if reason:
            raise UnavailableImplementationError(f"{self.name}: implementation {implementation!r} {reason}")
        module = importlib.import_module(f"jaxspec_kernels.{self._kernels[implementation]}")
        kernel: Callable[_Args, _Result] = getattr(module, self.name)
        return kernel

    def why_not(self, implementation: str) -> str | None:
        """Why an implementation cannot run here; None if it can, as "xla" always can."""
        if implementation == "xla":
            return None
        if self._kernels[implementation] is None:
            return "does not exist for this operation"
        return why_not(implementation)


def device() -> jax.Device:
    """The device for whose platform kernels are chosen: `jax.default_device`, else this process's first."""
    chosen = getattr(jax.config, "jax_default_device", None)
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


def can_branch() -> bool:
    """Whether programs may branch: on a GPU, a branch copies its condition to the host and ends a graph."""
    return device().platform == "cpu"


def why_not(implementation: str) -> str | None:
    """Why no "triton" or no "numba" kernel can run here; None if they can."""
    return _WHY_NOT[implementation]()


def _why_not_triton() -> str | None:
    if device().platform != "gpu":
        return f"needs a GPU, but jax runs on {device().platform!r} here"
    try:
        import jax_triton  # noqa: F401
        import triton  # noqa: F401
    except ImportError as error:
        return f"needs the package jax-triton (extra cuda12 or cuda13): {error}"
    return None


def _why_not_numba() -> str | None:
    if device().platform != "cpu":
        return f"is for CPUs, but jax runs on {device().platform!r} here"
    try:
        from jaxspec_kernels.calls import numba_call
    except ImportError as error:
        return f"needs the package numba: {error}"
    except UnknownLayoutError as error:
        return f"does not know the foreign function interface of jaxlib {jax.lib.__version__}: {error}"
    # Scales and caches may be float16. Without F16C, LLVM converts it with a function that may be missing.
    if platform.machine() in ("x86_64", "AMD64") and "f16c" not in numba_call.features():
        return "needs a processor that converts float16 (F16C)"
    return None


_WHY_NOT = {"triton": _why_not_triton, "numba": _why_not_numba}
