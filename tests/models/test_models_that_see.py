"""Models that take images, of which the language model is read: what transformers' classes answer to text."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import assert_close, golden_checkpoint, golden_folder, golden_outputs
from paged_rows import PagedTarget
from safetensors.numpy import load_file
from target_checks import check_greedy, check_one_pass
from tiny_models import TARGET

from jaxspec.config import ModelConfig, RopeConfig
from jaxspec.files import CheckpointError
from jaxspec.models.target import load_target, plan_target, plan_target_update
from jaxspec.weights.array_weights import batches, overwrite
from jaxspec.weights.loading import export_tensors

CASES = ("qwen2.5-vl", "qwen3-vl", "gemma3-vision")


@pytest.mark.parametrize("case", CASES)
def test_text_gives_the_logits_of_transformers(case):
    check_one_pass(case)


@pytest.mark.parametrize("case", CASES)
def test_greedy_answers_are_those_of_transformers(case):
    check_greedy(case)


NEWER = {
    "qwen2.5-vl": {"visual.": "model.visual.", "model.": "model.language_model."},
    "gemma3-vision": {
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
}
"""How the names of tensors begin in files of older and newer versions of transformers."""


def renamed(name, prefixes):
    old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes.get(old, "") + name.removeprefix(old)


@pytest.mark.parametrize("case", NEWER)
def test_newer_names_are_the_same_model(case):
    checkpoint = golden_checkpoint(case)
    tensors = {renamed(name, NEWER[case]): tensor for name, tensor in checkpoint.tensors.items()}
    assert not tensors.keys() & checkpoint.tensors.keys() - {"lm_head.weight"}
    same_logits(replace(checkpoint, tensors=tensors), case)


def test_older_files_have_the_language_models_keys_beside_the_vision_towers():
    checkpoint = golden_checkpoint("qwen2.5-vl")
    config = dict(checkpoint.config)
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config = {**text, **config, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    assert config["model_type"] == "qwen2_5_vl"
    same_logits(replace(checkpoint, config=config), "qwen2.5-vl")


def test_gemma_4_as_published_beside_what_sees_and_hears():
    text = golden_checkpoint("gemma4")
    tensors = {
        name.replace("model.", "model.language_model.", 1): each for name, each in text.tensors.items()
    }
    some = next(iter(tensors.values()))
    for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio"):
        tensors[f"model.{part}.proj.weight"] = some
    config = {"model_type": "gemma4", "text_config": text.config, "vision_config": {}, "audio_config": {}}
    same_logits(replace(text, config=config, tensors=tensors), "gemma4")


def same_logits(checkpoint, case):
    golden = golden_outputs(case)
    ids = golden["input_ids"].astype(np.int32)
    model = load_target(checkpoint, dtype=jnp.float32)
    logits, _, _ = PagedTarget(model, *ids.shape, page_size=16, width=48).feed(ids, [0, 0])
    assert_close(logits, golden["logits"])


def test_only_tensors_of_images_are_left_out():
    checkpoint = golden_checkpoint("qwen2.5-vl")
    some = checkpoint.tensors["visual.merger.ln_q.weight"]
    spare = replace(checkpoint, tensors={**checkpoint.tensors, "audio.ln_q.weight": some})
    with pytest.raises(CheckpointError, match=r"spare tensor 'audio\.ln_q\.weight'"):
        plan_target(spare, dtype=jnp.float32)
    text = replace(checkpoint, config={**checkpoint.config["text_config"], "model_type": "qwen2"})
    plan_target(text, dtype=jnp.float32)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_updated_by_all_names_of_the_model(case):
    target = load_target(golden_checkpoint(case), dtype=jnp.float32)
    arrays = load_file(golden_folder(case) / "model.safetensors")
    plan = plan_target_update(target, {name: 2 * array for name, array in arrays.items()}, None)
    overwrite(batches(plan))
    before = export_tensors(load_target(golden_checkpoint(case), dtype=jnp.float32))
    for name, array in export_tensors(target).items():
        np.testing.assert_array_equal(array, 2 * before[name], err_msg=name)


def test_a_text_has_ordinary_rope():
    section = {"mrope_section": [16, 24, 24]}
    for scaling in ({"type": "mrope"}, {"rope_type": "default"}, {"rope_type": "mrope", "type": "mrope"}):
        assert RopeConfig.from_hf({"rope_scaling": {**scaling, **section}}) == RopeConfig.from_hf({})


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_tied_embedding_is_said_inside_or_outside(where):
    text = {**TARGET, "model_type": "qwen3_vl_text", "tie_word_embeddings": where == "inside"}
    config = {"model_type": "qwen3_vl", "text_config": text, "tie_word_embeddings": where == "outside"}
    assert ModelConfig.from_hf(config).tie_word_embeddings
