"""What a look at a checkpoint says of it, without its weights."""

import json

import numpy as np
import pytest
from golden_files import (
    EAGLE1_TARGETS,
    HEAD_KINDS,
    HEAD_TARGETS,
    MTP_TARGETS,
    golden_checkpoint,
    golden_folder,
)
from safetensors.numpy import load_file
from tiny_models import write_folder

from jaxspec.config import ConfigError, SourceConfig
from jaxspec.drafters.inspect import inspect
from jaxspec.drafters.registry import DRAFTERS
from jaxspec.files import CheckpointError
from jaxspec.files.safetensors.tensors import SafetensorsTensor
from jaxspec.models.target import target_config

SIGHT = "attention inside a block, by layer"


def look(case, target=None):
    return inspect(
        SourceConfig(str(golden_folder(case))), target and SourceConfig(str(golden_folder(target)))
    )


@pytest.fixture
def changed(tmp_path):
    """A golden checkpoint with changes to its config (None takes a key away) and more tensors."""

    def change(case, tensors=None, **config):
        folder = golden_folder(case)
        config = {**json.loads((folder / "config.json").read_text("utf-8")), **config}
        config = {key: value for key, value in config.items() if value is not None}
        write_folder(
            tmp_path / "head", config, {**load_file(folder / "model.safetensors"), **(tensors or {})}
        )
        return inspect(SourceConfig(str(tmp_path / "head")))

    return change


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """Reading anything but the map of a draft vocabulary fails."""
    read = SafetensorsTensor.read

    def checked(self):
        assert self.dtype.kind in "bi", "a weight was read"
        return read(self)

    monkeypatch.setattr(SafetensorsTensor, "read", checked)


@pytest.mark.parametrize("case", HEAD_TARGETS)
def test_every_golden_head_is_known_and_fits_its_target(case):
    target = HEAD_TARGETS[case]
    report = look(case, target)
    assert report.method == DRAFTERS[HEAD_KINDS[case]].title
    assert report.problem is None
    sizes = target_config(golden_checkpoint(target))
    assert f"hidden size {sizes.hidden_size}, vocabulary {sizes.vocab_size}" in report.target
    alone = look(case)
    assert alone.problem is None
    assert [flag.value for flag in alone.flags] == [flag.value for flag in report.flags]


def test_the_producer_and_the_layers():
    assert look("eagle3-norm-output").producer == "speculators 0.9.0"
    assert look("eagle3-norm-output").layers == "those before layers 1, 2, 3"
    assert look("eagle3-norm-output").target.endswith(": llama-tied")
    assert look("eagle3-safeailab").producer == "SafeAILab"
    assert look("eagle3-safeailab").layers.startswith("those before layers 2, n/2 and n-3")
    with_target = look("eagle3-safeailab", "llama-seven-layers")
    assert with_target.layers == "those before layers 2, 3, 4 (assumed: the default of all producers)"
    assert look("dflash").producer == "z-lab"
    assert look("dflash").layers == "those before layers 1, 2, 4"
    for case in EAGLE1_TARGETS:
        assert look(case).layers == "the last one, after the final norm"


def test_a_specforge_head(changed):
    report = changed("eagle3-safeailab", architectures=["LlamaForCausalLMEagle3"], norm_output=True)
    assert report.producer == "SpecForge or SGLang"
    (flag,) = (flag for flag in report.flags if flag.name == "recycles the normed state")
    assert (flag.value, flag.found) == ("True", "norm_output")


@pytest.mark.parametrize(
    ("case", "name", "key", "value"),
    [
        ("eagle3-residual-raw", "norm before residual", "norm_before_residual", "True"),
        ("eagle3-norm-output", "recycles the normed state", "norm_output", "False"),
        ("peagle-qwen3-sliding", "norm before residual", "norm_before_residual", "False"),
        ("eagle3-safeailab", "draft vocabulary", "draft_vocab_size", "96"),
        ("eagle1", "fc bias", "bias", "True"),
        ("eagle1", "rope theta", "rope_theta", "10000.0"),
        ("dflash", "block size", "block_size", "16"),
        (
            "dflash-speculators",
            "attention inside a block, by layer",
            "sliding_window_non_causal",
            "causal, bidirectional",
        ),
    ],
)
def test_what_the_config_does_not_say_is_assumed_for_a_reason(changed, case, name, key, value):
    (found,) = (flag for flag in look(case).flags if flag.name == name)
    assert found.found == key
    assert not found.reason
    (assumed,) = (flag for flag in changed(case, **{key: None}).flags if flag.name == name)
    assert (assumed.value, assumed.found) == (value, None)
    assert assumed.reason


