"""An engine on which every sampling parameter shows."""

import json
import shutil

import pytest
from options import PROMPT, answer_to

import jaxspec
from jaxspec import Engine, Generation


@pytest.fixture(scope="package")
def engine(tiny_config, tmp_path_factory) -> Engine:
    """Drafts as the target does, so that the number of drafts shows. Answers end at their fifth token,
    and the chat template reads an argument, "note"."""
    folder = shutil.copytree(tiny_config.parent, tmp_path_factory.mktemp("wiring") / "tiny")
    tiny_config, settings = folder / tiny_config.name, folder / "model" / "tokenizer_config.json"
    written = json.loads(settings.read_text("utf-8"))
    written["chat_template"] += "{% if note %} {{ note }}{% endif %}"
    settings.write_text(json.dumps(written), "utf-8")
    itself = {"kind": "draft_model", "source": str(folder / "model")}
    modes = ("sampled",)  # which answer greedily, too
    with jaxspec.load(tiny_config, drafter=itself, sampling_modes=modes, progress=False) as engine:
        engine.eos_token_ids = (engine.generate(PROMPT, max_new_tokens=5, ignore_eos=True).token_ids[4],)
        yield engine


@pytest.fixture(scope="package")
def plain(engine) -> Generation:
    """The answer without options."""
    answer = answer_to(engine, PROMPT, {})
    assert (answer.finish_reason, len(answer.token_ids)) == ("stop", 5)
    return answer
