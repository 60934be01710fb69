"""Work of devices: sizes go as numbers, values from device to device, each where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from specc.errors import ConfigError, FaultError
from specc.kernels.cuda.launch import even_tokens
from specc.kernels.reference.ranks import LockstepGroup, use_group
from specc.runtime.backends.cuda.graphs import choose_gpu
from specc.runtime.ranks.answers import values_message, values_of
from specc.runtime.ranks.device_drafts import described, found_of
from specc.runtime.ranks.device_work import (
    CommitWork,
    DraftWork,
    PassWork,
    TakeWork,
    give,
    joined,
    num_bytes_of,
    parted,
    table_of,
    take,
    works_of,
)
from specc.runtime.ranks.draft_parts import SENT
from specc.runtime.ranks.orders import MOST_BYTES, encode
from tests.runtime.ranks.test_orders import INPUTS, received, same

PASS = PassWork(4, 2, 1, 3, 2, False)
CAUSAL = PassWork(7, 1, -1, 3, 0, True)
VOTES = PASS._replace(votes=3, columns=5)
MASS = torch.arange(15.0).view(3, 5)
COMMIT = CommitWork(2, 3, 5)
DRAFT, TAKE = DraftWork(3, 2, 4, 5, 6, 7), TakeWork(64)


@pytest.fixture
def sent() -> Iterator[Callable[[], torch.Tensor]]:
    """A group of rank 0 alone whose last message is what the next `take` gets."""
    kept: list[torch.Tensor] = []

    class Wire(LockstepGroup):
        def from_first(self, xs):
            if not kept:
                kept.append(xs[0].clone())
                return [xs[0].clone()]
            # who takes says with its own how much it expects
            assert xs[0].shape == kept[0].shape
            return [kept.pop()]

    use_group(Wire(1))
    yield lambda: kept[0]
    use_group(None)


def test_sizes_are_those_of_the_inputs() -> None:
    assert PassWork.of(INPUTS) == PASS
    with even_tokens():
        causal = [*INPUTS[:5], None, *INPUTS[6:]]
        assert PassWork.of(causal) == PASS._replace(words=-1, is_even=True)
    assert PassWork.of((*INPUTS, MASS)) == VOTES


def test_a_table_says_what_is_to_be_done() -> None:
    works = [PASS, CAUSAL, COMMIT, VOTES, DRAFT, TAKE, PASS]
    assert works_of(table_of(works)) == works
    assert [type(work) for work in works_of(table_of(works))] == [*map(type, works)]


@pytest.mark.parametrize("has_ancestors", [True, False])
@pytest.mark.parametrize("more", [(), (MASS,)], ids=["no votes", "votes"])
def test_values_arrive_where_they_belong(sent, has_ancestors: bool, more: tuple) -> None:
    inputs = [None if i == 5 and not has_ancestors else x for i, x in enumerate(INPUTS)]
    inputs += more
    give(inputs)
    assert sent().dtype == torch.uint8
    found = take(PassWork.of(inputs).specs, torch.device("cpu"))
    assert len(found) == len(inputs)
    assert all(map(same, found, inputs)), found
    # Triton compiles other code for pointers that are not aligned
    begin = next(x for x in found if x is not None).data_ptr()
    assert all((x.data_ptr() - begin) % 16 == 0 for x in found if x is not None)


def test_what_lies_apart_in_memory_arrives(sent) -> None:
    table = torch.arange(12, dtype=torch.int32).view(3, 4).T
    rows = torch.arange(6, dtype=torch.int32).expand(4, 6)[:, ::2]
    give((rows, rows + 1, table))
    found = take(CommitWork(4, 3, 3).specs, torch.device("cpu"))
    assert all(map(same, found, (rows, rows + 1, table)))


def test_what_drafts_are_given_arrives(sent) -> None:
    """What is not sent has no width."""
    shapes = {"last_tokens": (2, 4), "block_table": (2, 5), "sampling_words": (2, 7)}
    inputs = {name: torch.ones(shapes[name]).to(SENT[name][0]) * i for i, name in enumerate(shapes)}
    inputs["cache_len"] = torch.tensor([8, 9], dtype=torch.int32)
    names = sorted(inputs)
    work = DraftWork.of(3, names, [inputs[name] for name in names])
    assert work == DRAFT._replace(values=0)
    give([inputs[name] for name in names])
    found = take(work.specs_of(names), torch.device("cpu"))
    assert all(map(same, found, (inputs[name] for name in names)))


def test_what_drafts_have_found_arrives() -> None:
    """Tensors of any type, side by side with sizes, which go ahead."""
    values = [torch.arange(6).view(2, 3), 7, torch.randn(3).bfloat16(), torch.tensor([True])]
    message = received(encode(values_message(described(values), 5)))
    specs = found_of(values_of(message))
    assert specs == [
        (torch.int64, (2, 3)), 7, (torch.bfloat16, (3,)), (torch.bool, (1,)),
    ]  # fmt: skip
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    own = [spec for spec in specs if not isinstance(spec, int)]
    data = joined(tensors)
    assert len(data) == num_bytes_of(own)
    assert all(map(same, parted(data, own), tensors))
    for wrong in ([torch.tensor([99, 1])], [torch.tensor([0, -1])], [torch.ones(1)]):
        with pytest.raises(FaultError):
            found_of(wrong)


def changed(row: int, column: int, value: int) -> torch.Tensor:
    table = table_of([PASS, COMMIT, VOTES, DRAFT, TAKE])
    table[row, column] = value
    return table


@pytest.mark.parametrize(
    "table",
    [
        None,
        torch.zeros(1, 8, dtype=torch.int32),
        torch.zeros(8, dtype=torch.int64),
        torch.ones(1, 9, dtype=torch.int64),
        changed(0, 0, 4),
        *(changed(0, column, 0) for column in (1, 2, 3, 4)),
        changed(0, 3, -2),
        changed(0, 5, -1),
        changed(0, 6, 2),
        changed(0, 7, -1),
        changed(0, 1, MOST_BYTES),
        changed(0, 4, 1 << 62),
        *(changed(1, column, 0) for column in (1, 2, 3)),
        changed(1, 4, -1),
        changed(1, 5, 1),
        # fewer rows of votes than sequences, and none of which there are columns
        changed(2, 8, 1),
        *(changed(2, column, 0) for column in (8, 9)),
        *(changed(3, column, -1) for column in (1, 3, 4, 5, 6)),
        changed(3, 2, 0),
        changed(3, 7, 1),
        changed(3, 4, MOST_BYTES),
        changed(4, 1, 0),
        changed(4, 2, 1),
    ],
    ids=lambda table: "none" if table is None else None,
)
def test_tables_of_nothing_that_can_be_are_refused(table: torch.Tensor | None) -> None:
    with pytest.raises(FaultError):
        works_of(table)


def test_each_rank_of_a_machine_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    choose_gpu(1, 2)
    assert taken == [1]
    with pytest.raises(ConfigError) as error:
        choose_gpu(0, 4)
    assert error.value.found == "4 ranks on this machine, and 2 GPUs"
    assert "--tensor-parallel-size" in error.value.do
    assert taken == [1], "nothing is chosen where there are too few"
