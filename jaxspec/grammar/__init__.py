"""Grammars that answers must follow: regular expressions and JSON schemas as automata over tokens."""

from typing import TYPE_CHECKING

from jaxspec.lazy import lazy_names

__all__ = [
    "FREE",
    "MAX_FORCED",
    "Grammar",
    "GrammarError",
    "GrammarStore",
    "Packed",
    "PlacedGrammar",
    "TokenAutomaton",
    "Vocabulary",
    "advance",
    "allowed",
    "allowed_of",
    "compile_grammar",
    "forced",
    "packed",
]

if TYPE_CHECKING:
    from jaxspec.grammar.compiler import compile_grammar
    from jaxspec.grammar.errors import GrammarError
    from jaxspec.grammar.grammar import Grammar
    from jaxspec.grammar.slab import FREE, MAX_FORCED, Packed, advance, allowed, allowed_of, forced, packed
    from jaxspec.grammar.store import GrammarStore, PlacedGrammar
    from jaxspec.grammar.token_automaton import TokenAutomaton
    from jaxspec.grammar.vocabulary import Vocabulary
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "jaxspec.grammar.compiler": "compile_grammar",
            "jaxspec.grammar.errors": "GrammarError",
            "jaxspec.grammar.grammar": "Grammar",
            "jaxspec.grammar.slab": "FREE MAX_FORCED Packed advance allowed allowed_of forced packed",
            "jaxspec.grammar.store": "GrammarStore PlacedGrammar",
            "jaxspec.grammar.token_automaton": "TokenAutomaton",
            "jaxspec.grammar.vocabulary": "Vocabulary",
        },
    )
