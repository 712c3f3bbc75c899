"""From an automaton over bytes to one over the tokens of a vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order

from jaxspec.grammar.byte_automaton import ByteAutomaton
from jaxspec.grammar.errors import GrammarError
from jaxspec.grammar.vocabulary import Vocabulary

_ENTRIES_AT_ONCE = 1 << 21
_MAX_ENTRIES = 1 << 23
"""Entries of the table of transitions, 4 bytes each."""
_MAX_CLASSES = 1 << 16
"""The device holds a class in 16 bits."""
_LONGEST_RUN = 4096


@dataclass(frozen=True)
class TokenAutomaton:
    """A deterministic automaton over tokens. Tokens that lead alike from every state are one class.

    Where only one text can follow, only its tokens by the tokenizer are allowed, as far as words and numbers
    after it do not change them. So these texts are tokens without a choice, spelled as the model knows them.

    Attributes:
      classes: i32[V], the class of every token.
      next: i32[S, C], the state after a token of each class; -1 where it is not allowed. State 0 is the
        first.
      forced: i32[S], the only token that is allowed; -1 if there are several.
    """

    classes: np.ndarray
    next: np.ndarray
    forced: np.ndarray

    def allowed(self, state: int) -> np.ndarray:
        """bool[V], the tokens that may come in a state."""
        return self.next[state, self.classes] >= 0

    def run(self, tokens: Sequence[int]) -> int:
        """The state after tokens from the first state; -1 if one of them is not allowed."""
        state = 0
        for token in tokens:
            state = int(self.next[state, self.classes[token]])
            if state < 0:
                return -1
        return state


def token_automaton(automaton: ByteAutomaton, vocabulary: Vocabulary) -> TokenAutomaton:
    """The token sequences of a vocabulary whose bytes the automaton accepts, each with an end token.

    Raises:
      GrammarError: there is none, or too many states.
    """
    if vocabulary.strips_space:
        automaton = _with_a_dropped_space(automaton)
    product = _Product(automaton, vocabulary)
    product.run()
    return product.result()


def _with_a_dropped_space(automaton: ByteAutomaton) -> ByteAutomaton:
    """Begins with a space that is not part of the text, or without one."""
    first = automaton.next[:1].copy()
    first[0, ord(" ")] = 0
    moved = np.where(first >= 0, first + 1, -1)
    rest = np.where(automaton.next >= 0, automaton.next + 1, -1)
    return ByteAutomaton(
        np.concatenate([moved, rest]).astype(np.int32),
        np.concatenate([automaton.is_final[:1], automaton.is_final]),
    )


class _Product:
    """The construction, a block of states at a time.

    Tokens are handled by their kinds, which have the same texts if all bytes that lead alike are the same.

    Attributes:
      order: the states over bytes that are reached, in the order of their numbers.
      kinds: i32[V], the kind of every token; 0 for tokens that are never allowed, 1 for those that end.
      spelled: by state over bytes, the only token to allow. Such a token is a kind of its own.
      classes: i64[kinds], kinds that lead alike from every state so far are one class.
      table: i32[states so far, C], states over bytes.
    """

    def __init__(self, automaton: ByteAutomaton, vocabulary: Vocabulary):
        self._automaton, self._vocabulary = automaton, vocabulary
        self._width = (automaton.next >= 0).sum(axis=1)
        columns, classes = np.unique(_mixed_rows(automaton.next.T), return_inverse=True)
        self._byte = np.array([np.argmax(classes == each) for each in range(len(columns))])
        self._trie = vocabulary.trie.merged(classes.astype(np.uint8))
        nodes, kinds = np.unique(self._trie.node, return_inverse=True)
        is_text = nodes >= 0
        # Kinds 0 and 1 are no texts.
        shift = 2 - int((~is_text).sum())
        self.kinds = np.where(self._trie.node >= 0, kinds + shift, 0).astype(np.int32)
        self.kinds[list(vocabulary.ends)] = 1
        count = len(self._trie.parent)
        self._kind = np.full(count, -1, np.int32)
        self._kind[nodes[is_text]] = np.flatnonzero(is_text) + shift
        self._first_child = np.searchsorted(self._trie.parent[1:], np.arange(count)).astype(np.int32) + 1
        self._children = np.bincount(self._trie.parent[1:], minlength=count).astype(np.int32)
        self._kind_of_spelled: dict[int, int] = {}
        self._general: list[int] = []  # of each kind of `_kind_of_spelled`, the kind of its text
        self._num_texts = int(is_text.sum()) + 2
        self.order = [0]
        self.spelled: dict[int, int] = {}
        self.classes = np.zeros(self._num_texts, np.int64)
        self.table = np.zeros((0, 1), np.int32)
        self._seen = np.zeros(len(automaton.next), bool)
        self._seen[0] = True

    def run(self) -> None:
        while len(self.table) < len(self.order):
            rows = max(_ENTRIES_AT_ONCE // len(self.classes), 1)
            self._add(np.array(self.order[len(self.table) :][:rows], np.int32))

    def result(self) -> TokenAutomaton:
        number = np.full(len(self._automaton.next) + 1, -1, np.int32)  # its last entry is that of -1
        number[self.order] = np.arange(len(self.order), dtype=np.int32)
        table = number[self.table]
        ends = self._reaching(table, self._automaton.is_final[self.order])
        if not ends[0]:
            raise GrammarError("the grammar accepts no text that the model's tokens can spell")
        table[~ends[table] | (table < 0)] = -1
        used, tokens, classes, sizes = np.unique(
            self.classes[self.kinds], return_index=True, return_inverse=True, return_counts=True
        )
        table = table[:, used]
        is_allowed = table >= 0
        only = tokens[is_allowed.argmax(axis=1)]
        forced = np.where(is_allowed @ sizes == 1, only, -1)
        return TokenAutomaton(classes.astype(np.int32), table, forced.astype(np.int32))

    @staticmethod
    def _reaching(table: np.ndarray, is_final: np.ndarray) -> np.ndarray:
        """bool[S], the states from which a final one can be reached."""
        count = len(table)
        reached_by = [np.unique(row[row >= 0]) for row in table]
        source = np.repeat(np.arange(count), [len(row) for row in reached_by])
        into = np.concatenate([*reached_by, np.full(int(is_final.sum()), count)])
        source = np.concatenate([source, np.flatnonzero(is_final)])
        graph = csr_array((np.ones(len(into), bool), (into, source)), shape=(count + 1, count + 1))
        reached = np.zeros(count + 1, bool)
        reached[breadth_first_order(graph, count, return_predecessors=False)] = True
        return reached[:count]

    def _add(self, states: np.ndarray) -> None:
        is_spelled = np.array([self._spell(state) for state in states.tolist()])
        block = np.full((len(states), len(self.classes)), -1, np.int32)
        for row in np.flatnonzero(is_spelled):
            token = self.spelled[int(states[row])]
            text = self._vocabulary.texts[token]
            block[row, self._kind_of_spelled[token]] = self._after(int(states[row]), text)
        walked = np.flatnonzero(~is_spelled).astype(np.int32)
        self._walk(block, walked, states[walked])
        block[walked, self._num_texts :] = block[walked[:, None], np.array(self._general, np.int32)]
        finals = np.flatnonzero(self._automaton.is_final[states])
        block[finals, 1] = states[finals]
        self._split_classes(block)
        reached = np.unique(self.table[-len(states) :])
        reached = reached[(reached >= 0) & ~self._seen[reached]]
        self._seen[reached] = True
        self.order += reached.tolist()

    def _walk(self, block: np.ndarray, rows: np.ndarray, states: np.ndarray) -> None:
        """Fills rows of a block with the states after all texts, by walking through the trie with each."""
        following = self._automaton.next[:, self._byte]
        node = np.zeros(len(rows), np.int32)
        while len(node):
            count = self._children[node]
            parent = np.repeat(np.arange(len(node), dtype=np.int32), count)
            offset = (self._first_child[node] - (np.cumsum(count, dtype=np.int32) - count))[parent]
            child = np.arange(len(parent), dtype=np.int32) + offset
            states = following[states[parent], self._trie.byte[child]]
            alive = states >= 0
            states, node, rows = states[alive], child[alive], rows[parent[alive]]
            kind = self._kind[node]
            is_text = kind >= 0
            block[rows[is_text], kind[is_text]] = states[is_text]

    def _split_classes(self, block: np.ndarray) -> None:
        """Appends rows to the table; kinds of a class that lead apart in them become classes of their own."""
        mixed = _mixed(self.classes.astype(np.uint64) + np.uint64(1))
        for row in block:
            mixed = _mixed(mixed ^ (row + 1).astype(np.uint64))
        _, some, classes = np.unique(mixed, return_index=True, return_inverse=True)
        self.table = np.concatenate([self.table[:, self.classes[some]], block[:, some]])
        self.classes = classes
        if self.table.size > _MAX_ENTRIES or len(some) > _MAX_CLASSES:
            raise GrammarError(
                f"the grammar is too large: {len(self.table)} states for {len(some)} kinds of tokens take "
                f"more than {_MAX_ENTRIES >> 18} MB"
            )

    def _own_kind(self, token: int) -> None:
        """Makes a token a kind of its own, which has led so far where its text does."""
        if token not in self._kind_of_spelled:
            self._kind_of_spelled[token] = len(self.classes)
            general = int(self._kind[self._trie.node[token]])
            self._general.append(general)
            self.classes = np.append(self.classes, self.classes[general])
            self.kinds[token] = len(self.classes) - 1

    def _after(self, state: int, text: bytes) -> int:
        for byte in text:
            state = int(self._automaton.next[state, byte])
        return state

    def _spell(self, state: int) -> bool:
        """Whether a state is to allow one token alone: the tokenizer's own, of a text that must come."""
        if state in self.spelled:
            return True
        run, end = self._run(state)
        if len(run) < 2:
            return False
        tokens = self._tokens(run)
        if not self._is_settled(run, tokens, end):
            tokens = tokens[:-1]
        for token in tokens:
            self.spelled.setdefault(state, token)
            self._own_kind(self.spelled[state])
            state = self._after(state, self._vocabulary.texts[token])
        return bool(tokens)

    def _is_settled(self, run: bytes, tokens: list[int], end: int) -> bool:
        """Whether the last token of a text that must come stays what it is, whatever comes after it.

        Where letters may come, only they and digits are tried: that some sign would be one token with what is
        before it is no reason to leave a choice before every word.
        """
        following = [chr(byte) for byte in np.flatnonzero(self._automaton.next[end, :128] >= 0)]
        if not self._width[end]:
            return True
        letters = [character for character in following if character.isalpha()]
        tried = [*letters[:1], *letters[-1:], *filter(str.isdigit, following)] if letters else following
        return bool(tried) and all(
            self._tokens(run + character.encode())[: len(tokens)] == tokens for character in tried
        )

    def _run(self, state: int) -> tuple[bytes, int]:
        """The only text that can come in a state, up to where there is a choice or an end, and that state."""
        run = bytearray()
        while self._width[state] == 1 and not self._automaton.is_final[state] and len(run) < _LONGEST_RUN:
            byte = int(self._automaton.next[state].argmax())
            run.append(byte)
            state = int(self._automaton.next[state, byte])
        return bytes(run), state

    def _tokens(self, run: bytes) -> list[int]:
        """The tokenizer's tokens of a text; none if they do not spell exactly it."""
        vocabulary = self._vocabulary
        try:
            text = run.decode()
        except UnicodeDecodeError:
            return []
        # SentencePiece puts a space before a text; a line break before it takes that.
        for before in ("", "\n"):
            tokens = list(vocabulary.encode(before + text))
            for skipped in range(3 if before else 1):
                is_before = self._text(tokens[:skipped]).strip(b" ") == before.encode()
                if is_before and self._text(tokens[skipped:]) == run:
                    return tokens[skipped:]
        return []

    def _text(self, tokens: list[int]) -> bytes:
        return b"".join(self._vocabulary.texts.get(token, b"\xff") for token in tokens)


def _mixed_rows(rows: np.ndarray) -> np.ndarray:
    """A hash u64[N] of each row of i32[N, W]."""
    mixed = np.zeros(len(rows), np.uint64)
    for column in rows.T:
        mixed = _mixed(mixed ^ (column + 1).astype(np.uint64))
    return mixed


def _mixed(words: np.ndarray) -> np.ndarray:
    """Hashes of u64[...] that differ in all bits where the words differ in one."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
