"""Groups and links of a rank that has a GPU, where the target has stages.

Each is a communicator of its own: of the ranks of a stage, for sums and logits that are cut, and of
the two ends of a link. A link is a broadcast between these two: it is queued on the current stream
and captured with it like the collectives of a group, where sends of torch run on a stream of their
own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from specc.kernels.reference.ranks import LockstepGroup, Ranks, use_links
from specc.runtime.ranks.nccl_group import CLOSE_S, NcclRankGroup, in_background
from specc.runtime.ranks.stage_groups import StagePlace

# torch's backend object of a name, for this rank of so many
Make = Callable[[str, int, int], Any]


class NcclStage(NcclRankGroup):
    """The ranks of one stage; collectives of programs come to it through `NcclStages`."""

    is_of_programs: ClassVar[bool] = False


class NcclLink(NcclStage):
    """Two ranks, of which the first gives and the other takes."""

    def _warm_up(self, device: torch.device) -> None:
        """See `NcclRankGroup`: nothing else is ever done over it."""
        self._send(torch.zeros(1, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class NcclStages(NcclRankGroup):
    """All ranks of an engine whose target has stages, as one of them; see `join_stages`.

    What rank 0 gives goes to all ranks; sums, and logits that are cut, are those of a stage.

    Args:
        processes: torch's backend object of all ranks.
        parts: groups and links of this rank, see `StagePlace.members`.
    """

    def __init__(
        self,
        place: StagePlace,
        ticket: str,
        processes: Any,
        parts: Mapping[str, NcclStage],
        device: torch.device,
    ) -> None:
        self._parts = parts
        stages = [part for part in parts.values() if not isinstance(part, NcclLink)]
        # a stage of one rank has nothing to add up
        self._stage: Ranks = stages[0] if stages else LockstepGroup(1)
        super().__init__(place.rank, place.tensor * place.stages, ticket, processes, device)
        use_links(self)

    def over_link(self, x: Tensor, link: str) -> Tensor:
        """See `Links`."""
        return self._parts[link].from_first([x])[0]

    def all_reduce(self, xs: Sequence[Tensor]) -> list[Tensor]:
        return self._stage.all_reduce(xs)

    def gather_rows(self, xs: Sequence[Tensor]) -> list[Tensor]:
        return self._stage.gather_rows(xs)

    def best_of_ranks(self, scores: Sequence[Tensor], tokens: Sequence[Tensor]) -> list[Tensor]:
        return self._stage.best_of_ranks(scores, tokens)

    def abort(self, reason: str) -> None:
        """See `RankGroup.abort`; of all groups and links of this rank."""
        super().abort(reason)
        for part in self._parts.values():
            part.abort(reason)

    def close(self) -> None:
        """See `NcclRankGroup.close`; all are left at the same time."""
        use_links(None)
        _together([*(part.close for part in self._parts.values()), super().close])


def join_stages(
    place: StagePlace, ticket: str, processes: Any, make: Make, device: torch.device
) -> NcclStages:
    """Open the groups and links of a rank; every rank goes through them in one order.

    Args:
        processes: torch's backend object of that.
    """
    parts: dict[str, NcclStage] = {}
    try:
        for name, ranks in place.own():
            rank, count = ranks.index(place.rank), len(ranks)
            kind = NcclStage if name.startswith("stage") else NcclLink
            parts[name] = kind(rank, count, "", make(name, rank, count), device)
        return NcclStages(place, ticket, processes, parts, device)
    except BaseException:
        _together([part.close for part in parts.values()])
        raise


def _together(calls: Sequence[Callable[[], None]]) -> None:
    """Make all calls, each of which may wait a while for the same thing."""
    threads = [in_background(call) for call in calls]
    end_s = time.monotonic() + 2 * CLOSE_S
    for thread in threads:
        thread.join(max(end_s - time.monotonic(), 0.0))
