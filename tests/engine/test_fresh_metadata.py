"""Metadata that is not rebuilt between draft steps is noticed: the fault this library exists to avoid."""

from dataclasses import replace

import pytest
from tiny_engines import ATTENTION
from tiny_models import write_target

import jaxspec
from jaxspec.attention import paged
from jaxspec.drafters.autoregressive import AutoregressiveDrafter

STALE_PARTS = [
    ("full", "slots"),
    ("full", "last"),
    ("sliding", "first"),
    ("indexed window", "window_slots"),
    ("indexed window", "entry_slots"),
    ("indexed window", "num_entries"),
]
"""Parts of metadata that, left behind alone while all else moves on, draft wrong tokens."""


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """A model of every kind of attention, which is to draft for itself."""
    root = tmp_path_factory.mktemp("fresh")
    return {kind: write_target(root / kind, **changes) for kind, changes in ATTENTION.items()}


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


def freeze(monkeypatch, *parts):
    """Gives draft step i the metadata of step 1 again: these parts of it, or all."""
    build, step = paged.build_metadata, AutoregressiveDrafter.step

    def frozen(kinds, block):
        fresh = build(kinds, block)
        if block.shape[1] > 1:  # not a draft step
            return fresh
        stale = build(kinds, replace(block, positions=block.positions - frozen.late))
        if not parts:
            return stale
        return {
            kind: replace(metadata, **{part: getattr(stale[kind], part) for part in parts})
            for kind, metadata in fresh.items()
        }

    def counted(self, target, context, state, i):
        frozen.late = i - 1
        return step(self, target, context, state, i)

    monkeypatch.setattr(paged, "build_metadata", frozen)
    monkeypatch.setattr(AutoregressiveDrafter, "step", counted)


@pytest.mark.parametrize("kind", ATTENTION)
def test_a_target_that_drafts_for_itself_has_all_accepted(targets, kind):
    assert acceptance_length(targets[kind]) == 6.0


@pytest.mark.parametrize("kind", ATTENTION)
def test_frozen_metadata_loses_acceptance(targets, kind, monkeypatch):
    freeze(monkeypatch)
    assert acceptance_length(targets[kind]) < 5.0


@pytest.mark.parametrize(("kind", "part"), STALE_PARTS)
def test_a_part_that_stays_behind_alone_loses_acceptance(targets, kind, part, monkeypatch):
    """As where lengths were advanced and the slots that they stand for were not."""
    freeze(monkeypatch, part)
    assert acceptance_length(targets[kind]) < 5.9
