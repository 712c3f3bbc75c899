"""Calls functions compiled by Numba from XLA programs on the CPU, using XLA's own threads.

XLA calls a foreign function with a pointer to a call frame. The frame consists of structures, which are read
here as 64-bit words; their layout comes from jaxlib's own header (`ffi_layout.py`). The first call asks for
the version of the interface instead of for work.

A kernel is a Python function `part(frame, i, parts)` that does a share of the work and returns 0. It may be a
closure: what it refers to from outside is constant in the compiled code, which Numba caches.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from hashlib import sha256
from pathlib import Path
from threading import RLock
from typing import Any, ParamSpec

import jax
import llvmlite.binding
import numba
from jaxspec_kernels.calls import kernel_cache
from jaxspec_kernels.calls.ffi_layout import api_version, word_of
from llvmlite import ir
from numba import cfunc, types
from numba.core import config, extending
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.cgutils import get_or_insert_function
from numba.core.registry import cpu_target

# Typed as Any, because Numba's stub does not know that Numba passes the typing context itself.
intrinsic: Any = extending.intrinsic

_HEADER = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text("utf-8")
VERSION = api_version(_HEADER)
"""The interface's version as the word that a handler reports."""
_word = partial(word_of, _HEADER)
_FRAME_EXTENSION = _word("XLA_FFI_CallFrame", "extension_start")
_FRAME_API, _FRAME_CONTEXT = _word("XLA_FFI_CallFrame", "api"), _word("XLA_FFI_CallFrame", "ctx")
_FRAME_ARGUMENTS = _word("XLA_FFI_CallFrame", "args", "args")
_FRAME_RESULTS = _word("XLA_FFI_CallFrame", "rets", "rets")
_EXTENSION_METADATA = _word("XLA_FFI_Metadata_Extension", "metadata")
_METADATA_VERSION = _word("XLA_FFI_Metadata", "api_version", "major_version")
_BUFFER_DATA, _BUFFER_SHAPE = _word("XLA_FFI_Buffer", "data"), _word("XLA_FFI_Buffer", "dims")
_API_SCHEDULE = _word("XLA_FFI_Api", "XLA_FFI_ThreadPool_Schedule")
_API_NUM_THREADS = _word("XLA_FFI_Api", "XLA_FFI_ThreadPool_NumThreads")

_WORD = ir.IntType(64)
CACHE_LINE = 64
"""Bytes of a cache line."""


def njit(function: Callable[..., Any]) -> Any:
    """`numba.njit`, also where NUMBA_DISABLE_JIT asks for Python: kernels are called by XLA."""
    with _changed(DISABLE_JIT=0):
        return numba.njit(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Like `njit`, for a function to be inlined into its callers."""
    with _changed(DISABLE_JIT=0):
        return numba.njit(function, inline="always")


@contextmanager
def _changed(**settings: Any) -> Iterator[None]:
    """Changes Numba's settings, which all threads share, for a moment."""
    before = {name: getattr(config, name) for name in settings}
    vars(config).update(settings)
    try:
        yield
    finally:
        vars(config).update(before)


@cache
def features() -> frozenset[str]:
    """What the processor that Numba compiles for can do, by LLVM's names, such as "avx2"."""
    known = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return frozenset(feature[1:] for feature in known if feature.startswith("+"))


def _pointer_to(element: Any) -> Any:
    """A Numba intrinsic that turns an address into a pointer to elements of a type."""

    @intrinsic
    def pointer_at(typing_context, address):
        pointer = types.CPointer(element)

        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(pointer))

        return pointer(types.int64), generate

    return pointer_at


words_at, doubles_at, integers_at, floats_at, _halves_at, _bytes_at = map(
    _pointer_to, (types.int64, types.float64, types.int32, types.float32, types.uint16, types.uint8)
)