@pytest.mark.parametrize(
    ("case", "name", "value"),
    [
        ("eagle3-norm-before-fc", "norm over all features", "yes"),
        ("eagle3-fc-norm", "norm per feature", "yes"),
        ("eagle3-two-layers-qwen3", "layer style", "Qwen3 (norms on queries and keys)"),
        ("eagle3-llama3-rope-biased", "rope scaling", "llama3"),
        ("eagle3-safeailab-own-embedding", "token embedding", "its own"),
        ("peagle", "mask token", "11"),
        ("dflash", "output head", "rows of the target's"),
        ("dflash-sliding-non-causal", SIGHT, "bidirectional, bidirectional"),
        ("dflash-sliding", "window counts positions", "before each row"),
        ("gemma4-assistant", "logits", "of all tokens"),
        ("gemma4-assistant-clusters", "logits", "of 3 of 12 clusters"),
    ],
)
def test_flags(case, name, value):
    assert value in {flag.value for flag in look(case).flags if flag.name == name}


def test_ignored_tensors_are_named(changed):
    report = changed("eagle3-norm-output", {"verifier_norm.weight": np.ones(32, np.float32)})
    assert report.ignored == ("verifier_norm.weight",)
    assert report.problem is None


def test_a_spare_tensor_is_a_problem(changed):
    report = changed("eagle3-norm-output", {"fc.other": np.ones(32, np.float32)})
    assert "spare tensor 'fc.other'" in report.problem


@pytest.mark.parametrize(
    ("case", "target", "problem"),
    [
        ("eagle3-norm-output", "llama-seven-layers", "for targets of hidden size 32, this one has 16"),
        ("dflash", "gpt-oss", "for a vocabulary of 128, the target's has 96"),
        ("eagle1", "llama-tied", "the head has hidden_size 48, the target 32"),
    ],
)
def test_why_a_drafter_does_not_fit(case, target, problem):
    report = look(case, target)
    assert problem in report.problem
    assert report.flags == look(case).flags


def test_a_whole_model_is_a_draft_model():
    report = look("qwen3-tied", "qwen3-windowed")
    assert (report.method, report.layers, report.problem) == ("a whole model", "none", None)
    assert "the same vocabulary of 96 tokens" in report.target


@pytest.mark.parametrize(("case", "recycled"), [("deepseek-v3-mtp", "True"), ("glm4-moe-lite-mtp", "False")])
def test_prediction_layers_belong_to_their_model(case, recycled):
    report = look(case, MTP_TARGETS[case])
    assert (report.method, report.target) == (DRAFTERS["mtp"].title, "the model itself")
    assert (report.layers, report.problem) == ("the last one, after the final norm", None)
    (flag,) = report.flags
    assert (flag.value, flag.found) == (recycled, None)
    assert "the layer is for a model of family" in look(case, "llama-tied").problem


def test_copies_of_the_targets_tensors_are_ignored(changed):
    copy = {"model.layers.3.shared_head.head.weight": np.ones((96, 32), np.float32)}
    assert changed("deepseek-v3-mtp", copy).ignored == tuple(copy)


def test_methods_that_are_not_built_are_named(changed):
    report = changed("dflash-speculators", speculators_model_type="xpress")
    assert (report.method, report.problem) == ("a xpress head", "xpress is not supported")


def test_what_holds_no_drafter_is_refused(changed, tmp_path):
    folder = write_folder(tmp_path / "other", {}, {"weight": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match="neither a known head nor a whole model"):
        inspect(SourceConfig(str(folder)))


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("eagle1", {"hidden_size": "wide"}, "hidden_size must be a positive integer, got 'wide'"),
        ("eagle1", {"head_dim": -1}, "head_dim must be a positive integer, got -1"),
        ("eagle1", {"num_hidden_layers": 900}, "num_hidden_layers is 900, but there are 9 tensors"),
        ("eagle1", {"vocab_size": None}, "vocab_size must be an integer, got None"),
        ("eagle1", {"rope_theta": "fast"}, "rope_theta must be a number above 1, got 'fast'"),
        ("eagle3-safeailab", {"eagle_config": [1]}, r"eagle_config must be an object, got \[1\]"),
        ("eagle3-norm-output", {"transformer_layer_config": 3}, "must be an object, got 3"),
        ("dflash", {"layer_types": 3}, "layer_types must be a list of strings, got 3"),
        ("peagle", {"speculators_config": {"verifier": "me"}}, "verifier must be an object, got 'me'"),
    ],
)
def test_keys_of_another_type_are_named_in_one_line(changed, case, change, message):
    with pytest.raises(ConfigError, match=message) as error:
        changed(case, **change)
    assert "\n" not in str(error.value)
