"""How Triton kernels are called, with the packages for GPUs faked."""

import importlib
import sys
import types
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir, partial_eval, xla
from jaxspec_kernels.calls.ptxas import Ptxas

LAUNCH = Primitive("fake_launch")
LAUNCH.multiple_results = True
LAUNCH.def_abstract_eval(lambda *arrays, shapes: [jax.core.ShapedArray(x.shape, x.dtype) for x in shapes])
LAUNCH.def_impl(partial(xla.apply_primitive, LAUNCH))
mlir.register_lowering(
    LAUNCH,
    lambda context, *arrays, shapes: jax.ffi.ffi_lowering("fake_launch")(context, *arrays),
    platform="cuda",
)


def zeros(*arrays, shapes):
    return [jnp.zeros(each.shape, each.dtype) for each in shapes]


mlir.register_lowering(LAUNCH, mlir.lower_fun(zeros, multiple_results=True), platform="cpu")


def launch(reference, *arrays, kernel, out_type, grid, num_warps, num_stages, backend_options):
    """As jax-triton launches a kernel that updates its first array in place."""
    shapes = (jax.typeof(reference[...]), *out_type)
    reference[...], *created = LAUNCH.bind(reference[...], *arrays, shapes=shapes)
    return created


@pytest.fixture
def triton_call(monkeypatch):
    """The module, made of fakes; Triton's own `ptxas` is of CUDA 13.4."""
    own = types.SimpleNamespace(version="13.4")
    compiler = types.SimpleNamespace(get_ptxas=lambda arch: own, ptx_get_version={"13.4": 94}.__getitem__)
    fakes = {
        "jax_triton": types.SimpleNamespace(triton_call=launch),
        "jax_triton.triton_lib": types.SimpleNamespace(triton_kernel_call_p=LAUNCH),
        "triton": types.SimpleNamespace(),
        "triton.backends": types.SimpleNamespace(),
        "triton.backends.nvidia": types.SimpleNamespace(),
        "triton.backends.nvidia.compiler": compiler,
    }
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)
    # To be forgotten again.
    monkeypatch.setitem(sys.modules, "jaxspec_kernels.calls.triton_call", None)
    del sys.modules["jaxspec_kernels.calls.triton_call"]
    module = importlib.import_module("jaxspec_kernels.calls.triton_call")
    monkeypatch.setattr(module, "device", lambda: types.SimpleNamespace(compute_capability="9.0"))
    return module


@pytest.mark.parametrize(("jaxlibs", "written"), [("12.9", 88), ("13.0", 90), ("13.5", 94), (None, 94)])
def test_triton_writes_what_jaxlibs_ptxas_takes(jaxlibs, written, triton_call, tmp_path, monkeypatch):
    monkeypatch.setattr(triton_call, "find_ptxas", lambda: jaxlibs and Ptxas(tmp_path, jaxlibs))
    assert triton_call.ptx_version() == written


@pytest.mark.parametrize(("capability", "has"), [("8.0", False), ("9.0", True), ("10.0", True)])
def test_cards_before_hopper_have_no_copy_engine(capability, has, triton_call, monkeypatch):
    monkeypatch.setattr(triton_call, "device", lambda: types.SimpleNamespace(compute_capability=capability))
    assert triton_call.has_tma() == has


def test_a_call_whose_results_are_unused_is_dropped(triton_call, monkeypatch):
    """jax 0.12 cannot call jax-triton's rule for that, wherever it looks for unused results."""

    def rule(used_outs, eqn):
        raise NotImplementedError

    monkeypatch.setitem(partial_eval.dce_rules, LAUNCH, rule)
    monkeypatch.setattr(triton_call, "ptx_version", lambda: 90)

    def call(x):
        shape = jax.ShapeDtypeStruct((3,), jnp.int32)
        return triton_call.triton_call(None, (x, x + 1), [shape], in_place=1, grid=(1,))

    @jax.custom_jvp
    def updated(x):
        return call(x)[0]

    updated.defjvp(lambda primals, tangents: (updated(*primals), tangents[0] * call(*primals)[0]))

    def in_loop(x):
        def body(x, _):
            updated, created = call(x)
            call(updated)
            return updated, created

        return lax.scan(body, x, length=2)

    x = jnp.zeros(2)
    assert [each.shape for each in call(x)] == [(2,), (3,)]  # outside of any program
    results = jax.eval_shape(in_loop, x)
    assert [(each.shape, each.dtype) for each in results] == [((2,), jnp.float32), ((2, 3), jnp.int32)]
    gradient = jax.grad(jax.remat(lambda x: updated(x).sum()))
    for program, calls in (
        (in_loop, 1),
        (lambda x: in_loop(x)[0], 1),
        (lambda x: in_loop(x)[1], 1),
        (lambda x: (in_loop(x), x)[1], 0),
        (jax.remat(lambda x: call(x)[1]), 1),
        (gradient, 1),
        (lambda x: (gradient(x), x)[1], 0),
    ):
        lowered = jax.jit(program).trace(x).lower(lowering_platforms=("cuda",))
        assert lowered.as_text().count("fake_launch") == calls
