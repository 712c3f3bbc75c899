import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench.shapes
import jax.numpy as jnp
import numpy as np
import pytest
from bench.shapes import SHAPES, build_models
from bench.traffic import weight_bytes
from golden_files import golden_checkpoint
from jaxspec_kernels.expert_matmul import Mxfp4Weight

TINY = {key: value for key, value in golden_checkpoint("gpt-oss").config.items() if key != "layer_types"}


def build(**changes):
    target = TINY | {"hidden_size": 64, "intermediate_size": 96}
    shape = replace(SHAPES["gpt-oss-20b"], target=target, **changes)
    return build_models(shape, num_drafts=0, dtype=jnp.dtype(jnp.bfloat16))


@pytest.mark.parametrize("kernel", [True, False])
def test_experts_are_packed_where_a_kernel_takes_them(monkeypatch, kernel):
    monkeypatch.setattr(bench.shapes, "keeps_packed", lambda dtype: kernel)
    models = build()
    experts = models.target.layers[1].mlp.gate_up.get_value()
    assert isinstance(experts, Mxfp4Weight) == kernel
    assert experts.shape == (TINY["num_local_experts"], 64, 2, 96)
    # Outputs about as large as inputs, as of a trained network.
    assert 0.5 < float(np.std(np.asarray(experts, np.float32))) * 8 < 2
    assert not isinstance(build(packed_experts=False).target.layers[1].mlp.down.get_value(), Mxfp4Weight)


def test_packed_experts_count_with_the_bytes_that_they_have(monkeypatch):
    monkeypatch.setattr(bench.shapes, "keeps_packed", lambda dtype: True)
    packed, dense = (weight_bytes(build(packed_experts=kind), batch_size=100) for kind in (True, False))
    layer = 3 * 64 * 96 * TINY["num_local_experts"]
    saved = TINY["num_hidden_layers"] * layer * (2 - 1 / 2 - 1 / 32)
    assert dense - packed == pytest.approx(saved, rel=1e-3)
