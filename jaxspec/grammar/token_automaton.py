"""From an automaton over bytes to one over the tokens of a vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.grammar.byte_automaton import ByteAutomaton, reaching
from jaxspec.grammar.vocabulary import Vocabulary
from jaxspec.sampling.grammar import GrammarError

_ENTRIES_AT_ONCE = 1 << 21
_MAX_ENTRIES = 1 << 23
"""Entries of the table of transitions, 4 bytes each."""
_MAX_CLASSES = 1 << 16
"""The device holds a class in 16 bits."""
_MAX_STEPS = 1 << 27
"""The most steps of walks through the trie, of which a second has about `_TRIED`."""
_TRIED = 3 << 21
"""Steps after which those of the other states are estimated, so that too many are refused within a second."""
_ENCODING = 1 << 9
"""Steps that take as long as the tokenizer does for a short text; each byte takes as long as `_BYTE`."""
_BYTE = 32
_COMPARED = 8
"""Entries of the table that are compared in the time of a step."""
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
      rows: blocks i32[states, C] of the states so far, of states over bytes, by the classes of their time.
      merged: where classes were split, the number of blocks before and, i64[C], the class that each was.
    """

    def __init__(self, automaton: ByteAutomaton, vocabulary: Vocabulary):
        self._automaton, self._vocabulary = automaton, vocabulary
        self._width = (automaton.next >= 0).sum(axis=1)
        self._byte, classes = distinct_rows(automaton.next.T)
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
        self._following = automaton.next[:, self._byte]
        single = slice(*self._trie.levels[1:3])
        self._single = self._trie.byte[single][self._kind[single] >= 0]  # classes of bytes that are tokens
        self._kind_of_spelled: dict[int, int] = {}
        self._general: list[int] = []  # of each kind of `_kind_of_spelled`, the kind of its text
        self._num_texts = int(is_text.sum()) + 2
        self.order = [0]
        self.spelled: dict[int, int] = {}
        self.classes = np.zeros(self._num_texts, np.int64)
        self.rows: list[np.ndarray] = []
        self.merged: list[tuple[int, np.ndarray]] = []
        self._num_rows = self._num_split = self._steps = 0
        self._tokens_of: dict[bytes, list[int]] = {}
        self._known_staying: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}
        self._some = np.zeros(1, np.int64)  # a kind of each class
        self._seen = np.zeros(len(automaton.next), bool)
        self._seen[0] = True

    def run(self) -> None:
        while self._num_rows < len(self.order):
            rows = max(_ENTRIES_AT_ONCE // len(self.classes), 1)
            self._add(np.array(self.order[self._num_rows :][:rows], np.int32))

    def result(self) -> TokenAutomaton:
        number = np.full(len(self._automaton.next) + 1, -1, np.int32)  # its last entry is that of -1
        number[self.order] = np.arange(len(self.order), dtype=np.int32)
        table = number[self._table()]
        ends = reaching(table, self._automaton.is_final[self.order])
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

    def _table(self) -> np.ndarray:
        """i32[S, C], states over bytes."""
        column, blocks, end = np.arange(len(self._some)), [], len(self.rows)
        for begin, merged in [*reversed(self.merged), (0, np.zeros(0, np.int64))]:
            blocks += [block[:, column] for block in reversed(self.rows[begin:end])]
            column, end = merged[column] if len(merged) else column, begin
        return np.concatenate(blocks[::-1])

    def _add(self, states: np.ndarray) -> None:
        is_spelled = np.array([self._spell(state) for state in states.tolist()])
        walked = np.flatnonzero(~is_spelled).astype(np.int32)
        free = states[walked]
        block = np.full((len(walked), len(self.classes)), -1, np.int32)
        if len(walked):
            self._walk(block, np.arange(len(walked), dtype=np.int32), free)
        block[:, self._num_texts :] = block[:, np.array(self._general, np.int32)]
        finals = np.flatnonzero(self._automaton.is_final[free])
        block[finals, 1] = free[finals]
        self._split_classes(block)
        rows = np.full((len(states), len(self._some)), -1, np.int32)
        rows[walked] = block[:, self._some]
        for row in np.flatnonzero(is_spelled):
            token = self.spelled[int(states[row])]
            after = self._after(int(states[row]), self._vocabulary.texts[token])
            rows[row, self.classes[self._kind_of_spelled[token]]] = after
        self._append(rows)
        self._reach(np.unique(rows))

    def _reach(self, states: np.ndarray) -> None:
        """Puts states in order, and those that spelled tokens and those of one byte lead to.

        So blocks are large, also where one part can only follow another.
        """
        while len(new := states[(states >= 0) & ~self._seen[states]]):
            self._seen[new] = True
            free = []
            for state in new.tolist():
                self.order.append(state)
                while self._spell(state):
                    state = self._after(state, self._vocabulary.texts[self.spelled[state]])
                    if self._seen[state]:
                        break
                    self._seen[state] = True
                    self.order.append(state)
                else:
                    free.append(state)
            states = np.unique(self._following[np.array(free, np.int32)][:, self._single])

    def _walk(self, block: np.ndarray, rows: np.ndarray, states: np.ndarray) -> None:
        """Fills rows of a block with the states after all texts, by walking through the trie with each.

        Texts of bytes that leave the state as it is, as most do inside a string, are found once for all
        states with the same such bytes.
        """
        width = self._following.shape[1]
        nodes, owners, afters = [], [], []
        stays = self._following[states] == states[:, None]
        first, which = distinct_rows(stays)
        for group, own in enumerate(stays[first]):
            kinds, leaving = self._staying(own)
            for index in np.flatnonzero(which == group):
                block[rows[index], kinds] = states[index]
            each = states[which == group]
            after = self._following[each[:, None], self._trie.byte[leaving]]
            self._count(after.size)
            owner, place = np.nonzero(after >= 0)
            nodes.append(leaving[place])
            owners.append(rows[which == group][owner])
            afters.append(after[owner, place])
        node, states, rows = (np.concatenate(parts) for parts in (nodes, afters, owners))
        while len(node):
            kind = self._kind[node]
            is_text = kind >= 0
            block[rows[is_text], kind[is_text]] = states[is_text]
            further = np.flatnonzero(self._children[node])
            node, states, rows = node[further], states[further], rows[further]
            child, count = self._below(node)
            after = self._following.take(np.repeat(states * width, count) + self._trie.byte[child])
            alive = np.flatnonzero(after >= 0)
            node, states, rows = child[alive], after[alive], np.repeat(rows, count)[alive]

    def _below(self, node: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The children of nodes of the trie, and the number of those of each."""
        count = self._children[node]
        total = int(count.sum())
        self._count(total)
        begin = self._first_child[node] + count - np.cumsum(count, dtype=np.int32)
        return np.arange(total, dtype=np.int32) + np.repeat(begin, count), count

    def _staying(self, stays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Kinds of texts of some classes of bytes, bool[C], and the nodes where the trie leaves them."""
        key = stays.tobytes()
        if key not in self._known_staying:
            inside, leaving, node = [], [], np.zeros(1, np.int32)
            while len(node):
                child, _ = self._below(node)
                is_inside = stays[self._trie.byte[child]]
                node = child[is_inside]
                inside.append(node)
                leaving.append(child[~is_inside])
            kinds = self._kind[np.concatenate(inside)]
            self._known_staying[key] = kinds[kinds >= 0], np.concatenate(leaving)
        return self._known_staying[key]

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps < _TRIED:
            return
        share = (self._num_rows + 1) / len(self._seen)
        if self._steps > _MAX_STEPS * min(share, 1):
            raise GrammarError(
                f"the grammar is too large: {self._num_rows} of its states already allow too many tokens in "
                "too many ways"
            )

    def _split_classes(self, block: np.ndarray) -> None:
        """Kinds of a class that lead apart in a row, and spelled ones, become classes of their own."""
        self._count(block.size // _COMPARED)
        apart = (block[:, self._some[self.classes]] != block).any(axis=1)
        own = np.arange(self._num_texts, len(self.classes))
        if not apart.any() and self._num_split == len(self.classes):
            return
        self._num_split = len(self.classes)
        mixed = _mixed(self.classes.astype(np.uint64) + np.uint64(1))
        for row in block[apart]:
            mixed = _mixed(mixed ^ (row + 1).astype(np.uint64))
        mixed[own] = _mixed(mixed[own] ^ own.astype(np.uint64))
        _, self._some, classes = np.unique(mixed, return_index=True, return_inverse=True)
        self.merged.append((len(self.rows), self.classes[self._some]))
        self.classes = classes

    def _append(self, rows: np.ndarray) -> None:
        """Adds rows, by the classes, to the table."""
        self.rows.append(rows)
        self._num_rows += len(rows)
        count = len(self._some)
        states = len(self.order)  # all of which will have a row, of no fewer classes
        if states * count > _MAX_ENTRIES or count > _MAX_CLASSES:
            raise GrammarError(
                f"the grammar is too large: {states} states for {count} kinds of tokens take "
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
        if run not in self._tokens_of:
            self._count(_ENCODING + _BYTE * len(run))
            self._tokens_of[run] = self._encoded(run)
        return self._tokens_of[run]

    def _encoded(self, run: bytes) -> list[int]:
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


def distinct_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A place of each different row of [N, W], and, i64[N], which of them each row is."""
    found: dict[bytes, int] = {}
    which = np.array([found.setdefault(row.tobytes(), len(found)) for row in rows])
    return np.unique(which, return_index=True)[1], which


def _mixed(words: np.ndarray) -> np.ndarray:
    """Hashes of u64[...] that differ in all bits where the words differ in one."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
