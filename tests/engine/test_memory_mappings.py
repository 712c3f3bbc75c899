"""A process that may not map more memory is ended by XLA, so programs that are not needed are left out."""

import mmap
import sys
from pathlib import Path

import pytest
from tiny_engines import tokens_of

from jaxspec.engine.device import programs
from jaxspec.engine.device.programs import memory_mappings

ASKED = ({"presence_penalty": 1.0}, {"logprobs": 3}, {"min_tokens": 4, "temperature": 1.0, "seed": 5})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts mappings")
def test_mappings_are_counted():
    count, most = memory_mappings()
    # Neighbours of different protections are not merged.
    protections = [mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE] * 50
    kept = [mmap.mmap(-1, mmap.PAGESIZE, prot=each) for each in protections]
    assert count + 50 <= memory_mappings()[0] < most < 1 << 31
    assert len(kept) == 100


def test_elsewhere_there_is_no_limit(monkeypatch):
    monkeypatch.setattr(programs, "Path", lambda path: Path(f"/nowhere{path}"))
    assert memory_mappings() == (0, float("inf"))


def slots(engine):
    """For how many slots there are programs that decode."""
    return {size.slots for size in engine.programs.compiled if size.width}


@pytest.mark.usefixtures("compiled_behind")
def test_a_full_process_compiles_only_what_is_needed(tiny_engines, prompts, monkeypatch, caplog):
    params = [{"max_new_tokens": 9, **asked} for asked in ASKED for _ in range(2)]
    texts = (prompts * 2)[: len(params)]
    sizes = {"batch_size": 3, "slot_sizes": (1,), "sampling_modes": ("sampled",)}
    roomy = tiny_engines.load("ngram", max_model_len=90, **sizes)
    expected = tokens_of(roomy.generate(texts, params))
    roomy.programs.wait_compiled()

    monkeypatch.setattr(programs, "memory_mappings", lambda: (50, 100))
    engine = tiny_engines.load("ngram", max_model_len=91, **sizes)
    assert tokens_of(engine.generate(texts, params)) == expected
    assert [tokens_of([engine.generate(*each)])[0] for each in zip(texts, params, strict=True)] == expected
    engine.programs.wait_compiled()
    assert engine.programs.num_uncompiled == 0
    assert slots(engine) == {3} < slots(roomy)
    (line,) = [each.getMessage() for each in caplog.records if "memory mappings" in each.getMessage()]
    assert "50 memory mappings of at most 100" in line
