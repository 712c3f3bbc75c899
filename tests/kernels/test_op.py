import importlib
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jaxspec_kernels
import pytest
from jaxspec_kernels.op import Op, UnavailableImplementationError
from op_base import OpTest

on_a_gpu = jax.default_backend() == "gpu"


def reference(x):
    return "xla", x


def make_op(triton=None, numba=None, only_by_name=()):
    return Op("double", xla=reference, triton=triton, numba=numba, only_by_name=only_by_name)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Modules "double_triton" and "double_numba" of the kernels of "double"."""
    for name in ("triton", "numba"):
        module = SimpleNamespace(double=lambda x, name=name: (name, x))
        monkeypatch.setitem(sys.modules, f"jaxspec_kernels.double_{name}", module)


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
    op = make_op(triton="not_there")
    assert op(1) == ("xla", 1)
    with pytest.raises(UnavailableImplementationError, match="needs a GPU"):
        op(1, implementation="triton")


@pytest.mark.gpu
@pytest.mark.skipif(
    make_op("double_triton").why_not("triton") is not None, reason="needs a GPU and jax-triton"
)
def test_on_a_gpu_none_takes_the_kernel():
    assert make_op(triton="double_triton")(1) == ("triton", 1)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown implementation 'cuda'; use 'xla', 'triton' or 'numba'"):
        make_op()(1, implementation="cuda")


@pytest.mark.skipif(on_a_gpu, reason="the kernel is for CPUs")
def test_on_one_cpu_none_takes_the_kernel_for_cpus():
    assert make_op(numba="double_numba")(1) == ("numba", 1)


@pytest.mark.skipif(on_a_gpu, reason="the kernel is for CPUs")
def test_a_kernel_may_run_only_by_name():
    op = make_op(numba="double_numba", only_by_name=("numba",))
    assert op(1) == ("xla", 1)
    assert op(1, implementation="numba") == ("numba", 1)


@pytest.mark.skipif(on_a_gpu, reason="the kernels are for CPUs")
def test_a_processor_that_cannot_convert_float16_goes_without_kernels(monkeypatch):
    numba_call = pytest.importorskip("jaxspec_kernels.calls.numba_call", reason="needs Numba")
    op = make_op(numba="double_numba")
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


def operations():
    """Every operation of the package."""
    package = Path(jaxspec_kernels.__file__).parent
    for path in sorted(package.rglob("*.py")):
        if re.search(r"^\w+ = Op\(", path.read_text("utf-8"), re.MULTILINE):
            parts = path.relative_to(package).with_suffix("").parts
            name = ".".join(("jaxspec_kernels", *(part for part in parts if part != "__init__")))
            yield from (x for x in vars(importlib.import_module(name)).values() if isinstance(x, Op))


OPS = {id(op): op for op in operations()}.values()


def test_every_operation_goes_through_the_base_of_tests():
    """And with it every implementation, since the base takes all that can run."""
    tests = [importlib.import_module(path.stem) for path in Path(__file__).parent.glob("test_*.py")]
    classes = {x for module in tests for x in vars(module).values() if isinstance(x, type)}
    described = (x for x in classes if issubclass(x, OpTest) and hasattr(x, "op") and hasattr(x, "cases"))
    assert sorted({x.op.name for x in described}) == sorted(op.name for op in OPS)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_kernels_are_where_an_operation_says(op):
    """Also those that cannot be imported here, which are an error that says why when asked for by name."""
    for name in op.implementations[1:]:
        path = (
            Path(jaxspec_kernels.__file__).parent.joinpath(*op._kernels[name].split(".")).with_suffix(".py")
        )
        assert re.search(rf"^def {op.name}\(", path.read_text("utf-8"), re.MULTILINE), name
        if op.why_not(name):
            with pytest.raises(UnavailableImplementationError, match=f"{op.name}: implementation '{name}'"):
                op.select(name)


def test_importing_the_operations_needs_neither_triton_nor_numba():
    modules = sorted({op.select("xla").__module__.rpartition(".")[0] for op in OPS})
    code = "import sys; sys.modules['triton'] = sys.modules['jax_triton'] = sys.modules['numba'] = None\n"
    code += "\n".join(f"import {name}" for name in modules)
    subprocess.run([sys.executable, "-c", code], check=True)
