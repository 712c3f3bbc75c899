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


def test_xla_knows_the_option():
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    assert lowered.compile({"xla_gpu_enable_triton_gemm": False})(jnp.ones(3)).sum() == 6
