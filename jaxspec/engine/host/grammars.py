"""The automata of an engine: compiled once per grammar, and in the device's slab while requests use them."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding

from jaxspec.files import Tokenizer
from jaxspec.lazy import outside
from jaxspec.sampling.grammar import Grammar, GrammarError
from jaxspec.sampling.grammar_table import FREE, FREE_RECORD, Packed

PAGE = 1 << 13
"""Words of a page. Automata stand at pages, which one program writes, whatever their sizes."""
_MAX_COMPILED = 1 << 24
"""The most words of automata that are kept on the host."""


def num_pages(vocab_size: int) -> int:
    """The pages of a slab: 128 words for every token, 25 MB for a vocabulary of 49,152; at least 4 MB."""
    return max(-(-vocab_size * 128 // PAGE), 128)


class Automaton(Protocol):
    """A grammar over tokens, as `jaxspec.grammar` compiles it."""

    @property
    def next(self) -> np.ndarray:
        """i32[S, C], the state after a token of each class; -1 where it is not allowed."""

    def run(self, tokens: Sequence[int]) -> int:
        """The state after tokens from the first state; -1 if one of them is not allowed."""


@dataclass(eq=False)
class PlacedGrammar:
    """A grammar's automaton, and its place in the slab.

    Attributes:
      automaton: over tokens.
      packed: its words.
      place: its first page in the slab; None while it is not there.
      users: how many requests in slots use it; they count themselves out.
    """

    automaton: Automaton
    packed: Packed
    place: int | None = None
    users: int = field(default=0)

    @cached_property
    def pages(self) -> int:
        """The number of pages that it takes."""
        return -(-len(self.packed.words) // PAGE)

    def state_after(self, tokens: Sequence[int]) -> int:
        """The state in the slab after the tokens of an answer; `FREE` if one of them is not allowed."""
        assert self.place is not None
        state = self.automaton.run(tokens)
        return FREE if state < 0 else self.place * PAGE + int(self.packed.states[state])


class GrammarStore:
    """Compiles grammars, in any thread, and fills the slab, in the engine's.

    Attributes:
      size: the words of the slab.
      slab: i32[size] on every device; of size zero until `prepare`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        ends: Sequence[int],
        sharding: Sharding,
        pages: int | None = None,
    ):
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, ends
        self._sharding = sharding
        self._num_pages = pages or num_pages(vocab_size)
        self.size = self._num_pages * PAGE
        self.slab = _no_slab()
        self._is_lost = self._is_closed = False
        self._lock = Lock()
        self._compiled: OrderedDict[Grammar, PlacedGrammar] = OrderedDict()
        self._placed: OrderedDict[PlacedGrammar, None] = OrderedDict()

    @cached_property
    def _vocabulary(self) -> Any:
        if self._tokenizer is None:
            raise GrammarError("grammars need a tokenizer, and this checkpoint has none")
        return outside("grammar").Vocabulary.of(self._tokenizer, self._vocab_size, self._ends)

    def read_vocabulary(self) -> None:
        """Reads the tokenizer's tokens, as the first grammar does otherwise.

        Raises:
          GrammarError: there is no tokenizer, or it is not supported.
        """
        with self._lock:
            self._vocabulary  # noqa: B018

    def compiled(self, grammar: Grammar) -> PlacedGrammar:
        """The automaton of a grammar, compiled unless it is kept.

        Raises:
          GrammarError: the grammar or the tokenizer is not supported, or it is too large for the slab.
        """
        with self._lock:
            found = self._compiled.pop(grammar, None)
            if found is None:
                try:
                    vocabulary = self._vocabulary
                except GrammarError as error:
                    raise GrammarError(f"{grammar.kind}: {error}") from None
                automaton = outside("grammar").compile_grammar(grammar, vocabulary)
                found = PlacedGrammar(automaton, outside("grammar").packed(automaton))
                if found.pages >= self._num_pages:
                    raise GrammarError(
                        f"{grammar.kind} is too large: {len(automaton.next)} states take "
                        f"{len(found.packed.words) >> 18} MB on the device, where all grammars have "
                        f"{self.size >> 18} MB"
                    )
            self._compiled[grammar] = found
            words = sum(len(each.packed.words) for each in self._compiled.values())
            while words > _MAX_COMPILED and len(self._compiled) > 1:
                words -= len(self._compiled.popitem(last=False)[1].packed.words)
        return found

    def prepare(self) -> None:
        """Makes the slab and compiles what writes it; later calls do nothing."""
        with self._lock:
            if self.slab.size or self._is_closed:
                return
            write = jax.jit(_write, donate_argnums=0, out_shardings=self._sharding)
            slab, page, place = (
                jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._sharding)
                for shape in ((self.size,), (PAGE,), ())
            )
            self._write = write.lower(slab, page, place).compile()
            self.slab = self._empty()
            if self._is_closed:  # by another thread, meanwhile
                self.slab = _no_slab()

    def _empty(self) -> jax.Array:
        slab = jax.jit(lambda: jnp.zeros(self.size, jnp.int32), out_shardings=self._sharding)()
        first = np.zeros(PAGE, np.int32)
        first[: len(FREE_RECORD)] = FREE_RECORD
        return self._write(slab, first, np.int32(0))

    def hold(self, grammar: PlacedGrammar | None) -> bool:
        """Places the grammar of a request that gets a slot, if it has one; False if there is no room."""
        if grammar is None:
            return True
        if self._is_lost:
            self.slab, self._is_lost = self._empty(), False
        if grammar.place is None:
            place = self._find(grammar.pages)
            if place is None:
                return False
            words = np.zeros(grammar.pages * PAGE, np.int32)
            words[: len(grammar.packed.words)] = grammar.packed.at(place * PAGE)
            for index, page in enumerate(words.reshape(-1, PAGE)):
                self.slab = self._write(self.slab, page, np.int32(place + index))
            grammar.place = place
        self._placed.pop(grammar, None)
        self._placed[grammar] = None
        grammar.users += 1
        return True

    def lose(self) -> None:
        """Forgets what is in the slab, after the device has failed."""
        for grammar in self._placed:
            grammar.place = None
        self._placed.clear()
        self._is_lost = bool(self.slab.size)

    def close(self) -> None:
        """Frees the slab."""
        self._is_closed = True
        self.slab = _no_slab()

    def _find(self, pages: int) -> int | None:
        """The first of so many free pages, for which grammars that nobody uses are given up, oldest first."""
        unused = [grammar for grammar in self._placed if not grammar.users]
        while True:
            end = 1  # the first page has the record of `FREE`
            for grammar in sorted(self._placed, key=lambda grammar: grammar.place or 0):
                assert grammar.place is not None
                if grammar.place - end >= pages:
                    return end
                end = grammar.place + grammar.pages
            if self._num_pages - end >= pages:
                return end
            if not unused:
                return None
            del self._placed[unused[0]]
            unused.pop(0).place = None


def _no_slab() -> jax.Array:
    return cast(jax.Array, np.zeros(0, np.int32))


def _write(slab: jax.Array, page: jax.Array, place: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(slab, page, (place * PAGE,))
