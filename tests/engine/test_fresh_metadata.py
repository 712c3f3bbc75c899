"""Metadata that is not rebuilt between draft steps is noticed: the fault this library exists to avoid."""

import pytest
from tiny_models import write_target

import jaxspec
from jaxspec.drafters import autoregressive


@pytest.fixture(scope="module", params=["full_attention", "sliding_attention"])
def target(request, tmp_path_factory):
    """A model of one kind of attention, which is to draft for itself."""
    return write_target(
        tmp_path_factory.mktemp("fresh") / request.param,
        layer_types=[request.param] * 2,
        sliding_window=6 if request.param == "sliding_attention" else None,
    )


def acceptance_length(target) -> float:
    drafter = {"kind": "draft_model", "source": str(target), "num_speculative_tokens": 5}
    engine = jaxspec.load(
        target,
        drafter=drafter,
        sampling_modes=("greedy",),
        progress=False,
        batch_size=1,
        max_model_len=96,
        page_size=4,
        prefill_chunk=16,
    )
    stats = engine.generate(list(range(11)), max_new_tokens=60, ignore_eos=True).stats
    return stats.acceptance_length


def test_a_target_that_drafts_for_itself_has_all_accepted(target):
    assert acceptance_length(target) == 6.0


def test_frozen_metadata_loses_acceptance(target, monkeypatch):
    build = autoregressive.build_metadata

    def frozen(kinds, positions, valid, page_table, *, page_size):
        if positions.shape[1] == 1:  # a draft step: what step 1 would be given, again and again
            positions = positions - frozen.late
        return build(kinds, positions, valid, page_table, page_size=page_size)

    step = autoregressive.AutoregressiveDrafter.step

    def counted(self, target, context, state, i):
        frozen.late = i - 1
        return step(self, target, context, state, i)

    monkeypatch.setattr(autoregressive, "build_metadata", frozen)
    monkeypatch.setattr(autoregressive.AutoregressiveDrafter, "step", counted)
    assert acceptance_length(target) < 5.0
