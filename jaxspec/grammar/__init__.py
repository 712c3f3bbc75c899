"""Grammars that answers must follow: regular expressions and JSON schemas as automata over tokens.

The core knows what a request says (`jaxspec.sampling.grammar`) and reads automata on the device
(`jaxspec.sampling.grammar_table`); it imports this package when the first request has a grammar.
"""

from jaxspec.grammar.compiler import compile_grammar
from jaxspec.grammar.packing import packed
from jaxspec.grammar.token_automaton import TokenAutomaton
from jaxspec.grammar.vocabulary import Vocabulary

__all__ = ["TokenAutomaton", "Vocabulary", "compile_grammar", "packed"]
