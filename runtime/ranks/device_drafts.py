"""Drafts of single ranks, where steps are captured: what rank 0 sends, and what it takes back.

A draft stage is taken apart as without devices (`draft_parts.py`). The values that parts read go
to all ranks in one message from device to device, and what they find comes back in one gathering:
both are nodes of the captured graphs. How large that is, ranks say when a step first runs, before
it is captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specc.runtime.ranks.answers import values_of
from specc.runtime.ranks.device_work import (
    DraftWork,
    PassWork,
    Spec,
    TakeWork,
    give,
    joined,
    num_bytes_of,
    parted,
)
from specc.runtime.ranks.led_device import DeviceLeader
from specc.runtime.ranks.orders import refused

# of what ranks find; a place in this list stands for one in a message
_DTYPES = (
    torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.uint8,
)  # fmt: skip
# a value of a part: a tensor on the device, or a size, which every run has alike
Found = Spec | int


class DeviceAsker:
    """Asks other ranks for their parts of a plan's drafts.

    Args:
        leader: orders the work.
        number: of the plan in the engine.
        names: of the inputs that they are given.
    """

    def __init__(
        self, leader: DeviceLeader, number: int, ranks: Sequence[int], names: Sequence[str]
    ) -> None:
        self._leader, self._number = leader, number
        self._ranks, self._names = ranks, names
        self._found: dict[DraftWork, list[list[Found]]] = {}

    def ask(self, *inputs: Tensor) -> DraftWork:
        """Let the others begin; returns what `take` is given."""
        work = DraftWork.of(self._number, self._names, inputs)
        with self._leader.doing(work) as order:
            give(inputs)
        if order is not None:
            answers = [self._leader.leader.answer(rank, order) for rank in self._ranks]
            self._found[work] = [found_of(values_of(answer)) for answer in answers]
        return work

    def take(self, work: DraftWork) -> list[Any]:
        """What all of them have found, rank by rank."""
        found = self._found[work]
        specs = [[item for item in one if not isinstance(item, int)] for one in found]
        size = max(map(num_bytes_of, specs))
        with self._leader.doing(TakeWork(size)):
            data = gathered(None, size, self._leader.device)
        values: list[Any] = []
        for rank, own, one in zip(self._ranks, specs, found, strict=True):
            tensors = iter(parted(data[rank], own))
            values += [item if isinstance(item, int) else next(tensors) for item in one]
        return values


class LonePass(nn.Module):
    """A draft that another rank has, as prompts and steps of rank 0 call it.

    Args:
        leader: orders the work.
        number: of the model, see `Manifest.ordered_programs`.
        home: its rank.
        vocab_size: columns of its logits.
    """

    def __init__(
        self,
        leader: DeviceLeader,
        number: int,
        name: str,
        home: int,
        vocab_size: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.name = name
        # they are the other rank's
        self.weights: dict[str, Tensor] = {}
        self._leader, self._number, self._home = leader, number, home
        self._vocab_size, self._dtype = vocab_size, dtype

    def forward(self, *inputs: Tensor | None) -> Tensor:
        """Inputs and result as of `ModelProgram.forward`.

        Raises:
            RankError: a rank is lost.
        """
        work, device = PassWork.of(inputs, self._number), self._leader.device
        with self._leader.doing(work):
            give(inputs)
            if work.rows == 0:
                return torch.empty(0, self._vocab_size, dtype=self._dtype, device=device)
            data = gathered(None, logit_bytes(work, self._vocab_size), device)
        logits = data[self._home].view(torch.float32).view(work.rows, self._vocab_size)
        return logits.to(self._dtype)


def gathered(values: Sequence[Tensor] | None, num_bytes: int, device: torch.device) -> Tensor:
    """[ranks, bytes] uint8 of what all ranks give, on rank 0; [ranks, 0] elsewhere.

    Args:
        values: that this rank gives, of so many bytes at most; None: it has none.
        num_bytes: that are sent for each.
    """
    own = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    if values:
        data = joined(values)
        own[: len(data)] = data
    return torch.ops.specc.gather_rows(own[None]).view(-1, num_bytes)


def logit_bytes(work: PassWork, vocab_size: int) -> int:
    """Of the logits of a pass as they are sent: in float32, which holds those of any type."""
    return num_bytes_of([(torch.float32, (work.rows, vocab_size))])


def described(values: Sequence[Tensor | int]) -> list[Tensor | int]:
    """Types and shapes of what a part has found, to be sent as values; see `found_of`."""
    return [
        torch.tensor([_DTYPES.index(value.dtype), *value.shape])
        if isinstance(value, Tensor)
        else int(value)
        for value in values
    ]


def found_of(values: Sequence[Any]) -> list[Found]:
    """What was `described`.

    Raises:
        FaultError: nothing was.
    """
    found: list[Found] = []
    for value in values:
        if isinstance(value, int):
            found.append(value)
            continue
        numbers = value.tolist() if value.dtype == torch.int64 and value.ndim == 1 else []
        if not numbers or min(numbers) < 0 or numbers[0] >= len(_DTYPES):
            raise refused(f"a value of a draft that is {numbers}")
        found.append((_DTYPES[numbers[0]], tuple(numbers[1:])))
    return found
