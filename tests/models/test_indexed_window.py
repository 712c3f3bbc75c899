"""The indexed-window family against a dense computation of whole texts."""

import json

import dense_indexed_window
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import assert_close
from paged_rows import PagedTarget
from safetensors.numpy import load_file
from tiny_models import write_target

from jaxspec import ConfigError
from jaxspec.attention import IndexedWindow
from jaxspec.checkpoints import open_checkpoint
from jaxspec.config import ModelConfig
from jaxspec.models.loading import export_tensors, load_target

LENGTH, WINDOW = 45, 7
FAMILY = {
    "model_type": "jaxspec_indexed_window",
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "compress_ratios": [2, 1, 4],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("indexed_window") / "target", **FAMILY)


@pytest.fixture(scope="module")
def model(folder):
    return load_target(open_checkpoint(folder), dtype=jnp.float32)


@pytest.fixture(scope="module")
def texts():
    return np.random.default_rng(0).integers(48, size=(2, LENGTH)).astype(np.int32)


@pytest.fixture(scope="module")
def expected(folder, texts):
    config = json.loads((folder / "config.json").read_text("utf-8"))
    tensors = load_file(folder / "model.safetensors")
    return np.stack([dense_indexed_window.logits(config, tensors, text) for text in texts])


def test_one_pass_equals_the_definition(model, texts, expected):
    assert model.kinds == (IndexedWindow(WINDOW, 2), IndexedWindow(WINDOW), IndexedWindow(WINDOW, 4))
    paged = PagedTarget(model, 2, LENGTH, page_size=16, width=LENGTH, fill=np.nan)
    logits, _, _ = paged.feed(texts, [0, 0])
    assert_close(logits, expected)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_pieces_through_the_cache_equal_one_pass(model, texts, expected, size):
    """So many tokens at a time; the second slot is five tokens ahead, so entries end at different rows."""
    paged = PagedTarget(model, 2, LENGTH, page_size=4, width=max(size, 5), fill=np.nan)
    starts = [0, 5]
    paged.feed([[], texts[1, :5]], [0, 0])
    while min(starts) < LENGTH:
        rows = [texts[slot, start : start + size] for slot, start in enumerate(starts)]
        logits, _, _ = paged.feed(rows, starts)
        for slot, row in enumerate(rows):
            at = slice(starts[slot], starts[slot] + len(row))
            if len(row):
                assert_close(logits[slot, : len(row)], expected[slot, at])
            starts[slot] += len(row)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4, 5])
def test_entries_of_rejected_rows_are_made_again(model, texts, expected, accepted):
    """Seven rows a pass of which so many drafts stand, as in verification: the others hold wrong tokens."""
    paged = PagedTarget(model, 2, LENGTH + 6, page_size=8, width=7, fill=np.nan)
    start = 0
    while start < LENGTH:
        rows = texts[:, start : start + 7].copy()
        rows[:, accepted + 1 :] = 47 - rows[:, accepted + 1 :]
        logits, _, _ = paged.feed(rows, [start, start])
        stand = min(accepted + 1, LENGTH - start)
        assert_close(logits[:, :stand], expected[:, start : start + stand])
        start += stand


def test_every_part_shows_in_the_logits(folder, texts, expected):
    """What the definition would not notice, the tests above would not test."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    tensors = load_file(folder / "model.safetensors")

    def change(config, **changes):
        logits = dense_indexed_window.logits(config, {**tensors, **changes}, texts[0])
        return np.abs(logits - expected[0]).max() / np.abs(expected[0]).max()

    assert change({**config, "sliding_window": WINDOW + 1}) > 0.01
    assert change({**config, "compress_ratios": [2, 1, 2]}, **short(tensors)) > 0.01
    for leaf in ("wkv.weight", "wgate.weight", "ape", "norm.weight"):
        for layer in (0, 2):
            name = f"model.layers.{layer}.self_attn.compressor.{leaf}"
            assert change(config, **{name: -tensors[name]}) > 0.01, name


def short(tensors):
    name = "model.layers.2.self_attn.compressor.ape"
    return {name: tensors[name][:2]}


def test_export_gives_back_every_tensor(folder, model):
    tensors, exported = load_file(folder / "model.safetensors"), export_tensors(model)
    assert set(exported) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(exported[name], tensor, err_msg=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": None}, "compress_ratios is missing"),
        ({"compress_ratios": [2, 4]}, "compress_ratios has 2 entries for 3 layers"),
        ({"compress_ratios": [2, 0, 4]}, "compress_ratios must be integers from 1 on"),
        ({"sliding_window": None}, "compress_ratios is set, but sliding_window is not"),
    ],
)
def test_what_does_not_fit_is_refused(folder, changes, message):
    config = json.loads((folder / "config.json").read_text("utf-8"))
    with pytest.raises(ConfigError, match=message) as error:
        ModelConfig.from_hf({**config, **changes})
    assert "\n" not in str(error.value)
