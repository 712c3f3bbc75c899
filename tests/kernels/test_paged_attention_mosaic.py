"""The kernel for prompts on Hopper GPUs. Without one, only that it can be lowered."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernel_cases.paged_attention import Case
from jaxspec_kernels.paged_attention import mosaic_kernel
from paged_attention_arguments import arguments, attention_in_float64, sink_logits

PROMPT = {"page_size": 16, "table_width": 41, "context": 640, "dtype": "bfloat16"}
CASES = (
    Case("8B", 5, 32, 8, 4, 128, **PROMPT),
    Case("70B", 2, 32, 2, 8, 128, **PROMPT),
    Case("gpt-oss", 3, 64, 8, 8, 64, sinks=True, window=128, **PROMPT),
    Case("window, empty slots", 7, 32, 2, 4, 128, window=50, empty=True, **PROMPT),
    Case("no context at all", 12, 32, 2, 4, 128, **{**PROMPT, "context": -1}),
    Case("begins with the first token", 40, 32, 2, 4, 128, **{**PROMPT, "context": 31}),
    Case("large pages", 3, 32, 2, 4, 128, **{**PROMPT, "page_size": 64, "table_width": 11}),
    Case("small pages", 3, 32, 2, 4, 128, **{**PROMPT, "page_size": 8, "table_width": 81}),
)
BOUND = 6e-3
"""Of products of bfloat16 operands, with the weights rounded to it."""


@pytest.mark.gpu
@pytest.mark.skipif(not mosaic_kernel.runs_here(), reason="needs a Hopper GPU and CUDA 12.9.1 or later")
@pytest.mark.parametrize("blocks", [None, 1, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_definition_and_reads_nothing_else(case, blocks, monkeypatch):
    """Also with so few thread blocks that each has many tiles, of which some are empty."""
    if blocks is not None:
        monkeypatch.setattr(mosaic_kernel, "multiprocessors", lambda: blocks)
        mosaic_kernel.paged_attention.clear_cache()
    given, sinks, scale = arguments(case), sink_logits(case), case.head_dim**-0.5
    attend = jax.jit(partial(mosaic_kernel.paged_attention, scale=scale))
    result = np.asarray(attend(*given, sinks=sinks), np.float64)
    expected = attention_in_float64(*given, scale=scale, sinks=sinks)
    assert np.isfinite(result).all()
    assert np.linalg.norm(result - expected) <= BOUND * np.linalg.norm(expected)
    mosaic_kernel.paged_attention.clear_cache()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_can_be_lowered_without_a_gpu(case, monkeypatch):
    """The interface that the kernel is written for changes between versions of JAX."""
    monkeypatch.setattr(mosaic_kernel, "multiprocessors", lambda: 132)
    given = arguments(case)
    assert mosaic_kernel.supports(given[0], given[1])
    mosaic_kernel.paged_attention.clear_cache()
    attend = jax.jit(partial(mosaic_kernel.paged_attention, scale=1.0, sinks=sink_logits(case)))
    text = attend.trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") == 1


def shapes(slots=64, rows=32, heads=32, head_dim=128, kv_heads=8, page_size=16, dtype=jnp.bfloat16):
    queries = jax.ShapeDtypeStruct((slots, rows, heads, head_dim), dtype)
    return queries, jax.ShapeDtypeStruct((9, kv_heads, 2, page_size, head_dim), dtype)


UNSUPPORTED = (
    {"rows": 4},  # decoding
    {"rows": 128},
    {"rows": 48},
    {"heads": 9, "kv_heads": 3},
    {"head_dim": 80},
    {"page_size": 256},
    {"page_size": 4},
    {"dtype": jnp.float32},
)


@pytest.mark.parametrize("changes", UNSUPPORTED, ids=str)
def test_other_shapes_are_left_to_triton(changes):
    assert mosaic_kernel.supports(*shapes())
    assert not mosaic_kernel.supports(*shapes(**changes))


def test_it_runs_only_where_it_is_faster(monkeypatch):
    monkeypatch.setattr(mosaic_kernel, "multiprocessors", lambda: 132)
    monkeypatch.setattr(mosaic_kernel, "runs_here", lambda: False)
    assert not mosaic_kernel.is_faster(*shapes())
    monkeypatch.setattr(mosaic_kernel, "runs_here", lambda: True)
    assert mosaic_kernel.is_faster(*shapes())
    assert not mosaic_kernel.is_faster(*shapes(slots=16))
    # Three tiles for each multiprocessor are 396; a slot has 8.
    assert not mosaic_kernel.is_faster(*shapes(slots=49))
    assert mosaic_kernel.is_faster(*shapes(slots=50))
    assert mosaic_kernel.is_faster(*shapes(heads=64, slots=32))


@pytest.mark.parametrize(("slots", "rows", "taken"), [(64, 32, True), (64, 4, False)])
def test_the_kernel_for_gpus_leaves_long_prompts_to_it(monkeypatch, slots, rows, taken):
    pytest.importorskip("jax_triton", reason="needs jax-triton and Triton")
    from jaxspec_kernels.paged_attention import triton_kernel

    monkeypatch.setattr(mosaic_kernel, "multiprocessors", lambda: 132)
    monkeypatch.setattr(mosaic_kernel, "runs_here", lambda: True)
    monkeypatch.setattr(mosaic_kernel, "paged_attention", lambda queries, *rest, **settings: "Mosaic")
    monkeypatch.setattr(triton_kernel, "triton_call", lambda *args, **settings: pytest.fail("Triton"))
    table = jax.ShapeDtypeStruct((slots, 288), jnp.int32)
    bounds = jax.ShapeDtypeStruct((slots, rows), jnp.int32)
    attend = partial(triton_kernel.paged_attention, *shapes(slots, rows), table, bounds, bounds, scale=1.0)
    if taken:
        assert attend() == "Mosaic"
    else:
        with pytest.raises(pytest.fail.Exception, match="Triton"):
            attend()


@pytest.mark.parametrize(
    ("capability", "version", "runs"),
    [
        ("9.0", "PJRT C API\ncuda 13000", True),
        ("9.0", "cuda 12091", True),
        ("9.0", "cuda 12090", False),
        ("10.0", "cuda 13000", False),
        ("9.0", "unknown", False),
    ],
)
def test_old_compilers_and_other_gpus_are_left_to_triton(monkeypatch, capability, version, runs):
    device = SimpleNamespace(
        platform="gpu", compute_capability=capability, client=SimpleNamespace(platform_version=version)
    )
    monkeypatch.setattr(mosaic_kernel, "device", lambda: device)
    assert mosaic_kernel.runs_here() is runs
