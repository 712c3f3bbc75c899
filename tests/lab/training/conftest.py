"""A target, a head and prompts, for tests of what a run is told."""

import json

import jax.numpy as jnp
import pytest
from staged_run import IDS
from tiny_run import write_target

from jaxspec.files import open_checkpoint
from jaxspec.lab.training import pipeline
from jaxspec.lab.training.config import HeadConfig
from jaxspec.lab.training.export import embedding_rows, export_head
from jaxspec.lab.training.head import head_config, new_head
from jaxspec.models.target import load_target


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A target, a head for it, and files of prompts."""
    root = tmp_path_factory.mktemp("options")
    target = load_target(open_checkpoint(write_target(root / "target")), dtype=jnp.float32)
    head = new_head(
        head_config(HeadConfig(fc_norm=True), target.config, IDS.size),
        target,
        IDS,
        num_speculative_tokens=3,
        seed=7,
    )
    told = {"form": "shared", "target_name": "tiny", "dtype": "float32", "card": ""}
    export_head(head, target.config, root / "head", embedding=embedding_rows(target), **told)
    for name, count in (("a", 20), ("b", 4)):
        rows = [{"prompt": f"the {name} number {i} of them"} for i in range(count)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "apart.jsonl").write_text('{"turns": ["the a number 3 of them"]}\n')
    (root / "long.jsonl").write_text(json.dumps({"prompt": "long " * 12}) + "\n")
    return root


@pytest.fixture(scope="session")
def tokenizer(files):
    return open_checkpoint(files / "target").tokenizer


@pytest.fixture
def vocabulary(monkeypatch):
    """Stages that are finished, with a draft vocabulary."""
    monkeypatch.setattr(pipeline.Pipeline, "_most_frequent", IDS)
    monkeypatch.setattr(pipeline.Pipeline, "_finished", lambda self, stage: self._folder(stage))
