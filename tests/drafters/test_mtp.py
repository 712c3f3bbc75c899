"""Multi-token prediction: the layer out of the target's own checkpoint, and layers that do not fit.

`test_eagle.py` holds its logits and hidden states to the goldens.
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_files import MTP_TARGETS, golden_checkpoint, golden_folder
from golden_heads import ROWS, GoldenHead
from tiny_models import write_target
from tiny_mtp import LATENT, write_with_mtp

from jaxspec.config import Config, ConfigError, DrafterConfig, SourceConfig
from jaxspec.drafters.kinds.mtp import mtp_config
from jaxspec.drafters.loading import Build, load_drafter, plan_drafter
from jaxspec.files import CheckpointError, open_checkpoint
from jaxspec.models.language_model import language_model
from jaxspec.models.target import load_target, plan_target, plan_target_update, target_config
from jaxspec.weights.loading import export_tensors

BUILD = Build(jnp.dtype(jnp.float32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of a target and its layer."""
    root = tmp_path_factory.mktemp("mtp")
    return write_with_mtp(root / "model", write_target(root / "target", **LATENT))


def test_target_and_layer_share_a_checkpoint(folder):
    checkpoint = open_checkpoint(folder)
    target = load_target(checkpoint, dtype=jnp.float32)
    drafter = load_drafter(DrafterConfig("mtp", 3, str(folder)), target, BUILD)
    layer = export_tensors(drafter)
    copies = {"model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"}
    assert set(checkpoint.tensors) == {*export_tensors(target), *layer, *copies}
    np.testing.assert_array_equal(
        layer["model.layers.2.eh_proj.weight"], checkpoint.tensors["model.layers.2.eh_proj.weight"].read()
    )


def test_the_source_is_the_targets_where_none_is_named():
    target = SourceConfig("organisation/model", "file", "00")
    config = Config("name", target, DrafterConfig("mtp", 3))
    assert config.drafter == DrafterConfig("mtp", 3, "organisation/model", "file", "00")
    assert config.replace(drafter={"num_speculative_tokens": 5}).drafter.source == "organisation/model"
    named = Config("name", target, DrafterConfig("mtp", 3, "other/model"))
    assert (named.drafter.source, named.drafter.file) == ("other/model", None)


@pytest.mark.parametrize("case", MTP_TARGETS)
def test_export_gives_back_every_bit(case):
    target = load_target(golden_checkpoint(MTP_TARGETS[case]), dtype=jnp.float32)
    drafter = load_drafter(DrafterConfig("mtp", 3, str(golden_folder(case))), target, BUILD)
    exported, stored = export_tensors(drafter), language_model(golden_checkpoint(case)).tensors
    assert set(exported) == set(stored)
    for name, tensor in stored.items():
        assert exported[name].tobytes() == tensor.read().tobytes(), name


# One of each network; the goldens of all in `test_eagle.py` show at row 0 what it reads.
@pytest.mark.parametrize("case", ["deepseek-v3-mtp", "qwen3-next-mtp", "nemotron-h-mtp", "deepseek-v4-mtp"])
def test_the_row_at_position_0_goes_without_its_token(case):
    head = GoldenHead(case, 1)
    rows = head.rows(0, ROWS, ROWS)
    cache = head.paged.new_cache(head.drafter.cache_shapes)

    @nnx.jit
    def run(drafter, target, tokens):
        return drafter.run(target, tokens, drafter.fuse(rows.hidden, rows.captured), rows.blocks, cache)[0]

    def hidden(tokens):
        return run(head.drafter, head.target, tokens)[:ROWS]

    plain = hidden(rows.next_tokens)
    is_dropped = bool((plain == hidden(rows.next_tokens.at[0].add(1))).all())
    assert is_dropped is not case.startswith(("qwen3", "nemotron"))  # whose layers read it
    assert np.abs(plain - hidden(rows.next_tokens.at[1].add(1))).max() > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "'mtp' is not supported for model_type 'llama'; supported: .*deepseek_v3"),
        (
            {"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1},
            "of family 'deepseek_v3', the target has 'glm4_moe_lite'",
        ),
        ({"hidden_size": 64}, "of hidden_size 64, the target has 32"),
        ({"vocab_size": 64}, "of vocab_size 64, the target has 48"),
        ({"num_hidden_layers": 3}, "of num_hidden_layers 3, the target has 2"),
    ],
)
def test_a_layer_of_another_model_is_refused(folder, change, message):
    checkpoint = open_checkpoint(folder)
    with pytest.raises(ConfigError, match=message) as error:
        mtp_config(replace(checkpoint, config={**checkpoint.config, **change}), target_config(checkpoint))
    assert "\n" not in str(error.value)


def test_a_layer_with_an_embedding_of_its_own_is_refused():
    checkpoint = golden_checkpoint("qwen3-5-mtp")
    config = {**checkpoint.config, "mtp_use_dedicated_embeddings": True}
    with pytest.raises(ConfigError, match="mtp_use_dedicated_embeddings true is not supported"):
        mtp_config(replace(checkpoint, config=config), target_config(golden_checkpoint("qwen3-5")))


def test_a_checkpoint_without_the_layer_is_refused(tmp_path):
    source = write_target(tmp_path / "target", **LATENT)
    with pytest.raises(ConfigError, match=r"holds no layer to draft with, model\.layers\.2\.\*"):
        plan_drafter(DrafterConfig("mtp", 3, str(source)), target_config(open_checkpoint(source)), BUILD)


def test_layers_past_those_that_the_config_counts_are_left_out_if_they_are_for_further_tokens(folder):
    checkpoint = open_checkpoint(folder)
    config = {**checkpoint.config, "num_nextn_predict_layers": 0}
    uncounted = replace(checkpoint, config=config)
    loaded, expected = (load_target(each, dtype=jnp.float32) for each in (uncounted, checkpoint))
    np.testing.assert_equal(export_tensors(loaded), export_tensors(expected))
    plan_target_update(loaded, {name: tensor.read() for name, tensor in checkpoint.tensors.items()}, None)
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if "eh_proj" not in name}
    with pytest.raises(CheckpointError, match=r"spare tensor 'model\.layers\.2\."):
        plan_target(replace(uncounted, tensors=tensors), dtype=jnp.float32)
