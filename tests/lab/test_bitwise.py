"""`check_lossless(bitwise=True)` finds the operation that makes a row depend on its company."""

import jax.numpy as jnp
import pytest
from jaxspec_kernels.matmul import matmul
from jaxspec_kernels.op import Op
from jaxspec_kernels.paged_attention import paged_attention
from tiny_gguf import write_packed_gguf

import jaxspec
from jaxspec.weights import packed_weights

pytestmark = pytest.mark.filterwarnings("ignore:no draft was accepted")

CHECK = {"max_new_tokens": 6, "samples": 0, "batch_size": 2, "max_model_len": 48, "slot_sizes": ()}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_packed_gguf(tmp_path_factory.mktemp("bitwise") / "tiny.gguf")


@pytest.fixture(autouse=True)
def _small_weights_are_packed(monkeypatch):
    monkeypatch.setattr(packed_weights, "MIN_WEIGHT_BYTES", 0)


def check(target):
    return jaxspec.check_lossless("ngram", target, bitwise=True, **CHECK)


def test_nothing_is_found_on_a_cpu_that_rounds_activations(target):
    report = check(target)
    assert report.bits is None
    assert report


@pytest.mark.parametrize("faulty", [matmul, paged_attention], ids=lambda op: op.name)
def test_the_operation_with_a_fault_is_named(target, monkeypatch, faulty):
    select = Op.select

    def with_fault(op, implementation):
        right = select(op, implementation)

        def wrong(*args, **kwargs):
            result = right(*args, **kwargs)
            rows = result.shape[0] * (result.shape[1] if faulty is paged_attention else 1)
            return result.at[..., 0].multiply(jnp.float32(1 + 2**-22)) if rows > 5 else result

        return wrong if op is faulty else right

    monkeypatch.setattr(Op, "select", with_fault)
    report = check(target)
    assert not report
    assert report.bits.operation == faulty.name
    assert 0 < report.bits.share < 0.1
    assert report.bits.rows == "one row of 8 texts each"
    assert f"{faulty.name} (operation {report.bits.number}, after " in str(report)