@intrinsic
def _add(typing_context, address, value):
    """Adds to the word at an address, atomically; returns its old value."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _call(typing_context, function, arguments):
    """Calls the function at an address with a tuple of words; returns a word."""
    count = arguments.count

    def generate(context, builder, signature, values):
        pointer = builder.inttoptr(values[0], ir.FunctionType(_WORD, [_WORD] * count).as_pointer())
        return builder.call(pointer, [builder.extract_value(values[1], i) for i in range(count)])

    return types.int64(types.int64, types.UniTuple(types.int64, count)), generate


@intrinsic
def allocate(typing_context, size):
    """Allocates `size` bytes and returns their address; free them with `release`.

    They begin with a cache line, so that no vector lies across two. A Numba array would be freed after its
    last use as an array, although its address may still be in use.
    """

    def generate(context, builder, signature, arguments):
        function = get_or_insert_function(
            builder.module, ir.FunctionType(_WORD, [_WORD, _WORD]), "aligned_alloc"
        )
        last = _WORD(CACHE_LINE - 1)
        whole_lines = builder.and_(builder.add(arguments[0], last), builder.not_(last))
        return builder.call(function, [_WORD(CACHE_LINE), whole_lines])

    return types.int64(types.int64), generate


@intrinsic
def release(typing_context, address):
    """Frees memory of `allocate`."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [_WORD])
        builder.call(get_or_insert_function(builder.module, kind, "free"), arguments)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def half_bits(typing_context, value):
    """The bits of a float32 rounded to float16."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


def _address_of(name: str) -> Any:
    """A Numba intrinsic that returns the address of the `part` registered under a name.

    The name is resolved when code is loaded, so that code cached by an earlier process works too.
    """

    @intrinsic
    def address(typing_context):
        def generate(context, builder, signature, arguments):
            kind = ir.FunctionType(_WORD, [_WORD])
            return builder.ptrtoint(get_or_insert_function(builder.module, kind, name), _WORD)

        return types.int64(), generate

    return address


@njit
def argument(frame, i):
    """The buffer of operand i."""
    return words_at(words_at(words_at(frame)[_FRAME_ARGUMENTS])[i])


@njit
def result(frame, i):
    """The buffer of result i."""
    return words_at(words_at(words_at(frame)[_FRAME_RESULTS])[i])


@intrinsic(prefer_literal=True)
def shape(typing_context, buffer, rank):
    """The shape of a buffer with `rank` axes, a constant, as a tuple."""
    sizes = types.UniTuple(types.int64, rank.literal_value)

    def generate(context, builder, signature, arguments):
        def load(address, i):
            return builder.load(builder.gep(address, [_WORD(i)]))

        start = builder.inttoptr(load(arguments[0], _BUFFER_SHAPE), _WORD.as_pointer())
        return context.make_tuple(builder, sizes, [load(start, i) for i in range(sizes.count)])

    return sizes(buffer, rank), generate


@njit
def floats(buffer):
    """A pointer to a buffer's float32 elements."""
    return floats_at(buffer[_BUFFER_DATA])


@njit
def halves(buffer):
    """A pointer to the bits of a buffer's float16 elements."""
    return _halves_at(buffer[_BUFFER_DATA])


@njit
def integers(buffer):
    """A pointer to a buffer's int32 elements."""
    return integers_at(buffer[_BUFFER_DATA])


@njit
def bytes_of(buffer):
    """A pointer to a buffer's bytes, or to its elements of bool."""
    return _bytes_at(buffer[_BUFFER_DATA])


@njit
def address(buffer):
    """The address of a buffer's first element."""
    return buffer[_BUFFER_DATA]


@njit
def _asks_version(frame):
    """Whether a call only asks for the version of the interface; if so, answers it."""
    extension = words_at(frame)[_FRAME_EXTENSION]
    if extension == 0:
        return False
    words_at(words_at(extension)[_EXTENSION_METADATA])[_METADATA_VERSION] = VERSION
    return True


# The words of a job, which the calling thread and its helpers share.
_NEXT, _DONE, _HOLDERS, _PARTS, _PART, _FRAME, _ORDER, _JOB_WORDS = 0, 1, 2, 3, 4, 5, 6, 11


@njit
def _work_off(job):
    """Runs parts of a job until every part has been started."""
    words = words_at(job)
    while True:
        i = _add(job + 8 * _NEXT, 1)
        if i >= words[_PARTS]:
            return
        _call(words[_PART], (words[_FRAME], i, words[_PARTS]))
        _add(job + 8 * _DONE, 1)


@njit
def _let_go(job):
    """Drops one reference to a job; the last one frees it."""
    if _add(job + 8 * _HOLDERS, -1) == 1:
        release(job)


_WORD_TO_WORD = types.int64(types.int64)
_TASK = "jaxspec_task"
_task_address = _address_of(_TASK)


def _task(job):
    """The task that is scheduled on XLA's threads."""
    _work_off(job)
    _let_go(job)
    return 0


