import jax.numpy as jnp
import numpy as np
from bench.kernel_cases.paged_attention import CASES
from jaxspec_kernels.paged_attention import paged_attention
from op_base import OpTest
from paged_attention_arguments import arguments, attention_in_float64, sink_logits

# Sums in float32 of products of float32 operands, or of bfloat16 operands with the weights rounded to it.
BOUND = {"float32": 2e-6, "bfloat16": 6e-3}


class TestPagedAttention(OpTest):
    """Nothing is read but what rows see."""

    op = paged_attention
    cases = CASES
    usual = ("window", "odd sizes, empty slots")
    bound = BOUND
    by_row = (0, 2, 3, 4)

    def arguments(self, case):
        return arguments(case)

    def options(self, case):
        return {"scale": case.head_dim**-0.5, "sinks": sink_logits(case)}

    def definition(self, case, *given):
        return attention_in_float64(*given, **self.options(case))

    @staticmethod
    def is_for(case, implementation):
        return implementation == "triton" or (case.dtype == "float32" and case.slots * case.rows <= 128)

    def test_a_query_is_answered_the_same_whatever_is_beside_it(self, usual_case, implementation):
        queries, cache, table, first, last = self.arguments(usual_case)
        together = self.run(usual_case, (queries, cache, table, first, last), implementation)[0]
        for row in range(usual_case.rows):
            one = slice(row, row + 1)
            given = (queries[:, one], cache, table, first[:, one], last[:, one])
            alone = self.run(usual_case, given, implementation)[0]
            if implementation in self.exact:
                np.testing.assert_array_equal(alone, together[:, one])
            else:
                self.check(usual_case, [alone], np.asarray(together[:, one]))

    def test_a_cache_in_float16_gives_what_its_values_give_in_float32(self, usual_case, implementation):
        case = usual_case
        queries, cache, *rest = self.arguments(case)
        half = jnp.asarray(cache, jnp.float16)
        given = queries, half.astype(queries.dtype), *rest
        results = self.run(case, (queries, half, *rest), implementation)
        if implementation in self.exact:
            np.testing.assert_array_equal(results[0], self.run(case, given, implementation)[0])
        else:
            self.check(case, results, self.expected(case, given))
