"""Damaged configurations are read, or rejected with our own exceptions in one line."""

import json
import math
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from fuzzing import changed, damaged, refused_or
from golden_files import DRAFTER_KINDS, DRAFTER_TARGETS, golden_checkpoint, golden_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.config import DrafterConfig, ModelConfig, SourceConfig, load_config
from jaxspec.config.keys import KEYS
from jaxspec.drafters.inspect import inspect
from jaxspec.drafters.loading import Build, plan_drafter
from jaxspec.lab.training.config import load_training_run
from jaxspec.models.layers.rope import rope_frequencies
from jaxspec.models.target import plan_target

TARGETS = (
    *("llama-untied-llama3-rope", "llama-yarn-rope", "qwen3-windowed", "qwen3-moe-windowed", "gpt-oss-mxfp4"),
    *("gemma3", "glm4-yarn-rope", "deepseek-v3", "glm4-moe-lite"),
)
HEADS = (
    *("eagle3-norm-output", "eagle3-safeailab", "eagle1", "peagle", "dflash-sliding", "dflash-speculators"),
    "gemma4-assistant-clusters",
)
FLOAT32 = jnp.dtype(jnp.float32)
FEWER = settings().max_examples // 10

read_golden = cache(golden_checkpoint)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("case", TARGETS)
@given(data=st.data())
def test_a_model_of_other_values(case, data):
    config = data.draw(changed(read_golden(case).config, tuple(KEYS)))
    shape = refused_or(lambda: ModelConfig.from_hf(config))
    if shape is None:
        return
    hash(shape)
    for rope in filter(None, (shape.rope, shape.local_rope)):
        frequencies, factor = rope_frequencies(rope, shape.head_dim)
        assert np.isfinite(frequencies).all()
        assert math.isfinite(factor)


@pytest.mark.filterwarnings("ignore:.*not read, unknown")
@pytest.mark.parametrize("case", TARGETS)
@settings(max_examples=FEWER)
@given(data=st.data())
def test_a_checkpoint_whose_config_has_other_values(case, data):
    checkpoint = read_golden(case)
    config = data.draw(changed(checkpoint.config, tuple(KEYS)))
    refused_or(lambda: plan_target(replace(checkpoint, config=config), dtype=FLOAT32))


@pytest.mark.parametrize("case", HEADS)
@settings(max_examples=2 * FEWER)
@given(data=st.data())
def test_a_head_of_other_values(folder, case, data):
    head = folder / case
    if not head.exists():
        shutil.copytree(golden_folder(case), head)
    config = data.draw(changed(read_golden(case).config, tuple(KEYS)))
    (head / "config.json").write_text(json.dumps(config), "utf-8")
    target = ModelConfig.from_hf(read_golden(DRAFTER_TARGETS[case]).config)
    drafter = DrafterConfig(DRAFTER_KINDS[case], source=str(head))
    refused_or(lambda: plan_drafter(drafter, target, Build(FLOAT32)))
    refused_or(lambda: inspect(SourceConfig(str(head))))


TOML = b"""
extends = "smollm2-135m"
[drafter]
kind = "ngram"
num_speculative_tokens = 3
sampling = "greedy"
max_ngram = 0x5
[engine]
batch_size = 3
page_size = 8
dtype = "float32"
synthetic_acceptance_length = 1.5
"""
WITH_TARGET = TOML.replace(b'extends = "smollm2-135m"', b'[target]\nsource = "x"')
SHIPPED = Path(__file__).parents[1] / "configs" / "training" / "smollm2-135m-eagle3.toml"
TRAINING = SHIPPED.read_bytes()
SECTIONS = (
    *("target", "drafter", "engine", "extends", "other", "target.x", "drafter.options"),
    *("prompts", "responses", "vocabulary", "head", "train", "evaluate"),
)
OPTIONS = (
    *("source", "file", "sha256", "kind", "num_speculative_tokens", "max_ngram", "min_ngram", "sampling"),
    *("batch_size", "max_model_len", "page_size", "num_pages", "dtype", "tensor_parallel"),
    *("synthetic_acceptance_length", "a.b.c.d.e.f.g.h.i", "other"),
    *("files", "held_out", "seed", "size", "capture", "num_layers", "steps", "learning_rate", "max_tokens"),
)
LITERALS = (
    *("inf", "nan", "-1", "0", "1e400", "2147483648", "9223372036854775807", "9" * 5000, "0x" + "f" * 5000),
    *(
        "true",
        '""',
        "'..'",
        '"x\\u0000"',
        '"' + "y" * 300 + '"',
        "1979-05-27",
        "[" * 2000,
        "[[1]]",
        "{a = 1}",
    ),
)


def read_both(path, content):
    """Reads a file as a configuration, and as one of a training run."""
    path.write_bytes(content)
    refused_or(lambda: load_config(path))
    refused_or(lambda: load_training_run(path))


@given(content=damaged(TOML) | damaged(WITH_TARGET) | damaged(TRAINING) | st.binary(max_size=40))
def test_toml_of_other_bytes(folder, content):
    read_both(folder / "mine.toml", content)


@given(
    section=st.sampled_from(SECTIONS),
    lines=st.lists(st.tuples(st.sampled_from(OPTIONS), st.sampled_from(LITERALS)), max_size=4),
)
def test_toml_of_other_values(folder, section, lines):
    text = "" if section == "target" else "[target]\nsource = 'x'\n"
    text += f"[{section}]\n" + "".join(f"{key} = {value}\n" for key, value in lines)
    read_both(folder / "mine.toml", text.encode())
