"""P-EAGLE heads against the goldens, and those that do not fit."""

import numpy as np
import pytest
from flax import nnx
from golden_files import PEAGLE_TARGETS, assert_close, golden_checkpoint
from golden_heads import ROWS, GoldenHead

from jaxspec.config import ConfigError
from jaxspec.drafters.kinds.peagle import PEagleConfig
from jaxspec.models.target import target_config
from jaxspec.sampling import SamplingMode

CHUNK, DRAFTS = 16, 7


@nnx.jit
def refresh(drafter, target, rows, cache):
    return drafter.refresh(target, rows, cache)


@nnx.jit
def propose(drafter, target, context, cache):
    num_drafts = drafter.num_speculative_tokens
    return drafter.propose(target, context, cache, num_drafts=num_drafts, mode=SamplingMode.TEMPERATURE)


@pytest.mark.parametrize("num_drafts", [1, 3, DRAFTS])
@pytest.mark.parametrize("name", PEAGLE_TARGETS)
def test_all_drafts_of_one_pass(name, num_drafts):
    """The rows come in two chunks, the second one padded, over poison; a mask row sees none that follows."""
    case = GoldenHead(name, num_drafts)
    models = (case.drafter, case.target)
    cache = case.paged.new_cache(case.drafter.cache_shapes)
    for begin, end in ((0, CHUNK), (CHUNK, ROWS)):
        hidden, cache = refresh(*models, case.rows(begin, end, CHUNK), cache)
    proposal, _ = propose(*models, case.context(hidden), cache)
    np.testing.assert_array_equal(proposal.tokens[:1], case.golden["draft_tokens"][:, :num_drafts])
    assert_close(proposal.logits[:1], case.golden["draft_logits"][:, :num_drafts])
    assert proposal.count.tolist() == [num_drafts, 0]


@pytest.fixture
def config():
    return dict(golden_checkpoint("peagle").config)


@pytest.fixture
def read():
    """The meaning of a config on the golden's target."""
    target = target_config(golden_checkpoint("llama-tied"))
    return lambda config: PEagleConfig.from_hf(config, {"fc.weight": None}, target)


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id"])
def test_the_mask_token_goes_by_several_names(config, read, key):
    config[key] = config.pop("mask_token_id")
    assert read(config).mask_token == 11


def test_the_residual_is_the_raw_state_unless_the_config_says_otherwise(config, read):
    del config["norm_before_residual"]
    assert not read(config).head.norm_before_residual
    assert read({**config, "norm_before_residual": True}).head.norm_before_residual


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": None}, "mask_token_id must be a token of the target, 0 to 127, got None"),
        ({"mask_token_id": 128}, "got 128"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}, "layer 5, but the target has 4 layers"),
        (
            {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"use_aux_hidden_state": False}},
            "P-EAGLE head without aux hidden states is not supported",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused(config, read, changes, message):
    with pytest.raises(ConfigError, match=message):
        read({**config, **changes})
