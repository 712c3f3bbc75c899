"""An engine on which every sampling parameter shows."""

import pytest
from options import PROMPT, answer_to

import jaxspec
from jaxspec import Engine, Generation


@pytest.fixture(scope="package")
def engine(tiny_config) -> Engine:
    """Drafts as the target does, so that the number of drafts shows; it ends answers at their fifth token."""
    itself = {"kind": "draft_model", "source": str(tiny_config.parent / "model")}
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
