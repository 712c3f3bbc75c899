"""Metadata that is not rebuilt between draft steps is noticed: the fault this library exists to avoid."""

from dataclasses import replace

import pytest
from tiny_engines import ATTENTION, ONLY_OVER, start_afresh

from jaxspec.attention import paged
from jaxspec.drafters.autoregressive import AutoregressiveDrafter

KINDS = [kind for kind in ATTENTION if kind in ONLY_OVER["near"] and kind != "own family"]
"""Those of targets that can draft for themselves; that family's attention is full."""
STALE_PARTS = [
    ("full", "slots"),
    ("full", "last"),
    ("sliding", "first"),
    ("compressed", "window_slots"),
    ("compressed", "written_entries"),
    ("compressed", "num_entries"),
]
"""Parts of metadata that, left behind alone while all else moves on, draft wrong tokens."""


@pytest.fixture
def load(engines_of):
    """Loads an engine by its target's kind of attention; the target drafts for itself."""
    sizes = {"batch_size": 1, "page_size": 4, "prefill_chunk": 16, "sampling_modes": ("greedy",)}
    return lambda kind: engines_of[kind].load("self", 5, **sizes)


def acceptance_length(engine) -> float:
    start_afresh(engine)
    return engine.generate(list(range(11)), max_new_tokens=60, ignore_eos=True).stats.acceptance_length


def freeze(engine, monkeypatch, *parts):
    """Gives draft step i the metadata of step 1 again: these parts of it, or all.

    Only the engine's decode program drafts, so only this one is compiled again.
    """
    build, step = paged.build_metadata, AutoregressiveDrafter.step

    def frozen(kinds, block):
        fresh = build(kinds, block)
        if frozen.late is None:  # not a draft step
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
        try:
            return step(self, target, context, state, i)
        finally:
            frozen.late = None

    frozen.late = None
    monkeypatch.setattr(paged, "build_metadata", frozen)
    monkeypatch.setattr(AutoregressiveDrafter, "step", counted)
    (decode,) = (size for size in engine.programs.compiled if size.width)
    monkeypatch.setitem(engine.programs.compiled, decode, None)
    engine.programs.compile([decode], progress=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_that_drafts_for_itself_has_all_accepted(load, kind):
    assert acceptance_length(load(kind)) == 6.0


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_metadata_loses_acceptance(load, kind, monkeypatch):
    freeze(load(kind), monkeypatch)
    assert acceptance_length(load(kind)) < 5.0


@pytest.mark.parametrize(("kind", "part"), STALE_PARTS)
def test_a_part_that_stays_behind_alone_loses_acceptance(load, kind, part, monkeypatch):
    """As where lengths were advanced and the slots that they stand for were not."""
    freeze(load(kind), monkeypatch, part)
    assert acceptance_length(load(kind)) < 5.9
