"""Groups and links of a rank with a GPU: who is in which, and that all are left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specc.artifact.manifest_entries import MemoryEntry, StageEntry
from specc.errors import RankError
from specc.kernels.reference import ranks
from specc.runtime.ranks.device_stages import DeviceStages
from specc.runtime.ranks.nccl_stages import NcclStages, join_stages
from specc.runtime.ranks.stage_groups import RESULTS, StagePlace
from tests.runtime.ranks.test_orders import INPUTS

CPU = torch.device("cpu")


class Processes:
    """Torch's backend object of a group or link, which notes what is done over it."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.done: list[str] = []
        # what was sent last
        self.last: torch.Tensor | None = None
        self.num_aborts = 0

    def allreduce(self, tensors: list[torch.Tensor], *_: Any) -> None:
        self.done.append("sum")
        tensors[0].mul_(self.size)

    def broadcast(self, tensors: list[torch.Tensor], *_: Any) -> None:
        self.done.append("message")
        self.last = tensors[0]
        if self.rank > 0:
            tensors[0].fill_(7)

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, *_: Any) -> None:
        self.done.append("gathering")
        out.copy_(x.flatten().repeat(self.size).view(out.shape))

    def abort(self) -> None:
        self.num_aborts += 1


class Made:
    """A rank, and the backend objects that it has."""

    def __init__(self, place: StagePlace) -> None:
        self.all: dict[str, Processes] = {}
        world = self.all["all"] = Processes("all", place.rank, place.tensor * place.stages)
        self.group: NcclStages = join_stages(place, "ticket", world, self.make, CPU)
        for one in self.all.values():
            one.done.clear()

    def make(self, name: str, rank: int, size: int) -> Processes:
        return self.all.setdefault(name, Processes(name, rank, size))


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    yield
    ranks.use_group(None)
    ranks.use_links(None)


def test_each_value_goes_where_it_belongs() -> None:
    """Of the second rank of the middle stage: 3 stages of 2."""
    made = Made(StagePlace(3, 2, 3))
    found = {name: (one.rank, one.size) for name, one in made.all.items()}
    assert found == {
        "all": (3, 6), "stage 1": (1, 2), "link 1 to 3": (1, 2), "link 3 to 5": (0, 2),
    }  # fmt: skip
    x = torch.ones(2, 3)
    assert torch.ops.specc.over_link(x, "link 1 to 3").tolist() == (7 * x).tolist()
    assert torch.ops.specc.over_link(x, "link 3 to 5").tolist() == x.tolist()
    assert torch.ops.specc.from_first(x).tolist() == (7 * x).tolist()
    assert torch.ops.specc.all_reduce(x).tolist() == (2 * x).tolist()
    # what is gathered is for the first rank of a stage, which may be none of the engine
    assert torch.ops.specc.gather_rows(x).shape == (2, 0)
    assert {name: one.done for name, one in made.all.items()} == {
        "all": ["message"],
        "stage 1": ["sum", "gathering"],
        "link 1 to 3": ["message"],
        "link 3 to 5": ["message"],
    }
    assert x.tolist() == torch.ones(2, 3).tolist()
    made.group.close()
    last = Made(StagePlace(4, 2, 3))
    assert torch.ops.specc.gather_rows(x).shape == (2, 6)
    last.group.close()


def test_a_stage_of_one_rank_adds_nothing_up() -> None:
    made = Made(StagePlace(0, 1, 2))
    assert set(made.all) == {"all", "link 0 to 1", RESULTS}
    x = torch.ones(2, 3)
    assert torch.equal(torch.ops.specc.all_reduce(x), x)
    assert torch.equal(torch.ops.specc.gather_rows(x), x)
    assert all(not one.done for one in made.all.values())
    made.group.close()


def test_a_stage_in_the_middle_takes_and_gives() -> None:
    made = Made(StagePlace(1, 1, 3))
    memory = MemoryEntry(1, 1, 1, 1)
    entries = [StageEntry((i,), "bfloat16", (1, None, 4), memory) for i in range(3)]
    stages = DeviceStages(StagePlace(1, 1, 3), entries, 11, made.group)
    given: list[torch.Tensor] = []

    def run(*inputs: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
        assert inputs == INPUTS
        given.append(hidden)
        return hidden + 1

    stages.follow(run, INPUTS)
    (hidden,) = given
    assert (hidden.shape, hidden.dtype) == ((1, len(INPUTS[0]), 4), torch.bfloat16)
    assert hidden.unique().tolist() == [7]
    assert made.all["link 1 to 2"].last is not None
    assert made.all["link 1 to 2"].last.unique().tolist() == [8]
    assert {name: one.done for name, one in made.all.items()} == {
        "all": [], "link 0 to 1": ["message"], "link 1 to 2": ["message"],
    }  # fmt: skip
    made.group.close()


def test_the_last_stage_gives_logits_that_somebody_wants() -> None:
    made = Made(StagePlace(1, 1, 2))
    memory = MemoryEntry(1, 1, 1, 1)
    entries = [StageEntry((i,), "float32", (1, None, 4), memory) for i in range(2)]
    stages = DeviceStages(StagePlace(1, 1, 2), entries, 11, made.group)
    for rows, wanted in ((INPUTS[7], ["message"]), (INPUTS[7][:0], [])):
        inputs = (*INPUTS[:7], rows)
        stages.follow(lambda *inputs, hidden: torch.zeros(len(inputs[7]), 11), inputs)
        assert made.all[RESULTS].done == wanted
        made.all[RESULTS].done.clear()
    made.group.close()


def test_all_are_left() -> None:
    made = Made(StagePlace(1, 2, 2))
    made.group.abort("a rank is lost")
    made.group.close()
    assert {one.num_aborts for one in made.all.values()} == {2}
    assert not [x for x in threading.enumerate() if x.name == "specc-nccl-abort"]
    assert not ranks.has_group()
    with pytest.raises(RankError, match="a process that has no links"):
        torch.ops.specc.over_link(torch.ones(1), RESULTS)


def test_what_was_opened_before_another_one_fails_is_left() -> None:
    place = StagePlace(0, 2, 2)
    kept: dict[str, Processes] = {}
    whole = Processes("all", 0, 4)

    def make(name: str, rank: int, size: int) -> Processes:
        if name == RESULTS:
            raise RuntimeError("no NCCL")
        return kept.setdefault(name, Processes(name, rank, size))

    with pytest.raises(RuntimeError, match="no NCCL"):
        join_stages(place, "ticket", whole, make, CPU)
    assert {name: one.num_aborts for name, one in kept.items()} == {"stage 0": 1, "link 0 to 2": 1}
    assert not ranks.has_group()
