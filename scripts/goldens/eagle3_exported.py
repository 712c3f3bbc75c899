"""A head that jaxspec exported, loaded and run by the speculators package."""

import json
import shutil
import tempfile
from pathlib import Path

from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

from goldens.eagle3_speculators import checked
from goldens.head_cases import GOLDENS, Target, write_outputs

NAME, TARGET = "eagle3-exported", "llama-tied"


def load(folder: Path) -> Eagle3DraftModel:
    """The head as speculators loads it; only the path of its target is changed."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(shutil.copytree(folder, Path(scratch) / "head"))
        config = json.loads((copy / "config.json").read_text("utf-8"))
        verifier = config["speculators_config"]["verifier"]
        verifier["name_or_path"] = str(GOLDENS / verifier["name_or_path"] / "checkpoint")
        (copy / "config.json").write_text(json.dumps(config), "utf-8")
        parsed = Eagle3SpeculatorConfig.from_pretrained(copy)
        parsed.transformer_layer_config._attn_implementation = "eager"
        model = Eagle3DraftModel.from_pretrained(copy, config=parsed)
    if missing := [name for name, tensor in model.named_parameters() if tensor.isnan().any()]:
        raise ValueError(f"speculators finds no values for {', '.join(missing)}")
    return model.eval()


def write(root: Path) -> None:
    """Write `root/eagle3-exported`: a copy of the checkpoint in the goldens, and its outputs."""
    model, target = load(GOLDENS / NAME / "checkpoint"), Target(TARGET)
    features, results = checked(model, target)
    if root != GOLDENS:
        shutil.copytree(GOLDENS / NAME / "checkpoint", root / NAME / "checkpoint")
    write_outputs(root / NAME, target, features, results)
