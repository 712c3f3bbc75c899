"""From an expression to a deterministic automaton over the bytes of UTF-8."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order

from jaxspec.grammar.characters import ByteRanges, Ranges, utf8_sequences
from jaxspec.grammar.expression import (
    Both,
    Chain,
    Chars,
    Either,
    Expression,
    Listed,
    Remainders,
    Repeat,
    Separated,
)
from jaxspec.grammar.work import Nothing, TooLarge

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


def byte_automaton(expression: Expression, budget: "Budget | None" = None) -> ByteAutomaton:
    """The automaton of the texts of an expression, encoded in UTF-8.

    Args:
      budget: what it may cost, together with others; its own if None.

    Raises:
      GrammarError: it has too many states, or accepts no text.
    """
    budget = budget or Budget()
    nodes = _Nodes(budget)
    end = nodes.new()
    start = nodes.add(expression, end)
    return _deterministic(nodes, start, end, budget)


class Budget:
    """What all automata of a grammar may cost together."""

    def __init__(self) -> None:
        self._size = self._work = 0

    def grow(self, size: int) -> None:
        """Counts edges and nodes."""
        self._size += size
        if self._size > _MAX_SIZE:
            raise TooLarge("the grammar is too large: it repeats or lists too much")

    def count(self, steps: int, states: int) -> None:
        """Counts steps, and checks the number of states of the automaton that they are taken for."""
        self._work += steps
        if self._work > _MAX_WORK or states > MAX_STATES:
            raise TooLarge(
                f"the grammar is too large: its automaton has more than {states} states; shorten what it "
                "repeats or lists"
            )


class _Nodes:
    """A nondeterministic automaton, built from its end to its beginning.

    Attributes:
      edges: by node.
      silent: by node, the nodes that it is also at.
    """

    def __init__(self, budget: Budget) -> None:
        self.edges: list[list[_Edge]] = []
        self.silent: list[list[int]] = []
        self._budget = budget
        self._known: dict[tuple[tuple[_Edge, ...], tuple[int, ...]], int] = {}
        self._rows: dict[Ranges, list[list[_Edge]]] = {}
        self._added: dict[tuple[int, int], int] = {}  # by an expression's id and what follows

    def new(self, edges: Iterable[_Edge] = (), silent: Iterable[int] = ()) -> int:
        self.edges.append(list(edges))
        self.silent.append(list(silent))
        self._budget.grow(len(self.edges[-1]) + _NODE)
        return len(self.edges) - 1

    def shared(self, edges: Iterable[_Edge] = (), silent: Iterable[int] = ()) -> int:
        """A node that does not change any more, so that alternatives which end alike share their ends."""
        key = tuple(edges), tuple(silent)
        if key not in self._known:
            self._known[key] = self.new(*key)
        return self._known[key]

    def add(self, expression: Expression, then: int) -> int:
        """The first node of an expression after which the node `then` comes."""
        self._budget.grow(1)  # also where it makes no node
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
        if isinstance(expression, Both):
            return self._both(expression, then)
        if isinstance(expression, Remainders):
            return self._remainders(expression.of, then)
        return self._repeat(expression, then)

    def _both(self, both: Both, then: int) -> int:
        automata = [byte_automaton(part, self._budget) for part in (*both.parts, *both.without)]
        common = _common(automata, len(both.parts), self._budget)
        first = len(self.edges)
        for is_final in common.is_final:
            self.new(silent=[then] if is_final else ())
        for state, row in enumerate(common.next):
            begins = np.flatnonzero(np.diff(row, prepend=-2))
            ends = [*(begins[1:] - 1).tolist(), 255]
            self.edges[first + state] = [
                (low, high, first + int(row[low]))
                for low, high in zip(begins.tolist(), ends, strict=True)
                if row[low] >= 0
            ]
            self._budget.grow(len(self.edges[first + state]))
        return first

    def _remainders(self, of: int, then: int) -> int:
        """A node for each remainder of the digits so far; 0 begins no other number."""
        self._budget.grow((_NODE + 10) * of)
        first = len(self.edges)
        for remainder in range(of):
            edges = [(ord("0") + i, ord("0") + i, first + (10 * remainder + i) % of) for i in range(10)]
            self.new(edges, () if remainder else (then,))
        zero = (ord("0"), ord("0"), then)
        return self.new([zero, *((ord("0") + i, ord("0") + i, first + i % of) for i in range(1, 10))])

    def _chars(self, chars: Ranges, then: int) -> int:
        if chars not in self._rows:
            rows = self._rows[chars] = _rows_of(chars)
            self._budget.grow(_SPELLED * sum(map(len, rows)))
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


def _common(automata: list[ByteAutomaton], kept: int, budget: Budget) -> ByteAutomaton:
    """The texts that the first automata accept, all of them, and none of the others."""
    tables = [np.vstack([each.next, np.full(256, -1, np.int32)]) for each in automata]  # -1 is the last state
    finals = [np.append(each.is_final, False) for each in automata]
    first, classes = np.unique(np.vstack(tables), axis=1, return_index=True, return_inverse=True)[1:]
    tables = [table[:, first] for table in tables]
    order = [tuple(0 for _ in automata)]
    number, rows = {order[0]: 0}, []
    for states in order:
        budget.count(len(first), len(order))
        row = []
        for after in zip(
            *(table[state].tolist() for table, state in zip(tables, states, strict=True)), strict=True
        ):
            if any(state < 0 for state in after[:kept]):
                row.append(-1)
                continue
            if after not in number:
                number[after] = len(order)
                order.append(after)
            row.append(number[after])
        rows.append(row)
    is_final = np.array(
        [
            all(
                is_end[state] == (i < kept)
                for i, (is_end, state) in enumerate(zip(finals, states, strict=True))
            )
            for states in order
        ]
    )
    return _ending(np.array(rows, np.int32)[:, classes.reshape(-1)], is_final)


def _ending(table: np.ndarray, is_final: np.ndarray) -> ByteAutomaton:
    """An automaton without the states from which no end can be reached."""
    can_end = reaching(table, is_final)
    if not can_end[0]:
        raise Nothing("no text has all that is asked for")
    number = np.append(np.where(can_end, np.cumsum(can_end) - 1, -1), -1).astype(np.int32)
    return ByteAutomaton(number[table[can_end]], is_final[can_end])


def reaching(table: np.ndarray, is_final: np.ndarray) -> np.ndarray:
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


def _deterministic(nodes: _Nodes, start: int, end: int, budget: Budget) -> ByteAutomaton:
    """A state for every set of nodes that the automaton may be at after the same bytes."""

    @cache
    def closure(node: int) -> frozenset[int]:
        """The nodes with edges, and the end, that a node is also at."""
        seen, waiting = {node}, [node]
        while waiting:
            for other in nodes.silent[waiting.pop()]:
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        budget.count(len(seen), len(order))
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
            budget.count(len(reached) + (1 if is_split else len(edges)), len(order))
            if reached not in states:
                states[reached] = len(order)
                order.append(reached)
            row[low : high + 1] = states[reached]
        rows.append(row)
    return ByteAutomaton(np.stack(rows), np.array([end in state for state in order]))
