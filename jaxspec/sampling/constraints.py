"""Constraints: changes of a row of logits that follow from the text before it, exact under speculation.

Row j of a block of drafts sees drafts 0 to j - 1 as if they were output. So a constraint is a pure function
of what a request asks for (`ConstraintState`), its text so far (`Constrained`), and the drafts before a row.
What is verified is then what plain decoding gives. The rows that a drafter draws from are changed alike, so
that drafts are not wasted; there any change would be exact, as long as the proposal holds the logits that
were drawn from.

They are applied in the order of transformers and vLLM, before temperature, min-p, top-k and top-p. First,
`logit_bias` is added. Then come the repetition, the frequency and the presence penalty. Last, tokens are
banned: ends before `min_tokens`, ends of `bad_words`, repeated n-grams, and what a grammar does not allow.

Programs are chosen by the kinds of constraints (`Constraints`): what nobody asks for is in no program. A new
kind is a flag there, and
  - what it needs of a request becomes fields of `ConstraintState`, of size zero if the flag is not set, and
    rows of the table in `engine/device/plan.py`;
  - what all rows of a block share is computed once, in `Constrained.over`;
  - `ConstrainedRows.apply` changes the rows.

A grammar has a state that every token advances (`jaxspec.grammar`). `EngineState` keeps that after a slot's
last token; `EngineState.context` and `chunks_of_prompts` hand it on in `Constrained`. `apply` advances it by
the drafts before each row. A step commits it in `_advance` (`engine/device/step.py`) by the tokens that it
emits: drafts never touch the stored state.
"""

from dataclasses import dataclass, field, fields
from enum import IntFlag
from functools import reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxspec_kernels.penalise import penalise
from jaxspec_kernels.token_marks import token_marks

from jaxspec.sampling.grammar_table import advance, allowed, allowed_of
from jaxspec.sampling.grammar_table import forced as only_token
from jaxspec.sampling.params import MAX_SEQUENCE, SamplingParams
from jaxspec.sampling.rejection import row_at
from jaxspec.sampling.vocabulary import DraftVocabulary
from jaxspec.sharding import local_start

_UNLIKELY = -1e9
"""The logit of a draft that is banned. With -inf, a draft vocabulary of which all is banned would have no
distribution."""
_DROP: Any = {"mode": "drop", "wrap_negative_indices": False}
"""Indices out of range are dropped, also those below 0."""


class Constraints(IntFlag):
    """Kinds of constraints. A program applies those that it names, and serves requests that ask for some.

    Attributes:
      NONE: nothing.
      PENALTIES: the repetition, the presence and the frequency penalty.
      TOKENS: `logit_bias` and `min_tokens`.
      SEQUENCES: `bad_words` and `no_repeat_ngram_size`.
      GRAMMAR: `choice`, `regex` and `json_schema`.
    """

    NONE = 0
    PENALTIES = 1
    TOKENS = 2
    SEQUENCES = 4
    GRAMMAR = 8

    @property
    def needs_history(self) -> bool:
        """Whether any reads the tokens before the last one."""
        return bool(self & (Constraints.PENALTIES | Constraints.SEQUENCES))


def required_constraints(params: SamplingParams) -> Constraints:
    """The constraints that a request asks for."""
    asked = {
        Constraints.PENALTIES: params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0,
        Constraints.TOKENS: params.logit_bias or params.min_tokens,
        Constraints.SEQUENCES: params.bad_words or params.no_repeat_ngram_size,
        Constraints.GRAMMAR: params.grammar,
    }
    return reduce(or_, (kind for kind, is_asked in asked.items() if is_asked), Constraints.NONE)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ConstraintState:
    """The part of each slot's parameters that constraints need; the last axis is 0 for what is not asked.

    Attributes:
      asked: the constraints of the program; static.
      prompt_length: i32[n, 1], tokens of the prompt.
      repetition_penalty, presence_penalty, frequency_penalty: f32[n, 1].
      bias_tokens, bias_values: i32 and f32[n, MAX_LOGIT_BIAS]; the ids are -1 where there are none.
      min_tokens: i32[n, 1].
      bad_words: i32[n, MAX_BAD_WORD_TOKENS], all sequences one after another.
      bad_word_sizes: i32[n, MAX_BAD_WORD_TOKENS], at the last token of each sequence its size, else 0.
      no_repeat_ngram_size: i32[n, 1], 0 for off.
      grammar: i32[n, 1], the state of the grammar's automaton for the token after the prompt, or after what
        is read of the answer; 0 without a grammar.
    """

    asked: Constraints = field(metadata={"static": True})
    prompt_length: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    bias_tokens: jax.Array
    bias_values: jax.Array
    min_tokens: jax.Array
    bad_words: jax.Array
    bad_word_sizes: jax.Array
    no_repeat_ngram_size: jax.Array
    grammar: jax.Array

    @classmethod
    def none(cls, count: int) -> "ConstraintState":
        """That of slots which ask for nothing."""
        empty: Any = _nothing(count)
        return cls(Constraints.NONE, *[empty] * (len(fields(cls)) - 1))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Columns:
    """The tokens that the columns of rows of logits stand for.

    Attributes:
      start: i32[], the id in the first column.
      draft_ids: i32[V], the draft id of each token, -1 for none, for rows over a draft vocabulary; otherwise
        of size zero.
      tokens: i32[W], the token of each column; of size zero if each is its own.
      size: the number of columns; static.
    """

    start: jax.Array
    draft_ids: jax.Array
    tokens: jax.Array
    size: int = field(metadata={"static": True})

    @classmethod
    def of(cls, logits: jax.Array, whole: int, vocabulary: DraftVocabulary | None = None) -> "Columns":
        """Those of logits [..., W].

        Args:
          whole: the size of the vocabulary, of which W may be this device's part.
          vocabulary: the draft vocabulary if `logits` are over one.
        """
        size = logits.shape[-1]
        start = jnp.int32(0) if size == whole else local_start(size)
        ids: Any = np.zeros(0, np.int32)
        tokens = ids
        if vocabulary is not None:
            ids = vocabulary.draft_ids
            tokens = lax.dynamic_slice_in_dim(vocabulary.target_ids, start, size)
        elif size < whole:
            tokens = start + jnp.arange(size, dtype=jnp.int32)
        return cls(start, ids, tokens, size)

    def find(self, tokens: jax.Array) -> jax.Array:
        """The column of each token; out of range for one that has none."""
        if self.draft_ids.size:
            tokens = jnp.where(tokens < 0, -1, jnp.take(self.draft_ids, tokens, mode="clip"))
        return tokens - self.start


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Constrained:
    """What n slots ask for, and their texts so far.

    Attributes:
      state: what they ask for.
      stop_tokens: i32[n, S], the ids that end each; -1 for none.
      history: i32[n, X], their tokens by position; entries past `length` are stale.
      length: i32[n], position of the last token.
      automaton: i32[n], the state of each grammar's automaton after the last token; of size zero without
        grammars.
      grammars: i32[N], the slab that holds the automata; of size zero if no grammar is asked for.
    """

    state: ConstraintState
    stop_tokens: jax.Array
    history: jax.Array
    length: jax.Array
    automaton: jax.Array
    grammars: jax.Array

    @classmethod
    def none(cls, count: int = 0) -> "Constrained":
        """That of slots which ask for nothing."""
        empty: Any = _nothing(count)
        return cls(ConstraintState.none(count), empty, empty, empty, empty, empty)

    @property
    def asked(self) -> Constraints:
        """The constraints of the program."""
        return self.state.asked

    def over(self, columns: Columns) -> "ConstrainedRows":
        """What all rows of a block with these columns share."""
        state, slots = self.state, jnp.arange(len(self.length))[:, None]
        bias = jnp.zeros((len(self.length), 0))
        if self.asked & Constraints.TOKENS:
            bias = jnp.zeros((len(self.length), columns.size), jnp.float32)
            bias = bias.at[slots, columns.find(state.bias_tokens)].add(state.bias_values, **_DROP)
        marks = jnp.zeros((len(self.length), 0), jnp.int32)
        if self.asked & Constraints.PENALTIES:
            marks = token_marks(
                columns.find(self.history), state.prompt_length[:, 0], self.length + 1, size=columns.size
            )
        return ConstrainedRows(self, columns, bias, marks)

    def automata(self, drafts: jax.Array) -> jax.Array:
        """i32[n, K + 1], the states of the automata before each row of a block of drafts i32[n, K]."""
        states = [self.automaton]
        for i in range(drafts.shape[1]):
            states.append(advance(self.grammars, states[-1], drafts[:, i]))
        return jnp.stack(states, axis=1)

    def forced(self, drafts: jax.Array) -> jax.Array | None:
        """bool[n, K]: whether each draft is the only token that its grammar allows; None without grammars."""
        if not self.asked & Constraints.GRAMMAR:
            return None
        return only_token(self.grammars, self.automata(drafts)[:, :-1]) == drafts

    def follow(self, automaton: jax.Array, drafts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Drafts i32[n], the only allowed token where there is just one, and the states after them."""
        only = only_token(self.grammars, automaton)
        tokens = jnp.where(only < 0, drafts, only)
        return tokens, advance(self.grammars, automaton, tokens)

    def with_forced(self, drafts: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Drafts i32[n, K] and their numbers i32[n], where a grammar allows a single token with that one."""
        state, columns = self.automaton, []
        for i in range(drafts.shape[1]):
            is_forced = only_token(self.grammars, state) >= 0
            count = jnp.where(is_forced & (count == i), i + 1, count)
            tokens, state = self.follow(state, drafts[:, i])
            columns.append(tokens)
        return jnp.stack(columns, axis=1), count

    def after(self, drafts: jax.Array, tokens: jax.Array, count: jax.Array) -> jax.Array:
        """i32[n], the states of the automata after the first `count` of i32[n, K + 1] tokens.

        Args:
          drafts: i32[n, K], which the tokens are, except for the last one that counts.
        """
        last = jnp.maximum(count - 1, 0)
        state = advance(self.grammars, row_at(self.automata(drafts), last), row_at(tokens, last))
        return jnp.where(count > 0, state, self.automaton)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ConstrainedRows:
    """What all rows of a block share; made by `Constrained.over`.

    Attributes:
      text: the slots.
      columns: the W columns.
      bias: f32[n, W], what is added; [n, 0] if nothing is.
      marks: i32[n, W], see `token_marks`; [n, 0] without penalties.
    """

    text: Constrained
    columns: Columns
    bias: jax.Array
    marks: jax.Array

    def apply(
        self,
        logits: jax.Array,
        drafts: jax.Array,
        first: jax.Array | int = 0,
        *,
        is_draft: bool = False,
        automata: jax.Array | None = None,
    ) -> jax.Array:
        """Changes rows `first` to `first + R - 1` of the block.

        Args:
          logits: f32[n, R, W]; row j is for the token after drafts 0 to j - 1.
          drafts: i32[n, K], ids of the target's vocabulary; those that no row sees may be anything.
          is_draft: whether drafts are to be drawn from the rows. Then banned tokens are as good as
            impossible, unless all are.
          automata: i32[n, R], the states of grammars before the rows; None if these are all of the block.

        Returns:
          f32[n, R, W]. Unless `is_draft`, banned tokens are -inf.
        """
        asked = self.text.asked
        row = jnp.asarray(first, jnp.int32) + jnp.arange(logits.shape[1], dtype=jnp.int32)
        if asked & Constraints.TOKENS:
            logits += self.bias[:, None]
        if asked & Constraints.PENALTIES:
            logits = self._penalise(logits, drafts, row)
        bans = list(self._bans(drafts, row))
        if bans:
            columns = jnp.concatenate(
                [
                    jnp.where(is_banned, self.columns.find(tokens), self.columns.size)
                    for tokens, is_banned in bans
                ],
                axis=-1,
            )
            slot, index = jnp.arange(logits.shape[0])[:, None, None], jnp.arange(logits.shape[1])[:, None]
            banned = _UNLIKELY if is_draft else -jnp.inf
            logits = logits.at[slot, index, columns].set(banned, **_DROP)
        if asked & Constraints.GRAMMAR:
            state = self.text.automata(drafts) if automata is None else automata
            grammars, tokens = self.text.grammars, self.columns.tokens
            may_come = (
                allowed_of(grammars, state, tokens)
                if tokens.size
                else allowed(grammars, state, self.columns.size)
            )
            logits = jnp.where(may_come, logits, _UNLIKELY if is_draft else -jnp.inf)
        return logits

    def follow(self, automaton: jax.Array, drafts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The next draft of each slot i32[n], the only allowed token where there is just one, and the state
        of its automaton after it."""
        if not self.text.asked & Constraints.GRAMMAR:
            return drafts, automaton
        return self.text.follow(automaton, drafts)

    def _penalise(self, logits: jax.Array, drafts: jax.Array, row: jax.Array) -> jax.Array:
        state, penalties = self.text.state, ("repetition", "frequency", "presence")
        return penalise(
            logits,
            self.marks,
            self.columns.find(drafts),
            jnp.minimum(row, drafts.shape[1]),
            *(getattr(state, f"{name}_penalty")[:, 0] for name in penalties),
        )

    def _bans(self, drafts: jax.Array, row: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """Tokens i32[n, R or 1, M], and whether they are banned bool[n, R, M]."""
        text, state, bans = self.text, self.text.state, []
        end = text.length[:, None] + row  # position of the last token that the row sees
        if text.asked & Constraints.TOKENS:
            has_few = end + 1 - state.prompt_length < state.min_tokens
            is_banned = (text.stop_tokens >= 0)[:, None] & has_few[..., None]
            bans.append((text.stop_tokens[:, None], is_banned))
        if not text.asked & Constraints.SEQUENCES:
            return bans
        tokens = _with_drafts(text, drafts)
        place = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        size = jnp.where(place <= end[..., None], state.no_repeat_ngram_size[..., None], 0)
        # The listed words, then the text; between them an id that no token has: there the text begins.
        gap = ((0, 0), (0, 1))
        words = jnp.pad(state.bad_words, gap, constant_values=-2)
        sizes = jnp.broadcast_to(jnp.pad(state.bad_word_sizes, gap)[:, None], (*end.shape, words.shape[1]))
        sequences = jnp.concatenate([words, tokens], axis=1)
        seen = end[..., None] - jnp.arange(MAX_SEQUENCE - 1)
        last = jnp.take_along_axis(tokens[:, None], jnp.maximum(seen, 0), axis=2)
        ends = _ends(sequences, jnp.where(seen >= 0, last, -1), jnp.concatenate([sizes, size], axis=-1))
        bans.append((sequences[:, None], ends))
        return bans


def _nothing(count: int) -> np.ndarray:
    """i32[n, 0]; NumPy's arrays leave no operation in a program."""
    return np.zeros((count, 0), np.int32)


def _ends(tokens: jax.Array, last: jax.Array, size: jax.Array) -> jax.Array:
    """Whether each token ends a sequence, in `tokens`, that the last tokens of a row begin: bool[n, R, M].

    Args:
      tokens: i32[n, M].
      last: i32[n, R, B], the last token of each row, the one before it, and so on; -1 before the first.
      size: i32[n, R, M], the sequence's size, at most B + 1; 0 if none ends here.
    """
    most, width = last.shape[-1], tokens.shape[1]
    before = jnp.pad(tokens, ((0, 0), (most, 0)), constant_values=-2)[:, None]
    ends = size > 0
    for back in range(1, most + 1):
        is_same = before[..., most - back :][..., :width] == last[..., back - 1 : back]
        ends &= is_same | (back >= size)
    return ends


def _with_drafts(text: Constrained, drafts: jax.Array) -> jax.Array:
    """The texts with the drafts behind them, i32[n, X + K]."""
    tokens = jnp.pad(text.history, ((0, 0), (0, drafts.shape[1])))
    place = text.length[:, None] + 1 + jnp.arange(drafts.shape[1])
    return tokens.at[jnp.arange(len(tokens))[:, None], place].set(drafts, **_DROP)
