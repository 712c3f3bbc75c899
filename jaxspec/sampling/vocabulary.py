"""The part of the target's vocabulary that a drafter uses."""

from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftVocabulary:
    """The mapping between a drafter's smaller vocabulary and the target's.

    Attributes:
      target_ids: i32[Vd], the target id of each draft id.
      draft_ids: i32[V], the inverse; -1 for target ids that are never drafted.
    """

    target_ids: jax.Array
    draft_ids: jax.Array
