"""Engines for the session, and prompts for them."""

import numpy as np
import pytest
from tiny_engines import TinyEngines, assert_idle


@pytest.fixture(scope="session")
def tiny_engines(tmp_path_factory):
    return TinyEngines(tmp_path_factory.mktemp("engines"))


@pytest.fixture(autouse=True)
def everything_is_given_back(tiny_engines):
    """After every test all slots and pages of all engines are free."""
    yield
    for engine in tiny_engines.loaded.values():
        assert_idle(engine)


@pytest.fixture(scope="session")
def prompts():
    """Seven prompts: shorter and longer than a prefill chunk, and ending at a chunk's or a page's edge."""
    rng = np.random.default_rng(0)
    return [rng.integers(48, size=length).tolist() for length in (3, 17, 30, 9, 1, 8, 16)]
