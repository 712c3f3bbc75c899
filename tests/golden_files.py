"""Reading `tests/goldens`, whose README describes the arrays."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxspec.files import Checkpoint, open_checkpoint
from jaxspec.files.safetensors.tensors import open_safetensors

FOLDER = Path(__file__).parent / "goldens"
TARGETS = (
    "llama-tied",
    "llama-untied-llama3-rope",
    "llama-linear-rope",
    "llama-seven-layers",
    "llama-yarn-rope",
)
EAGLE3_TARGETS = {
    "eagle3-residual-normed": "llama-tied",
    "eagle3-residual-raw": "llama-tied",
    "eagle3-norm-before-fc": "llama-tied",
    "eagle3-fc-norm": "llama-tied",
    "eagle3-norm-output": "llama-tied",
    "eagle3-two-layers-qwen3": "llama-tied",
    "eagle3-sliding-window": "llama-tied",
    "eagle3-llama3-rope-biased": "llama-untied-llama3-rope",
    "eagle3-exported": "llama-tied",
    "eagle3-safeailab": "llama-seven-layers",
    "eagle3-safeailab-own-embedding": "llama-seven-layers",
    "eagle3-safeailab-other-width": "llama-seven-layers",
}
EAGLE1_TARGETS = {
    "eagle1": "llama-untied-llama3-rope",
    "eagle1-fc-bias": "llama-tied",
    "eagle1-two-layers": "llama-tied",
}
PEAGLE_TARGETS = {"peagle": "llama-tied", "peagle-qwen3-sliding": "llama-tied"}
DFLASH_TARGETS = {
    "dflash": "llama-tied",
    "dflash-sliding": "llama-tied",
    "dflash-sliding-non-causal": "llama-tied",
    "dflash-speculators": "llama-tied",
    "dflash-speculators-non-causal": "llama-tied",
    "dflash-causal": "llama-tied",
    "dflash-anchor": "llama-tied",
}
DSPARK_TARGETS = {
    "dspark": "llama-tied",
    "dspark-gated": "llama-tied",
    "dspark-rnn": "llama-tied",
    "dspark-speculators": "llama-tied",
    "dspark-speculators-masks": "llama-tied",
}
V4_TARGETS = (
    "deepseek-v4",
    "deepseek-v4-odd-ratios",
    "deepseek-v4-one-group",
    "deepseek-v4-wide-window",
    "deepseek-v4-default-layers",
    "deepseek-v4-windows",
)
ASSISTANT_TARGETS = {"gemma4-assistant": "gemma4", "gemma4-assistant-clusters": "gemma4-moe"}
HEADS = {
    "eagle3": EAGLE3_TARGETS,
    "eagle1": EAGLE1_TARGETS,
    "peagle": PEAGLE_TARGETS,
    "dflash": DFLASH_TARGETS,
    "dspark": DSPARK_TARGETS,
    "gemma4_assistant": ASSISTANT_TARGETS,
}
"""Every head and its target, by kind of drafter."""

HEAD_TARGETS = {case: target for heads in HEADS.values() for case, target in heads.items()}
HEAD_KINDS = {case: kind for kind, heads in HEADS.items() for case in heads}

MTP_TARGETS = {
    "deepseek-v3-mtp": "deepseek-v3",
    "glm4-moe-lite-mtp": "glm4-moe-lite",
    "qwen3-next-mtp": "qwen3-next",
    "qwen3-5-mtp": "qwen3-5",
    "nemotron-h-mtp": "nemotron-h",
    "nemotron-h-latent-mtp": "nemotron-h-latent",
    "deepseek-v4-mtp": "deepseek-v4",
    "deepseek-v4-odd-ratios-mtp": "deepseek-v4-odd-ratios",
}
"""Multi-token-prediction layers, which belong in the target's checkpoint."""
DRAFTER_TARGETS = HEAD_TARGETS | MTP_TARGETS
DRAFTER_KINDS = HEAD_KINDS | dict.fromkeys(MTP_TARGETS, "mtp")


def golden_folder(case: str) -> Path:
    return FOLDER / case / "checkpoint"


def golden_checkpoint(case: str) -> Checkpoint:
    return open_checkpoint(golden_folder(case))


def golden_outputs(case: str) -> dict[str, np.ndarray]:
    return load_file(FOLDER / case / "outputs.safetensors")


def golden_json(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def assert_close(actual: Any, expected: np.ndarray, *, relative: float = 1e-4) -> None:
    """Asserts that arrays differ by at most `relative` times the largest expected value."""
    actual = np.asarray(actual)
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    worst = np.abs(actual - expected).max() / np.abs(expected).max()
    assert worst < relative, f"differs by {worst:.1e} of the largest value"


QUANTIZED = tuple(sorted(path.name for path in (FOLDER / "quantized").iterdir()))
"""Llama targets in quantized formats."""


def quantized_folder(case: str) -> Path:
    return FOLDER / "quantized" / case / "checkpoint"


def quantized_copy(
    tmp_path: Path,
    case: str,
    *,
    tensors: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """A quantized target with some tensors and settings changed; None removes a tensor."""
    folder = tmp_path / "model"
    shutil.copytree(quantized_folder(case), folder, dirs_exist_ok=True)
    arrays = {name: tensor.read() for name, tensor in open_safetensors(quantized_folder(case)).items()}
    for name, change in (tensors or {}).items():
        array = arrays.pop(name, None)
        if change is not None:
            arrays[name] = change(array) if callable(change) else change
    save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = {**config["quantization_config"], **(settings or {})}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder
