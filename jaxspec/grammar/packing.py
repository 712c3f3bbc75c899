"""From an automaton over tokens to the words that stand for it on the device."""

from typing import Any

import numpy as np

from jaxspec.grammar.token_automaton import TokenAutomaton, distinct_rows
from jaxspec.sampling.grammar_table import RECORD, Packed


def packed(automaton: TokenAutomaton) -> Packed:
    """The words of an automaton."""
    (num_states, num_classes), vocab_size = automaton.next.shape, len(automaton.classes)
    states = np.arange(num_states, dtype=np.int32) * RECORD
    may_come = automaton.next >= 0
    first, mask_of = distinct_rows(np.packbits(may_come, axis=1))
    rows = may_come[first]
    words = -(-vocab_size // 32)
    masks_at = num_states * RECORD
    classes_at = masks_at + len(rows) * words
    table_at = classes_at + -(-vocab_size // 2)
    record = np.stack(
        [
            masks_at + mask_of * words,
            table_at + np.arange(num_states) * num_classes,
            np.full(num_states, classes_at),
            automaton.forced,
        ],
        axis=1,
    ).astype(np.int32)
    halves = np.zeros(-(-vocab_size // 2) * 2, np.uint32)
    halves[:vocab_size] = automaton.classes
    transitions = np.where(automaton.next >= 0, automaton.next * RECORD, 0).astype(np.int32)
    is_record_place = np.ones_like(record, bool)
    is_record_place[:, 3] = False
    parts: list[tuple[np.ndarray, Any]] = [
        (record, is_record_place),
        (_masks(rows, automaton.classes, words), False),
        ((halves[::2] | halves[1::2] << np.uint32(16)).view(np.int32), False),
        (transitions, automaton.next >= 0),
    ]
    return Packed(
        np.concatenate([part.reshape(-1) for part, _ in parts]),
        np.concatenate([np.broadcast_to(is_place, part.shape).reshape(-1) for part, is_place in parts]),
        states,
    )


def _masks(rows: np.ndarray, classes: np.ndarray, words: int) -> np.ndarray:
    """i32[R, words]: a bit for every token, from the classes that are allowed, bool[R, C]."""
    masks = np.empty((len(rows), words), "<i4")
    padded = np.zeros(32 * words, bool)
    for mask, row in zip(masks, rows, strict=True):  # not at once, which takes 32 times the memory
        padded[: len(classes)] = row[classes]
        mask[:] = np.packbits(padded, bitorder="little").view("<i4")
    return masks
