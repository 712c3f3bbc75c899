"""Which of the target's tokens a drafter can draft."""

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftVocabulary:
    """The part of the target's vocabulary that can be drafted.

    Attributes:
      target_ids: i32[Vd], the target id of each draft id.
      draft_ids: i32[V], its inverse; -1 for ids that are never drafted.
    """

    target_ids: jax.Array
    draft_ids: jax.Array
