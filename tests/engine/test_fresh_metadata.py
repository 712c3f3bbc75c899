"""Metadata that is not rebuilt between draft steps is noticed: the fault this library exists to avoid."""

from dataclasses import fields, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs_when_run import compile_ahead
from tiny_engines import ATTENTION, STATES, start_afresh

from jaxspec.attention import AttentionMetadata, paged
from jaxspec.attention.compressed import CompressedMetadata
from jaxspec.drafters.autoregressive import AutoregressiveDrafter

KINDS = [kind for kind in ATTENTION if kind not in (*STATES, "own family")]
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
PARTS = {field.name for kind in (AttentionMetadata, CompressedMetadata) for field in fields(kind)}


@pytest.fixture(scope="module")
def load(engines_of):
    """Loads an engine by its target's kind of attention; the target drafts for itself."""
    sizes = {"batch_size": 1, "page_size": 4, "prefill_chunk": 16, "sampling_modes": ("greedy",)}
    return lambda kind: engines_of[kind].load("self", 5, **sizes)


def acceptance_length(engine) -> float:
    start_afresh(engine)
    return engine.generate(list(range(11)), max_new_tokens=60, ignore_eos=True).stats.acceptance_length


@pytest.fixture(scope="module")
def frozen(load):
    """The decode program of an engine, which alone drafts, that gives draft step i parts of the metadata of
    step 1 again. It asks which when it runs: compiling one for each part takes most of a minute."""
    stale: set[str] = set()
    build, step = paged.build_metadata, AutoregressiveDrafter.step
    late = None  # how many steps after the first

    def is_stale(name):
        return np.bool_(name in stale)

    def chosen(first, fresh):
        parts = {}
        for name in (field.name for field in fields(fresh)):
            stays = jax.pure_callback(partial(is_stale, name), jax.ShapeDtypeStruct((), bool))
            parts[name] = jnp.where(stays, getattr(first, name), getattr(fresh, name))
        return replace(fresh, **parts)

    def build_stale(kinds, block):
        fresh = build(kinds, block)
        if late is None:  # not a draft step
            return fresh
        first = build(kinds, replace(block, positions=block.positions - late))
        return {kind: chosen(first[kind], metadata) for kind, metadata in fresh.items()}

    def counted(self, target, context, state, i):
        nonlocal late
        late = i - 1
        try:
            return step(self, target, context, state, i)
        finally:
            late = None

    @cache
    def compiled(kind):
        programs = load(kind).programs
        (decode,) = (size for size in programs.compiled if size.width)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(paged, "build_metadata", build_stale)
            patch.setattr(AutoregressiveDrafter, "step", counted)
            patch.delitem(programs.compiled, decode)
            compile_ahead(programs, [decode], progress=False)
            return decode, programs.compiled[decode]

    return stale, compiled


@pytest.fixture
def freeze(load, frozen, monkeypatch):
    """Leaves these parts of the metadata of a kind behind, until the end of a test."""
    stale, compiled = frozen

    def freeze(kind, *parts):
        decode, program = compiled(kind)
        stale.update(parts)
        monkeypatch.setitem(load(kind).programs.compiled, decode, program)

    yield freeze
    stale.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_that_drafts_for_itself_has_all_accepted(load, kind):
    assert acceptance_length(load(kind)) == 6.0


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_metadata_loses_acceptance(load, freeze, kind):
    freeze(kind)
    assert acceptance_length(load(kind)) == 6.0
    freeze(kind, *PARTS)
    assert acceptance_length(load(kind)) < 5.0


@pytest.mark.parametrize(("kind", "part"), STALE_PARTS)
def test_a_part_that_stays_behind_alone_loses_acceptance(load, freeze, kind, part):
    """As where lengths were advanced and the slots that they stand for were not."""
    freeze(kind, part)
    assert acceptance_length(load(kind)) < 5.9
