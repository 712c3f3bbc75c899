import jax
import jax.numpy as jnp
import pytest

from jaxspec.engine.device import lowering
from jaxspec.engine.device.lowering import compiler_options
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
    monkeypatch.setattr(lowering, "platform", lambda: backend)
    monkeypatch.setenv("XLA_FLAGS", flags)
    weights = [weight(size // 2), weight(size // 2)]
    expected = {"xla_gpu_enable_triton_gemm": False} if cublas else {}
    assert compiler_options(weights, rows=rows) == expected


def test_sums_over_devices_are_left_to_nccl(monkeypatch):
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    monkeypatch.setattr(lowering, "platform", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", "")
    one, several = (compiler_options([weight(LARGE)], rows=128, num_devices=n) for n in (1, 2))
    kernels = set(several) - set(one)
    assert kernels
    assert not any(several[flag] for flag in kernels)
    assert lowered.compile(several)(jnp.ones(3)).sum() == 6  # XLA knows all of them
    flag = min(kernels)
    monkeypatch.setenv("XLA_FLAGS", f"--{flag}=true")
    assert flag not in compiler_options([weight(LARGE)], rows=128, num_devices=2)


def test_large_programs_for_prompts_alone_run_without_a_graph(monkeypatch):
    monkeypatch.setattr(lowering, "platform", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", "")
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))

    def graph_size(size, decodes):
        options = compiler_options([weight(size)], rows=128, decodes=decodes)
        assert lowered.compile(options)(jnp.ones(3)).sum() == 6  # XLA knows all of them
        return options.get("xla_gpu_graph_min_graph_size", 0)

    assert graph_size(LARGE, decodes=False) > 10_000
    assert graph_size(LARGE, decodes=True) == graph_size(SMALL, decodes=False) == 0


def test_exact_programs_round_every_result(monkeypatch):
    monkeypatch.setattr(lowering, "platform", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", "")
    options = compiler_options([weight(SMALL)], rows=1, is_exact=True)
    assert options == {"xla_allow_excess_precision": False}
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    assert lowered.compile(options)(jnp.ones(3)).sum() == 6  # XLA knows it
    assert "xla_allow_excess_precision" not in compiler_options([weight(SMALL)], rows=1)
