"""From a grammar to an automaton over tokens."""

import json

from jaxspec.grammar.byte_automaton import ByteAutomaton, byte_automaton
from jaxspec.grammar.expression import Either, text
from jaxspec.grammar.json_schema import json_schema_automaton
from jaxspec.grammar.regex import regex_expression
from jaxspec.grammar.token_automaton import TokenAutomaton, token_automaton
from jaxspec.grammar.vocabulary import Vocabulary
from jaxspec.grammar.work import Work
from jaxspec.sampling.grammar import Grammar, GrammarError


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary) -> TokenAutomaton:
    """The automaton of a grammar over the tokens of a vocabulary; a large one takes some seconds.

    Raises:
      GrammarError: the grammar is malformed, not supported, or too large.
    """
    try:
        return token_automaton(_automaton(grammar), vocabulary)
    except RecursionError:
        raise GrammarError(f"{grammar.kind}: nested too deeply") from None
    except GrammarError as error:
        message = str(error)
        raise GrammarError(
            message if message.startswith(grammar.kind) else f"{grammar.kind}: {message}"
        ) from None


def _automaton(grammar: Grammar) -> ByteAutomaton:
    if grammar.kind == "regex":
        return byte_automaton(regex_expression(grammar.source, Work()))
    value = json.loads(grammar.source)
    if grammar.kind == "choice":
        return byte_automaton(Either(tuple(map(text, value))))
    return json_schema_automaton(value)
