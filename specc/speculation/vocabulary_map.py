"""A draft whose token ids mean other tokens than the target's: which ids stand for which.

Token-level intersection (arXiv:2502.05202, algorithm 4): the draft proposes tokens that both
vocabularies have, every other one has probability 0, and verification is that of any draft. Which
tokens the draft may propose, and what it reads, changes what is accepted, never what is put out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# constants of a draft's program: [V] i64 of the ids that are read; [V] i64 of logits, one more for
# each further draft id of the same token; [V] bool of target ids that are never proposed
INPUTS, OUTPUTS, LACKING = "vocabulary_inputs", "vocabulary_outputs", "vocabulary_lacking"


@dataclass(frozen=True)
class VocabularyMap:
    """Ids of the target, and what they are to a draft.

    Args:
        to_draft: target id → the draft id that is read in its place.
        from_draft: target id → draft ids that are the same token; target ids that are not here
            are never proposed. No draft id is there twice.
        num_target: tokens that the target's tokenizer has.
        num_unread: of these, those that the draft has no token for: `to_draft` has the nearest.
        unknown: the draft id of what is in no tokenizer: padded rows of the target.
    """

    to_draft: Mapping[int, int]
    from_draft: Mapping[int, tuple[int, ...]]
    num_target: int
    num_unread: int
    unknown: int

    @property
    def num_proposed(self) -> int:
        """Target ids that the draft can propose."""
        return len(self.from_draft)

    def inputs(self, num_ids: int, num_own: int) -> Tensor:
        """What the draft reads.

        Args:
            num_ids: V, rows of the target's vocabulary projection.
            num_own: rows of the draft's: ids from there on are read as `unknown`.
        Returns:
            [V] int64: target id → draft id.
        """
        unknown = self.unknown if self.unknown < num_own else 0
        owns = (self.to_draft.get(target, unknown) for target in range(num_ids))
        return torch.tensor([own if own < num_own else unknown for own in owns])

    def outputs(self, num_ids: int, num_own: int) -> tuple[Tensor, Tensor]:
        """Whose logits a target id has: the largest of its draft ids.

        Args:
            num_ids: V.
            num_own: rows of the draft's vocabulary projection.
        Returns:
            [k, V] int64 draft ids, all of a target id, the first one again where it has fewer than
            k, and 0 where it has none; and [V] bool: whether it has any.
        """
        found = [
            [own for own in self.from_draft.get(target, ()) if own < num_own]
            for target in range(num_ids)
        ]
        most = max(1, *map(len, found))
        rows = [owns + (owns[:1] or [0]) * (most - len(owns)) for owns in found]
        return torch.tensor(rows).T.contiguous(), torch.tensor([bool(owns) for owns in found])
