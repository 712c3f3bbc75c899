import jax
import jax.numpy as jnp
import pytest

from jaxspec.engine.programs import compiler_options
from jaxspec.sharding import make_mesh, replicated

LARGE, SMALL = 1 << 31, 1 << 28


def weight(nbytes):
    return jax.ShapeDtypeStruct((nbytes,), jnp.uint8, sharding=replicated(make_mesh()))


@pytest.mark.parametrize(
    ("backend", "rows", "size", "flags", "cublas"),
    [
        ("gpu", 128, LARGE, "", True),
        ("gpu", 63, LARGE, "", False),
        ("gpu", 128, SMALL, "", False),
        ("gpu", 128, LARGE, "--xla_gpu_enable_triton_gemm=true", False),
        ("cpu", 128, LARGE, "", False),
    ],
)
def test_many_rows_through_large_weights_are_left_to_cublas(monkeypatch, backend, rows, size, flags, cublas):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setenv("XLA_FLAGS", flags)
    weights = [weight(size // 2), weight(size // 2)]
    expected = {"xla_gpu_enable_triton_gemm": False} if cublas else {}
    assert compiler_options(weights, rows=rows) == expected


def test_programs_that_read_prompts_have_no_graphs(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", "")
    prompts = {"xla_gpu_graph_min_graph_size": 1 << 20}
    assert compiler_options([weight(SMALL)], rows=128, reads_prompts=True) == prompts
    assert compiler_options([weight(LARGE)], rows=128, reads_prompts=True) == {
        "xla_gpu_enable_triton_gemm": False,
        **prompts,
    }
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_graph_min_graph_size=3")
    assert compiler_options([weight(SMALL)], rows=128, reads_prompts=True) == {}


def test_xla_knows_the_options(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", "")
    options = compiler_options([weight(LARGE)], rows=128, reads_prompts=True)
    assert len(options) == 2
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    assert lowered.compile(options)(jnp.ones(3)).sum() == 6
