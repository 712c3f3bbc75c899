"""Engines for the session, and prompts for them."""

from functools import cache, partial

import jax.numpy as jnp
import numpy as np
import pytest
from memory import is_large
from paged_rows import PagedTarget
from tiny_engines import TARGETS, TinyEngines, assert_idle

from jaxspec.files import open_checkpoint
from jaxspec.models.target import load_target


@pytest.fixture(scope="session")
def engines_of(tmp_path_factory):
    """`TinyEngines` over every kind of attention, and Gemma 4, by its name."""
    return {kind: TinyEngines(tmp_path_factory.mktemp("engines"), kind) for kind in TARGETS}


@pytest.fixture(scope="session")
def tiny_engines(engines_of):
    return engines_of["full"]


@pytest.fixture(scope="module", autouse=True)
def few_engines(engines_of):
    """Closes all engines after a module if the process is large; they are a third of its memory."""
    yield
    if is_large():
        for engines in engines_of.values():
            engines.close()


@pytest.fixture(autouse=True)
def everything_is_given_back(engines_of):
    """After every test all slots and pages of all engines are free."""
    yield
    for engines in engines_of.values():
        for engine in engines.loaded.values():
            assert_idle(engine)


@pytest.fixture(scope="session")
def prompts():
    """Seven prompts: shorter and longer than a prefill chunk, and ending at a chunk's or a page's edge."""
    rng = np.random.default_rng(0)
    return [rng.integers(48, size=length).tolist() for length in (3, 17, 30, 9, 1, 8, 16)]


@pytest.fixture(scope="session")
def forward_of(engines_of):
    """A function that gives a target's logits f64[T, V] after each token of a text, and remembers them."""

    @cache
    def target(kind):
        model = load_target(open_checkpoint(engines_of[kind].folders["target"]), dtype=jnp.float32)
        return PagedTarget(model, 1, 96, page_size=8, width=96)

    @cache
    def logits_of(kind, tokens):
        logits, _, _ = target(kind).feed([list(tokens)], [0])
        return np.asarray(logits[0, : len(tokens)], np.float64)

    return lambda kind, tokens: logits_of(kind, tuple(tokens))


@pytest.fixture(scope="session")
def forward(forward_of):
    """`forward_of` for full attention."""
    return partial(forward_of, "full")
