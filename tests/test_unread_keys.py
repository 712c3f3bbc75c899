"""Keys of a `config.json` that nobody reads: those that would change what is computed are errors."""

import json
import warnings

import jax.numpy as jnp
import pytest
from golden_files import FOLDER, HEAD_TARGETS, golden_checkpoint, golden_folder
from safetensors.numpy import load_file
from tiny_models import write_folder

from jaxspec.config import ConfigError, Keys, ModelConfig, SourceConfig, joined
from jaxspec.config.keys import UNCHANGED
from jaxspec.drafters.inspect import inspect
from jaxspec.files import open_checkpoint
from jaxspec.models.target import load_target

MODELS = sorted(
    {path.parent.parent.name for path in FOLDER.glob("*/checkpoint/config.json")} - {*HEAD_TARGETS}
)


def with_keys(name, **changes):
    return ModelConfig.from_hf({**golden_checkpoint(name).config, **changes})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama-tied", {"residual_multiplier": 0.22}),
        ("llama-tied", {"num_kv_shared_layers": 2}),
        ("llama-tied", {"output_multiplier": 0.5}),
        ("qwen3-tied", {"rope_is_neox_style": False}),
        ("qwen3-moe", {"routed_scaling_factor": 2.5}),
        ("glm4", {"clip_qkv": 8.0}),
        ("gpt-oss", {"final_logit_softcapping": 30.0}),
        ("qwen3-5-nested", {"text_config": {"logit_scale": 0.1}}),
        ("llama-tied", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "long_mscale": 1.2}}),
        ("llama-tied", {"rope_parameters": {"rope_type": "default", "attn_factor": 0.5}}),
    ],
)
def test_a_key_that_would_change_what_is_computed_is_named(name, changes):
    config = golden_checkpoint(name).config
    nested = changes.get("text_config", {})
    if nested:
        changes = {"text_config": {**config["text_config"], **nested}}
    key = next(reversed(nested or changes.get("rope_parameters") or changes))
    with pytest.raises(ConfigError, match=key) as error:
        with_keys(name, **changes)
    assert "is not supported" in str(error.value)
    assert "\n" not in str(error.value)


def test_values_that_change_nothing_are_accepted():
    for key, value in UNCHANGED.items():
        for each in (value, None):
            assert with_keys("llama-tied", **{key: each}).unread == ()
    assert with_keys("granite", residual_multiplier=0.5).residual_multiplier == 0.5
    # Beside the layer_types that say the same, as some publish Gemma 3.
    assert with_keys("gemma3", sliding_window_pattern=6).unread == ()


@pytest.mark.parametrize("name", MODELS)
def test_every_key_of_a_goldens_model_is_known(name):
    """Those of transformers' classes, then; a new one is read, or it stands in a list."""
    assert ModelConfig.from_hf(golden_checkpoint(name).config).unread == ()


def test_an_unknown_key_is_a_line_at_loading_and_in_inspection(tmp_path):
    folder = golden_folder("llama-tied")
    config = {**json.loads((folder / "config.json").read_text("utf-8")), "a_new_key": 3, "_fine": None}
    write_folder(tmp_path / "new", config, load_file(folder / "model.safetensors"))
    with pytest.warns(UserWarning, match="config.json: not read, unknown: a_new_key$"):
        load_target(open_checkpoint(tmp_path / "new"), dtype=jnp.float32)
    with pytest.warns(UserWarning, match="not read"):
        report = inspect(SourceConfig(str(tmp_path / "new")))
    (flag,) = report.flags
    assert (flag.name, flag.value) == ("keys that are not read", "a_new_key")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_target(golden_checkpoint("llama-tied"), dtype=jnp.float32)


def test_keys_remember_what_was_asked_for():
    flat = {"k": 1, "l": 2}
    keys = Keys(
        {"a": 1, "b": 2, "c": {"d": 1, "e": 2}, "f": {"g": 1}, "h": 3, "i": 0, "use_cache": True, "j": flat}
    )
    assert keys["a"] == 1
    assert "b" in keys
    assert joined({"h": 4, "z": 5}, keys)["h"] == 3
    assert keys.inner("c").get("d") == 1
    assert keys.inner("f")
    assert keys.inner("none").get("x") is None
    assert sorted(keys.items())[0] == ("a", 1)
    assert keys.inner("j", is_named=False)["k"] == 1
    assert keys.unread() == {"c.e": 2, "f.g": 1, "l": 2}
    assert {**keys, "x": 1}["i"] == 0
    assert joined({"a": 1}, {"a": 2}) == {"a": 2}
