"""Links between two ranks: both sides are threads here, each with its own end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from specc.errors import RankError
from specc.kernels import ranks
from specc.runtime.ranks.group import SLOT_BYTES
from specc.runtime.ranks.links import Link
from specc.system.huge_pages import zeroed_slab

pytestmark = pytest.mark.usefixtures("native_operators")


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    sender = Link.create(20.0)
    receiver = Link.open(sender.ticket)
    yield sender, receiver
    for end in (sender, receiver):
        end.close()


class Sending(threading.Thread):
    """Sends values one after the other; keeps what that raises."""

    def __init__(self, link: Link, values: list[Tensor]) -> None:
        super().__init__(daemon=True)
        self._link, self._values = link, values
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for value in self._values:
                self._link.send(value)
        except RankError as error:
            self.error = error

    def end(self) -> None:
        self.join(30.0)
        assert not self.is_alive()


def test_values_come_in_their_order(ends: tuple[Link, Link]) -> None:
    """Of every dtype that crosses, none at all, and more than a slot holds."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(1, 3, 16), (0, 8), (5,), (1, 70001), (3, 1 + SLOT_BYTES // 4), (2, 2)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    values += [torch.randn(2, 9, generator=generator).to(t) for t in (torch.bfloat16, torch.half)]
    values += [torch.arange(11), torch.randn(4, 6, generator=generator).t()]
    sending = Sending(ends[0], values)
    for value in values:
        found = ends[1].receive(value.shape, value.dtype)
        assert found.dtype == value.dtype
        assert torch.equal(found, value)
    sending.end()
    assert sending.error is None


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 3), torch.float32), ((6,), torch.float32), ((3, 2), torch.int64)]
)
def test_what_the_other_side_does_not_expect_is_refused(
    ends: tuple[Link, Link], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    sending = Sending(ends[0], [torch.zeros(3, 2)])
    with pytest.raises(RankError, match="the same collective on every rank"):
        ends[1].receive(shape, dtype)
    sending.end()
    assert sending.error is not None


def test_an_abort_ends_a_wait(ends: tuple[Link, Link]) -> None:
    begin_s = time.monotonic()
    threading.Timer(0.2, ends[0].abort, ["rank 1 is gone"]).start()
    with pytest.raises(RankError, match="rank 1 is gone"):
        ends[1].receive((2,), torch.float32)
    assert time.monotonic() - begin_s < 5


def test_an_abort_of_a_link_that_another_thread_closes(ends: tuple[Link, Link]) -> None:
    """A job that ends has more to do than this: its other ranks are killed after it."""
    sender, _ = ends
    ranks.close_link(sender._number)
    sender.abort("rank 1 is gone")
    with pytest.raises(RankError, match="which is closed"):
        sender.send(torch.zeros(1))


def test_a_side_that_closes_fails_the_other(ends: tuple[Link, Link]) -> None:
    threading.Timer(0.2, ends[0].close).start()
    with pytest.raises(RankError, match="has closed the group"):
        ends[1].receive((2,), torch.float32)


def test_nobody_within_the_time_limit() -> None:
    sender = Link.create(0.3)
    receiver = Link.open(sender.ticket)
    try:
        with pytest.raises(RankError, match="every rank within the time limit"):
            receiver.receive((2,), torch.float32)
    finally:
        for end in (sender, receiver):
            end.close()


@pytest.mark.parametrize("operators", ["specc", "specc_cpu"])
def test_rows_of_no_layer_can_be_kept(operators: str) -> None:
    """A stage without a layer of some geometry has an empty slab, which steps commit, too."""
    slab = zeroed_slab((0, 2, 4, 16, 2, 8), torch.float32, torch.device("cpu"))
    source = torch.tensor([[17, 19]], dtype=torch.int32)
    target = torch.tensor([[17, 18]], dtype=torch.int32)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    getattr(torch.ops, operators).commit_kv(slab, source, target, table)
    assert slab.shape[0] == 0
