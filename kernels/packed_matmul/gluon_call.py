"""Calls Gluon kernels from JAX (`engine.packed`, on Hopper).

jax-triton 0.4.1 compiles them with Triton's passes instead of Gluon's, and does not launch the warps that
join in `warp_specialize`. So they are compiled here, and given to the same custom call of jaxlib.
"""

import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
from jax_triton import TensorDescriptor
from jaxlib import gpu_triton
from jaxspec_kernels.calls.triton_call import ptx_version
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource

_jaxlib: Any = gpu_triton
_HOPPER = 90
_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "int32": "i32", "uint8": "u8", "uint32": "u32"}
_ALIGNMENT = 16
"""Bytes to which XLA aligns arrays, at least."""


def gluon_call(
    kernel: Any,
    inputs: Sequence[jax.Array | TensorDescriptor | int],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    num_zeroed: int = 0,
    grid: tuple[int, int],
    num_warps: int,
    **constants: Any,
) -> list[jax.Array]:
    """Launches `kernel` once, on a GPU of the Hopper generation.

    Args:
      kernel: a `gluon.jit` function. Its parameters are a pointer, a descriptor or a number per input, a
        pointer per output, and the constants.
      inputs: arrays, descriptors of arrays whose blocks the card's copy engine (TMA) loads, and int32
        numbers. Calls that differ only in numbers and in shapes share a compiled kernel.
      outputs: shapes and dtypes of the results; elements that the kernel does not write are undefined.
      num_zeroed: how many of the outputs, the last ones, are zeros when the kernel starts.
      grid: the number of programs along two axes.
      num_warps: the warps of the first partition.
      **constants: `constexpr` parameters.
    """
    parameters = [_parameter(each) for each in (*inputs, *outputs)]
    for i in range(len(parameters) - num_zeroed, len(parameters)):
        zeroed = outputs[i - len(inputs)]
        parameters[i] = parameters[i]._replace(zeroed=zeroed.size * zeroed.dtype.itemsize)
    call = _call(kernel, tuple(parameters), grid, num_warps, ptx_version(), tuple(constants.items()))
    given = [each for each in inputs if not isinstance(each, int)]
    arrays = [each.base if isinstance(each, TensorDescriptor) else each for each in given]
    return list(jax.ffi.ffi_call("triton_kernel_call_ffi", list(outputs))(*arrays, opaque=call))


class _Parameter(NamedTuple):
    """A type as Triton writes it, the value of a number, how many bytes of an output are zeroed, and the
    sizes and strides of a descriptor."""

    type: str
    value: int | None = None
    zeroed: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def is_aligned(self) -> bool:
        """Whether a number, or a pointer, is a multiple of `_ALIGNMENT`."""
        return self.type[0] == "*" or (self.value is not None and self.value % _ALIGNMENT == 0)


def _parameter(each: "jax.Array | jax.ShapeDtypeStruct | TensorDescriptor | int") -> _Parameter:
    if isinstance(each, int):
        return _Parameter("i32", each)
    if isinstance(each, TensorDescriptor):
        block = ",".join(map(str, each.block_shape))
        kind = f"tensordesc<{_DTYPES[each.base.dtype.name]}[{block}],{each.layout!r}>"
        return _Parameter(kind, shape=each.shape, strides=each.strides)
    return _Parameter(f"*{_DTYPES[each.dtype.name]}")


# All layers share one, which holds the whole kernel.
@cache
def _call(
    kernel: Any,
    parameters: tuple[_Parameter, ...],
    grid: tuple[int, int],
    num_warps: int,
    ptx_version: int,
    constants: tuple[tuple[str, Any], ...],
) -> bytes:
    """A launch as jaxlib's custom call reads it."""
    types = tuple((each.type, each.is_aligned) for each in parameters)
    launched, layouts = _compile(kernel, types, num_warps, ptx_version, constants)
    left = iter(layouts)
    given: list[Any] = []
    for each in parameters:
        if each.shape:
            given += _descriptor(each, next(left))
        elif each.value is not None:
            given.append(_jaxlib.create_scalar_parameter(each.value, each.type))
        else:
            given.append(_jaxlib.create_array_parameter(each.zeroed, _ALIGNMENT))
    return zlib.compress(_jaxlib.TritonKernelCall(launched, *grid, 1, given).to_proto(kernel.__name__, b""))


def _descriptor(each: _Parameter, layout: dict[str, Any]) -> list[Any]:
    """A descriptor's parameters: itself, then the sizes and strides."""
    descriptor = _jaxlib.create_tma_descriptor_parameter(
        elem_type=TMA_DTYPE_DEVICE_TO_HOST[layout["elem_type"]],
        swizzle=layout["swizzle"],
        shape=each.shape,
        strides=each.strides,
        block_shape=layout["block_size"],
        oob_fill=0,
    )
    sizes = [_jaxlib.create_scalar_parameter(int(size), "i32") for size in each.shape]
    strides = [_jaxlib.create_scalar_parameter(int(stride), "i64") for stride in each.strides]
    return [descriptor, *sizes, *strides]


@cache
def _compile(
    kernel: Any,
    types: tuple[tuple[str, bool], ...],
    num_warps: int,
    ptx_version: int,
    constants: tuple[tuple[str, Any], ...],
) -> tuple[Any, list[dict[str, Any]]]:
    """The kernel as jaxlib launches it, and how the blocks of its descriptors lie in memory.

    Args:
      types: of its parameters, and whether they are aligned.
    """
    target = GPUTarget("cuda", _HOPPER, 32)
    backend = make_backend(target)
    options = backend.parse_options(
        {"num_warps": num_warps, "enable_fp_fusion": True, "ptx_version": ptx_version}
    )
    signature = dict.fromkeys(kernel.arg_names, "constexpr") | dict(
        zip(kernel.arg_names, (each for each, _ in types), strict=False)
    )
    place = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    aligned = {(i,): [["tt.divisibility", _ALIGNMENT]] for i, (_, is_so) in enumerate(types) if is_so}
    source = GluonASTSource(kernel, signature, {place[name]: value for name, value in constants}, aligned)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    metadata: dict[str, Any] = {"num_warps": num_warps}
    for stage in ("ttgir", "llir", "ptx"):
        module = stages[stage](module, metadata)
    launched = _jaxlib.TritonKernel(
        metadata["name"], metadata["num_warps"], 1, metadata["shared"], module, "", _HOPPER
    )
    return launched, metadata["tensordesc_meta"]
