"""`specc::write_rows` and `specc::take_rows` in Triton against their oracles."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from specc.kernels.cuda.slab_rows import take_rows, write_rows
from specc.kernels.reference.slab_rows import take_rows_reference, write_rows_reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BLOCK_SIZE, PAGES, MARGIN = 4, 6, 2
FLOATS = [
    pytest.param(kind, id=str(kind).removeprefix("torch."))
    for kind in (torch.float32, torch.bfloat16, torch.float16)
]
# tokens of each sequence, columns
CASES = [
    pytest.param((3, 0, 1, 5), 5, id="few"),
    pytest.param((1,), 16, id="one"),
    pytest.param((20, 24, 0, 17, 20), 48, id="four-rows-of-a-program"),
    pytest.param((2, 3), 1100, id="two-pieces-of-a-row"),
]


class Given:
    """A slab between canaries, tables of it, and live and dead tokens; two of nobody.

    Args:
        counts: tokens of each sequence.
        per_token: slots of each token.
    """

    def __init__(
        self,
        counts: tuple[int, ...],
        width: int,
        per_token: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        chooser = random.Random(width + per_token)
        count = len(counts) * PAGES
        shape = (count + 2 * MARGIN, BLOCK_SIZE, width)
        self.memory = torch.randn(shape).to(dtype).to(device)
        self.slab = self.memory[MARGIN:-MARGIN]
        blocks = list(range(count))
        chooser.shuffle(blocks)
        self.table = torch.tensor(blocks, dtype=torch.int32, device=device).view(-1, PAGES)
        self.start = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        slots: list[list[int]] = []
        for tokens in counts:
            columns = [chooser.sample(range(BLOCK_SIZE * PAGES), tokens) for _ in range(per_token)]
            rows = [list(row) for row in zip(*columns, strict=True)]
            for row in rows[1::3]:
                row[0] = -1
            slots += rows
        slots += [[0] * per_token] * 2
        self.slots = torch.tensor(slots, dtype=torch.int32, device=device)
        self.start = self.start.to(device)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("counts", "width"), CASES)
def test_write_rows(counts, width, dtype, device: torch.device) -> None:
    given = Given(counts, width, 1, dtype, device)
    # a row's neighbours in memory belong to others
    x = torch.randn(len(given.slots), width + 3, device=device).to(dtype)[:, :width]
    wanted = given.memory.clone()
    rest = (given.start, given.slots[:, 0].contiguous(), given.table)
    write_rows_reference(x, wanted[MARGIN:-MARGIN], *rest)
    assert write_rows(x, given.slab, *rest) is None
    assert torch.equal(given.memory, wanted)


@pytest.mark.default(
    "few-1-float32",
    "few-1-bfloat16",
    "few-3-float32",
    "few-3-bfloat16",
    "one-1-bfloat16",
    "one-3-bfloat16",
    "four-rows-of-a-program-1-bfloat16",
    "four-rows-of-a-program-3-float32",
    "two-pieces-of-a-row-1-float32",
    "two-pieces-of-a-row-3-float32",
)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("per_token", [1, 3])
@pytest.mark.parametrize(("counts", "width"), CASES)
def test_take_rows(counts, width, per_token, dtype, device: torch.device) -> None:
    given = Given(counts, width, per_token, dtype, device)
    rest = (given.slots, given.start, given.table)
    assert torch.equal(take_rows(given.slab, *rest), take_rows_reference(given.slab, *rest))


def test_what_lies_outside_is_not_touched(device: torch.device) -> None:
    """Slots beyond a table, and blocks that the slab lacks: nothing is written, zeros are read."""
    given = Given((4, 2), 8, 1, torch.float32, device)
    given.table[0, 1], given.table[1, 0] = 2 * PAGES, -1
    slots = torch.tensor([BLOCK_SIZE * PAGES, 2**31 - 1, 5, 0, 1, 4], dtype=torch.int32)
    slots = torch.cat([slots.to(device), given.slots[-2:, 0]])
    before = given.memory.clone()
    x = torch.randn(8, 8, device=device)
    write_rows(x, given.slab, given.start, slots, given.table)
    own = given.table.tolist()
    before[MARGIN + own[0][0], 0], before[MARGIN + own[1][1], 0] = x[3], x[5]
    assert torch.equal(given.memory, before)
    found = take_rows(given.slab, slots[:, None], given.start, given.table)[:, 0]
    assert torch.equal(found[[3, 5]], x[[3, 5]])
    assert not found[[0, 1, 2, 4, 6, 7]].any()


def test_nothing_to_move(device: torch.device) -> None:
    given = Given((1,), 8, 1, torch.float32, device)
    before = given.memory.clone()
    start = torch.zeros(1, dtype=torch.int32, device=device)
    write_rows(torch.ones(3, 8, device=device), given.slab, start, given.slots[:, 0].contiguous(),
               given.table[:0])  # fmt: skip
    assert torch.equal(given.memory, before)
    assert not take_rows(given.slab, given.slots, start, given.table[:0]).any()
    assert take_rows(given.slab, given.slots[:, :0], given.start, given.table).shape == (3, 0, 8)


def _broken(place: int, change, found: str, name: str = "write_rows"):
    return pytest.param(name, place, change, found, id=f"{name}-{found}")


@pytest.mark.parametrize(
    ("name", "place", "change", "found"),
    [
        _broken(0, lambda x: x.half(), "x .* of torch.float16, .*slab .* of torch.float32"),
        _broken(0, lambda x: x[:, :3], r"x \[3, 3\]"),
        _broken(0, lambda x: x.t().contiguous().t(), "strides .* of x;"),
        _broken(1, lambda x: x[0], r"slab \[4, 8\]"),
        _broken(2, lambda x: x.long(), "q_start .* of torch.int64"),
        _broken(3, lambda x: x[:2], r"slots \[2\]"),
        _broken(4, lambda x: x[0], r"block_table \[6\]"),
        _broken(0, lambda x: x.double(), "torch.float64", "take_rows"),
        _broken(1, lambda x: x[:, 0], r"slots \[3\]", "take_rows"),
        _broken(1, lambda x: x.long(), "slots .* of torch.int64", "take_rows"),
        _broken(2, lambda x: x[:1], r"q_start \[1\]", "take_rows"),
    ],
)
def test_refuses(name, place, change, found, device: torch.device) -> None:
    given = Given((1,), 8, 1, torch.float32, device)
    x = torch.zeros(3, 8, device=device)
    arguments: dict[str, list[Tensor]] = {
        "write_rows": [x, given.slab, given.start, given.slots[:, 0].contiguous(), given.table],
        "take_rows": [given.slab, given.slots, given.start, given.table],
    }
    call = {"write_rows": write_rows, "take_rows": take_rows}[name]
    good = arguments[name]
    call(*good)
    good[place] = change(good[place])
    with pytest.raises(ValueError, match=f"{name}: found .*{found}.*needed"):
        call(*good)
