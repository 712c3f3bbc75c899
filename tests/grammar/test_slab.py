"""The device's look-ups in a slab of automata, against the automata."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grammar_vocabularies import tokenizer, vocabulary
from jax.sharding import SingleDeviceSharding

from jaxspec.engine.host.grammars import PAGE, GrammarStore
from jaxspec.sampling.grammar import Grammar, GrammarError
from jaxspec.sampling.grammar_table import FREE, advance, allowed, allowed_of, forced

REGEXES = (r"\{\"a\": [0-9]{1,3}\}", "hello( world)*!", r"[^x]{0,9}", "é+|😀", "yes|no")


def store(name, pages=None):
    words, device = vocabulary(name), SingleDeviceSharding(jax.devices()[0])
    made = GrammarStore(tokenizer(name), words.size, words.ends, device, pages)
    made.prepare()
    return made


@pytest.mark.parametrize("name", ["bytes", "llama", "smollm2"])
def test_the_device_follows_every_automaton_of_a_slab(name):
    made, size = store(name), vocabulary(name).size
    placed = [made.compiled(Grammar.of_regex(regex)) for regex in REGEXES]
    assert all(map(made.hold, placed))
    assert made.compiled(Grammar.of_regex(REGEXES[0])) is placed[0]
    rng = np.random.default_rng(0)
    step = jax.jit(
        lambda slab, state, token: (
            allowed(slab, state, size),
            forced(slab, state),
            advance(slab, state, token),
        )
    )
    states = [0] * len(placed)
    for _ in range(12):
        places = [
            each.place * PAGE + each.packed.states[state] for each, state in zip(placed, states, strict=True)
        ]
        tokens = []
        for each, state in zip(placed, states, strict=True):
            may = np.flatnonzero(each.automaton.allowed(state))
            tokens.append(rng.choice(may) if rng.random() < 0.9 else rng.integers(size))
        got = step(made.slab, jnp.array([*places, FREE], jnp.int32), jnp.array([*tokens, 3], jnp.int32))
        mask, only, after = map(np.asarray, got)
        some = rng.integers(size, size=50)
        of_some = allowed_of(made.slab, jnp.array([*places, FREE], jnp.int32), jnp.array(some, jnp.int32))
        np.testing.assert_array_equal(of_some, mask[:, some])
        assert mask[-1].all()
        assert (only[-1], after[-1]) == (-1, FREE)
        for i, (each, state, token) in enumerate(zip(placed, states, tokens, strict=True)):
            np.testing.assert_array_equal(mask[i], each.automaton.allowed(state))
            assert only[i] == (np.flatnonzero(mask[i])[0] if mask[i].sum() == 1 else -1)
            following = int(each.automaton.next[state, each.automaton.classes[token]])
            expected = FREE if following < 0 else each.place * PAGE + each.packed.states[following]
            assert after[i] == expected
            states[i] = max(following, 0)


def test_grammars_in_use_keep_their_places_and_others_give_way():
    made = store("bytes", 16)
    grammars = [made.compiled(Grammar.of_regex(f"(ab{{{i}}}c){{300}}")) for i in range(1, 12)]
    held = []
    for grammar in grammars:
        if not made.hold(grammar):
            break
        held.append(grammar)
    assert 1 <= len(held) < len(grammars)
    places = [(each.place, each.place + each.pages) for each in held]
    assert all(first >= 1 for first, _ in places)
    assert all(a[1] <= b[0] or b[1] <= a[0] for i, a in enumerate(places) for b in places[:i])
    late = grammars[len(held)]
    held[0].users -= 1
    assert made.hold(held[0])
    held[0].users -= 1
    while not made.hold(late):
        held.pop().users -= 1
    assert late.place is not None
    assert held[0].place == places[0][0] or not held[0].users
    for each in (late, *(one for one in held if one.users)):
        words = np.asarray(made.slab)[each.place * PAGE :][: len(each.packed.words)]
        np.testing.assert_array_equal(words, each.packed.at(each.place * PAGE))


def test_a_grammar_too_large_for_the_slab_is_refused_with_its_size():
    with pytest.raises(GrammarError, match=r"json_schema is too large: \d+ states take \d+ MB on the device"):
        store("bytes", 16).compiled(Grammar.of_json_schema({"type": "string", "maxLength": 900}))