@njit
def _handle(frame, part):
    """Runs a call of a kernel, split into as many parts as XLA has threads; returns 0, or 1 for an error.

    The calling thread runs parts too and waits only for parts that a helper has started, so a call ends even
    if no other thread ever becomes free. A helper that starts late finds no parts left.

    Args:
      frame: address of the call frame.
      part: address of the kernel's `part`.
    """
    if _asks_version(frame):
        return 0
    words = words_at(frame)
    api = words_at(words[_FRAME_API])
    job = allocate(8 * _JOB_WORDS)
    shared = words_at(job)
    # XLA_FFI_ThreadPool_NumThreads_Args, then XLA_FFI_ThreadPool_Schedule_Args.
    shared[_ORDER], shared[_ORDER + 1], shared[_ORDER + 2] = 32, 0, words[_FRAME_CONTEXT]
    shared[_ORDER + 3] = job + 8 * _PARTS
    if _call(api[_API_NUM_THREADS], (job + 8 * _ORDER,)) != 0:
        return 1
    shared[_NEXT], shared[_DONE], shared[_HOLDERS] = 0, 0, shared[_PARTS]
    shared[_PART], shared[_FRAME] = part, frame
    shared[_ORDER], shared[_ORDER + 3], shared[_ORDER + 4] = 40, _task_address(), job
    for _ in range(shared[_PARTS] - 1):
        _call(api[_API_SCHEDULE], (job + 8 * _ORDER,))
    _work_off(job)
    done = 0
    while done < shared[_PARTS]:
        done = _add(job + 8 * _DONE, 0)
    _let_go(job)
    return 0


@njit
def _handle_alone(frame, part):
    """Like `_handle`, on the caller's thread alone."""
    if _asks_version(frame):
        return 0
    return _call(part, (frame, 0, 1))


_KEPT: list[Any] = []
"""Compiled functions, kept alive because XLA holds pointers to them."""


class _CacheByName(FunctionCache):
    """Numba's cache of compiled code, for functions whose name says all that the code depends on.

    Numba would also compare what a closure refers to, but no two processes see the same there.
    """

    def _index_key(self, sig: Any, codegen: Any) -> tuple:
        return sig, codegen.magic_tuple()


def _compile(signature: Any, function: Callable[..., Any], fastmath: set[str]) -> Any:
    # Numba finds cached code by this name, so code for another version of jaxlib is not reused.
    function.__qualname__ = f"{function.__name__}_{jax.lib.__version__}_{_sources()}"
    chosen = getattr(config, "CACHE_DIR", "")
    folder = None if chosen else kernel_cache.find_folder()
    compiled: Any = CFunc(function, (signature.args, signature.return_type), {}, {"fastmath": fastmath})
    with _changed(DISABLE_JIT=0, CACHE_DIR=chosen if folder is None else str(folder)):
        try:
            compiled._cache = _CacheByName(function)
            compiled.compile()
        except Exception:  # no place for a cache, or one that is full or damaged
            compiled = cfunc(signature, fastmath=fastmath)(function)
    _KEPT.append(compiled)
    return compiled


@cache
def _sources() -> str:
    """A digest of all kernels' sources; Numba itself only checks the file of the function."""
    digest = sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _register_task() -> None:
    llvmlite.binding.add_symbol(_TASK, _compile(_WORD_TO_WORD, _task, set()).address)


_COMPILING = RLock()
_Args = ParamSpec("_Args")


def once(make: Callable[_Args, str]) -> Callable[_Args, str]:
    """Decorates a function that compiles and registers a kernel, so that it runs once for given arguments.

    A lock serialises threads: engines may be loaded in parallel, and XLA rejects a name that is registered
    twice.
    """
    made: Any = cache(make)

    @wraps(make)
    def locked(*args: _Args.args, **kwargs: _Args.kwargs) -> str:
        with _COMPILING:
            return made(*args, **kwargs)

    return locked


def register(name: str, part: Callable[..., Any], *, fastmath: set[str], alone: bool = False) -> str:
    """Makes a kernel the function that `jax.ffi.ffi_call(name, ...)` runs on the CPU; returns the name.

    Numba caches the compiled code in the folder NUMBA_CACHE_DIR, else in that of `kernel_cache`, else next to
    the functions' source or in the user's cache folder; without any of them it is compiled again.

    Args:
      name: name of the target. It can be registered once per process, and names everything that `part` refers
        to and that may have other values.
      part: `part(frame, i, parts)` does part i of `parts` of the call at address `frame`, and returns 0.
      fastmath: LLVM's flags for the floating-point operations of `part`.
      alone: whether the caller's thread does all of the work: for kernels too short to be worth another one.
    """
    _register_task()
    part.__name__ = name
    compiled = _compile(types.int64(types.int64, types.int64, types.int64), part, fastmath)
    llvmlite.binding.add_symbol(name, compiled.address)
    address, run = _address_of(name), _handle_alone if alone else _handle

    def handler(frame):
        return run(frame, address())

    handler.__name__ = f"{name}_handler"
    caller = _compile(_WORD_TO_WORD, handler, set())
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(caller.ctypes), platform="cpu")
    return name
