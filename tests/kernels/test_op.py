import platform
import subprocess
import sys

import jax
import pytest
from jaxspec_kernels.op import Op, UnavailableImplementationError

on_a_gpu = jax.default_backend() == "gpu"


def reference(x):
    return "xla", x


def make_op(triton=None, numba=None, only_by_name=()):
    return Op("double", xla=reference, triton=triton, numba=numba, only_by_name=only_by_name)


def test_a_name_chooses_and_none_takes_what_there_is():
    assert make_op()(1, implementation="xla") == ("xla", 1)
    assert make_op()(1) == ("xla", 1)


def test_an_operation_without_a_kernel_says_so_when_asked_for_it():
    with pytest.raises(
        UnavailableImplementationError, match="double: implementation 'triton' does not exist"
    ):
        make_op()(1, implementation="triton")


@pytest.mark.skipif(on_a_gpu, reason="the kernel can run here")
def test_off_gpu_the_kernel_is_an_error_by_name_and_never_loaded():
    op = make_op(triton=lambda: pytest.fail("loaded"))
    assert op(1) == ("xla", 1)
    with pytest.raises(UnavailableImplementationError, match="needs a GPU"):
        op(1, implementation="triton")


@pytest.mark.gpu
@pytest.mark.skipif(
    make_op(lambda: reference).why_not("triton") is not None, reason="needs a GPU and jax-triton"
)
def test_on_a_gpu_none_takes_the_kernel():
    assert make_op(triton=lambda: lambda x: ("triton", x))(1) == ("triton", 1)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown implementation 'cuda'; use 'xla', 'triton' or 'numba'"):
        make_op()(1, implementation="cuda")


@pytest.mark.skipif(on_a_gpu, reason="the kernel is for CPUs")
def test_on_one_cpu_none_takes_the_kernel_for_cpus():
    assert make_op(numba=lambda: lambda x: ("numba", x))(1) == ("numba", 1)


@pytest.mark.skipif(on_a_gpu, reason="the kernel is for CPUs")
def test_a_kernel_may_run_only_by_name():
    op = make_op(numba=lambda: lambda x: ("numba", x), only_by_name=("numba",))
    assert op(1) == ("xla", 1)
    assert op(1, implementation="numba") == ("numba", 1)


@pytest.mark.skipif(on_a_gpu, reason="the kernels are for CPUs")
def test_a_processor_that_cannot_convert_float16_goes_without_kernels(monkeypatch):
    numba_call = pytest.importorskip("jaxspec_kernels.numba_call", reason="needs Numba")
    op = make_op(numba=lambda: lambda x: ("numba", x))
    for machine, features, chosen in (
        ("x86_64", {"avx", "f16c"}, "numba"),
        ("x86_64", {"avx"}, "xla"),
        ("aarch64", {"neon"}, "numba"),
    ):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(numba_call, "features", lambda features=features: frozenset(features))
        assert op(1) == (chosen, 1)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(numba_call, "features", frozenset)
    with pytest.raises(UnavailableImplementationError, match="F16C"):
        op(1, implementation="numba")


def test_importing_the_operations_needs_neither_triton_nor_numba():
    modules = ("gumbel_sample", "kv_write", "matmul", "paged_attention")
    code = "import sys; sys.modules['triton'] = sys.modules['jax_triton'] = sys.modules['numba'] = None\n"
    code += "\n".join(f"import jaxspec_kernels.{name}" for name in modules)
    subprocess.run([sys.executable, "-c", code], check=True)
