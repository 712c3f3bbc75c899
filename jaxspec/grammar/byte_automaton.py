"""From an expression to a deterministic automaton over the bytes of UTF-8."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from jaxspec.grammar.characters import ByteRanges, Ranges, utf8_sequences
from jaxspec.grammar.expression import Chain, Chars, Either, Expression, Listed, Repeat, Separated
from jaxspec.sampling.grammar import GrammarError

MAX_STATES = 1 << 14
"""The most states of an automaton over bytes."""
_MAX_SIZE = 1 << 18
"""The most edges and nodes together; a node counts as `_NODE` edges."""
_NODE = 3
_SPELLED = 4
"""Edges that take as long as one of the smallest automaton of a set of characters does to be found."""
_MAX_WORK = 1 << 20
"""Bounds of the computation that keep it within a second and 200 MB."""

_Edge = tuple[int, int, int]
"""A range of bytes, and the node that they lead to."""


@dataclass(frozen=True)
class ByteAutomaton:
    """A deterministic automaton over bytes; from each of its states the end can be reached.

    Attributes:
      next: i32[S, 256], the state after each byte; -1 where there is none. State 0 is the first.
      is_final: bool[S], where a text may end.
    """

    next: np.ndarray
    is_final: np.ndarray


def byte_automaton(expression: Expression) -> ByteAutomaton:
    """The automaton of the texts of an expression, encoded in UTF-8.

    Raises:
      GrammarError: it has too many states.
    """
    nodes = _Nodes()
    end = nodes.new()
    start = nodes.add(expression, end)
    return _deterministic(nodes, start, end)


class _Nodes:
    """A nondeterministic automaton, built from its end to its beginning.

    Attributes:
      edges: by node.
      silent: by node, the nodes that it is also at.
    """

    def __init__(self) -> None:
        self.edges: list[list[_Edge]] = []
        self.silent: list[list[int]] = []
        self._size = 0
        self._known: dict[tuple[tuple[_Edge, ...], tuple[int, ...]], int] = {}
        self._rows: dict[Ranges, list[list[_Edge]]] = {}
        self._added: dict[tuple[int, int], int] = {}  # by an expression's id and what follows

    def new(self, edges: Iterable[_Edge] = (), silent: Iterable[int] = ()) -> int:
        self.edges.append(list(edges))
        self.silent.append(list(silent))
        self._grow(len(self.edges[-1]) + _NODE)
        return len(self.edges) - 1

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > _MAX_SIZE:
            raise GrammarError("the grammar is too large: it repeats or lists too much")

    def shared(self, edges: Iterable[_Edge] = (), silent: Iterable[int] = ()) -> int:
        """A node that does not change any more, so that alternatives which end alike share their ends."""
        key = tuple(edges), tuple(silent)
        if key not in self._known:
            self._known[key] = self.new(*key)
        return self._known[key]

    def add(self, expression: Expression, then: int) -> int:
        """The first node of an expression after which the node `then` comes."""
        self._grow(1)  # also where it makes no node
        key = id(expression), then
        if key not in self._added:
            self._added[key] = self._add(expression, then)
        return self._added[key]

    def _add(self, expression: Expression, then: int) -> int:
        if isinstance(expression, Chars):
            return self._chars(expression.ranges, then)
        if isinstance(expression, Chain):
            for part in reversed(expression.parts):
                then = self.add(part, then)
            return then
        if isinstance(expression, Either):
            return self.shared(silent=[self.add(part, then) for part in expression.parts])
        if isinstance(expression, Listed):
            return self._listed(expression, then)
        if isinstance(expression, Separated):
            after = self.new(silent=[then])
            here = self.add(expression.part, after)
            self.silent[after].append(self.add(expression.separator, here))
            return self.shared(silent=[here, then]) if expression.may_be_missing else here
        return self._repeat(expression, then)

    def _chars(self, chars: Ranges, then: int) -> int:
        if chars not in self._rows:
            rows = self._rows[chars] = _rows_of(chars)
            self._grow(_SPELLED * sum(map(len, rows)))
        placed: list[int] = []
        for row in self._rows[chars]:  # a row leads only to rows before it
            edges = [(low, high, then if to < 0 else placed[to]) for low, high, to in row]
            placed.append(self.shared(edges))
        return placed[-1]

    def _repeat(self, repeat: Repeat, then: int) -> int:
        if repeat.high is None:
            loop = self.new(silent=[then])
            self.silent[loop].append(self.add(repeat.part, loop))
            then = loop
        else:
            after = then
            for _ in range(repeat.high - repeat.low):
                then = self.shared(silent=[self.add(repeat.part, then), after])
        for _ in range(repeat.low):
            before, then = then, self.add(repeat.part, then)
            if then == before:  # the empty text
                break
        return then

    def _listed(self, listed: Listed, then: int) -> int:
        """Where parts may be missing, there are two nodes before each: with and without one before it."""
        begun = nothing = then
        for part, is_optional in reversed(listed.parts):
            here = self.add(part, begun)
            after = self.add(listed.separator, here)
            begun = self.shared(silent=[after, begun]) if is_optional else after
            nothing = self.shared(silent=[here, nothing]) if is_optional else here
        return nothing


@lru_cache(maxsize=256)
def _rows_of(chars: Ranges) -> list[list[_Edge]]:
    """The smallest automaton of one character of a set: edges by row, -1 for the end; the last is first."""
    if chars[0][0] == chars[-1][1]:  # a single character
        return [[(byte, byte, tail - 1)] for tail, byte in enumerate(reversed(chr(chars[0][0]).encode()))]
    rows: list[list[_Edge]] = []
    found: dict[frozenset[ByteRanges], int] = {}

    def row(tails: frozenset[ByteRanges]) -> int:
        if () in tails:
            return -1
        if tails not in found:
            split = _split([(*tail[0], tail[1:]) for tail in tails])
            rows.append(_joined([(low, high, row(rests)) for low, high, rests in split]))
            found[tails] = len(rows) - 1
        return found[tails]

    row(frozenset(utf8_sequences(chars)))
    return rows


def _split(edges: list[tuple[int, int, Any]]) -> list[tuple[int, int, frozenset]]:
    """Ranges that may overlap, with a value each, as ranges that do not, with the values of each."""
    if len(edges) == 1:
        low, high, value = edges[0]
        return [(low, high, frozenset((value,)))]
    begins: dict[int, list[Any]] = {}
    ends: dict[int, list[Any]] = {}
    for low, high, value in edges:
        begins.setdefault(low, []).append(value)
        ends.setdefault(high + 1, []).append(value)
    split, count = [], Counter[Any]()
    points = sorted({*begins, *ends})
    for low, above in pairwise(points):
        count.update(begins.get(low, ()))
        for value in ends.get(low, ()):
            count[value] -= 1
            if not count[value]:
                del count[value]
        if count:
            split.append((low, above - 1, frozenset(count)))
    return split


def _joined(edges: list[_Edge]) -> list[_Edge]:
    """Neighbouring ranges with the same target as one."""
    joined: list[_Edge] = []
    for low, high, to in edges:
        if joined and joined[-1][1] + 1 == low and joined[-1][2] == to:
            joined[-1] = (joined[-1][0], high, to)
        else:
            joined.append((low, high, to))
    return joined


def _deterministic(nodes: _Nodes, start: int, end: int) -> ByteAutomaton:
    """A state for every set of nodes that the automaton may be at after the same bytes."""

    work = 0

    def count(steps: int) -> None:
        nonlocal work
        work += steps
        if work > _MAX_WORK or len(order) > MAX_STATES:
            raise GrammarError(
                f"the grammar is too large: its automaton has more than {len(order)} states; shorten what it "
                "repeats or lists"
            )

    @cache
    def closure(node: int) -> frozenset[int]:
        """The nodes with edges, and the end, that a node is also at."""
        seen, waiting = {node}, [node]
        while waiting:
            for other in nodes.silent[waiting.pop()]:
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        count(len(seen))
        return frozenset(each for each in seen if nodes.edges[each] or each == end)

    order: list[frozenset[int]] = []
    first = closure(start)
    order.append(first)
    states, rows = {first: 0}, []
    for state in order:
        row = np.full(256, -1, np.int32)
        own = [nodes.edges[node] for node in state if nodes.edges[node]]
        is_split = len(own) < 2  # those of one node do not overlap
        edges: list[Any] = [edge for each in own for edge in each]
        for low, high, targets in edges if is_split else _split(edges):
            reached = closure(targets) if is_split else frozenset().union(*map(closure, targets))
            count(len(reached) + (1 if is_split else len(edges)))
            if reached not in states:
                states[reached] = len(order)
                order.append(reached)
            row[low : high + 1] = states[reached]
        rows.append(row)
    return ByteAutomaton(np.stack(rows), np.array([end in state for state in order]))
