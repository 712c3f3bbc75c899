"""Which automata are kept: those that were asked for last."""

import jax
import pytest
from jax.sharding import SingleDeviceSharding
from tiny_grammars import tiny_tokenizer

from jaxspec.engine.host import grammars as module
from jaxspec.engine.host.grammars import GrammarStore
from jaxspec.sampling.grammar import Grammar


@pytest.fixture
def ask():
    """Asks a store, which has room for three automata on the device, for that of a regular expression."""
    made = GrammarStore(tiny_tokenizer(), 48, (2,), SingleDeviceSharding(jax.devices()[0]), pages=4)
    made.prepare()

    def ask(regex):
        placed = made.compiled(Grammar.of_regex(regex))
        assert made.hold(placed)
        placed.users -= 1
        return placed

    return ask


def test_what_was_asked_for_last_is_compiled_once(ask, monkeypatch):
    monkeypatch.setattr(module, "_MAX_COMPILED", 2 * len(ask("a").packed.words))
    assert ask("a") is ask("a")
    first, second = ask("a"), ask("b")
    assert ask("a") is first
    ask("c")  # in place of the second
    assert ask("a") is first
    assert ask("b") is not second


def test_what_was_asked_for_last_stays_on_the_device(ask):
    first, second, third = map(ask, "abc")
    ask("a")
    ask("d")  # in place of the second
    assert [each.place is None for each in (first, second, third)] == [False, True, False]
