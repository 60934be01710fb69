"""A rank's part of a pass of a target in stages, where steps are captured.

All of it is queued on the device, inside of graphs as well as outside: what the stage before hands
on, the stage's own program, and what it hands on. Rank 0 takes the logits of the last stage; a
pass of which nobody wants logits gives none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specc.artifact.manifest import Manifest
from specc.artifact.manifest_entries import StageEntry
from specc.runtime.ranks.rank_group import RankGroup, whole_logits
from specc.runtime.ranks.stage_groups import RESULTS, StagePlace, link_name, place_of

# of the inputs of a pass: `tokens` [Nt] and `logit_rows` [R]
_TOKENS, _ROWS = 0, 7


class DeviceStages:
    """What a rank does in each pass of the target; what a pass reads is on its device.

    Args:
        vocab_size: V of the target.
        group: of this rank, whose links are open.
    """

    def __init__(
        self, place: StagePlace, stages: Sequence[StageEntry], vocab_size: int, group: RankGroup
    ) -> None:
        self._place, self._stages = place, stages
        self._vocab_size, self._group = vocab_size, group

    @classmethod
    def of(cls, manifest: Manifest, rank: int, group: RankGroup) -> DeviceStages | None:
        """That of a rank of an engine; None where its target has no stages."""
        place = place_of(manifest, rank)
        vocab_size = manifest.models[0].vocab_size
        return None if place is None else cls(place, manifest.stages, vocab_size, group)

    def lead(self, run: Callable[..., Tensor], inputs: Sequence[Tensor | None]) -> Tensor:
        """The part of rank 0.

        Returns:
            [R, V] logits of the last stage.
        """
        hidden = run(*inputs)
        _hand_on(hidden, self._place.rank, self._place.rank + self._place.tensor)
        shape = (_length(inputs[_ROWS]), self._vocab_size)
        dtype = getattr(torch, self._stages[-1].dtype)
        logits = torch.empty(shape, dtype=dtype, device=hidden.device)
        return torch.ops.specc.over_link(logits, RESULTS) if shape[0] else logits

    def follow(self, run: Callable[..., Tensor], inputs: Sequence[Tensor | None]) -> None:
        """The part of a rank that follows; arguments as of `lead`."""
        place, given = self._place, {}
        if place.stage > 0:
            before = self._stages[place.stage - 1]
            tokens = inputs[_TOKENS]
            assert tokens is not None
            shape = tuple(len(tokens) if size is None else size for size in before.shape)
            hidden = torch.empty(shape, dtype=getattr(torch, before.dtype), device=tokens.device)
            given["hidden"] = _hand_on(hidden, place.rank - place.tensor, place.rank)
        found = run(*inputs, **given)
        if not place.is_last:
            _hand_on(found, place.rank, place.rank + place.tensor)
            return
        logits = whole_logits(self._group, found, self._vocab_size)
        if place.gives_results and _length(inputs[_ROWS]):
            torch.ops.specc.over_link(logits, RESULTS)


def _hand_on(hidden: Tensor, giver: int, taker: int) -> Tensor:
    """What the giver has; both call it."""
    return torch.ops.specc.over_link(hidden, link_name(giver, taker))


def _length(rows: Tensor | None) -> int:
    assert rows is not None
    return len(rows)
