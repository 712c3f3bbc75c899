import jax
import numpy as np
import pytest
from bench.kernel_cases.paged_attention import CASES
from jaxspec_kernels.paged_attention import paged_attention
from paged_attention_arguments import arguments, attention_in_float64, sink_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        paged_attention.why_not("triton") is not None,
        reason=f"paged_attention's Triton kernel {paged_attention.why_not('triton')}",
    ),
]

# Sums in float32 of products of float32 operands, or of bfloat16 operands with the weights rounded to it.
BOUND = {"float32": 2e-6, "bfloat16": 6e-3}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_definition_and_reads_nothing_else(case):
    given, sinks = arguments(case), sink_logits(case)
    scale = case.head_dim**-0.5
    attend = jax.jit(
        lambda *args, sinks: paged_attention(*args, scale=scale, sinks=sinks, implementation="triton")
    )
    result = np.asarray(attend(*given, sinks=sinks), np.float64)
    expected = attention_in_float64(*given, scale=scale, sinks=sinks)
    assert np.isfinite(result).all()
    if not expected.any():
        assert not result.any()
        return
    assert np.linalg.norm(result - expected) <= BOUND[case.dtype] * np.linalg.norm(expected)
