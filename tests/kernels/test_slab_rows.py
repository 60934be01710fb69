"""`specc::write_rows` and `specc::take_rows` against single rows copied by (block, row)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("poisoned_memory")

WIDTH, CAPACITY = 5, 24
DEAD = -1
LAYOUTS = [pytest.param(size, id=f"block{size}") for size in (1, 4, 16)] + [
    pytest.param(CAPACITY, id="dense")
]
DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
# slots of the tokens of each sequence; the second has none
SLOTS = [[0, 1, 2, 3], [], [DEAD, 7, DEAD, 9, 8], [23], [DEAD, DEAD]]


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Pages:
    """A slab whose rows all differ, between other memory, and a shuffled table of its blocks.

    Args:
        batch: sequences.
    """

    def __init__(self, batch: int, block_size: int, dtype: torch.dtype = torch.float32) -> None:
        self.block_size = block_size
        columns = -(-CAPACITY // block_size)
        count = batch * columns + 2
        # what lies beside the slab is to stay, too; integers up to 256 are exact in bfloat16
        self.memory = (torch.arange((count + 2) * block_size * (WIDTH + 3)) % 251).to(dtype)
        self.memory = self.memory.view(count + 2, block_size, WIDTH + 3)
        self.slab = self.memory[1:-1, :, 1 : WIDTH + 1]
        order = list(range(count))
        random.Random(5).shuffle(order)
        self.table = int32(order[: batch * columns]).view(batch, columns)

    def place(self, sequence: int, slot: int) -> tuple[int, int]:
        return int(self.table[sequence, slot // self.block_size]), slot % self.block_size


def starts(tokens: list[list[Any]]) -> Tensor:
    return int32([0, *itertools.accumulate(map(len, tokens))])


def is_unchanged(call: Callable[[], Any], *tensors: Tensor) -> Any:
    """What a call returns; it leaves these as they are."""
    copies = [x.clone() for x in tensors]
    result = call()
    assert all(map(torch.equal, tensors, copies))
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", LAYOUTS)
def test_rows_are_written_to_their_slots(implementation, block_size, dtype):
    """Dead tokens write nothing, nor do the two that no sequence owns."""
    pages = Pages(len(SLOTS), block_size, dtype)
    flat = [*itertools.chain(*SLOTS), 3, 4]
    # a row's neighbours in memory belong to others
    x = (torch.arange(len(flat) * (WIDTH + 2)) % 83 + 0.5).to(dtype).view(len(flat), WIDTH + 2)
    x = x[:, :WIDTH]
    wanted = pages.memory.clone()
    token = 0
    for sequence, slots in enumerate(SLOTS):
        for slot in slots:
            if slot != DEAD:
                block, row = pages.place(sequence, slot)
                wanted[block + 1, row, 1 : WIDTH + 1] = x[token]
            token += 1
    # a block that a sequence does not use may be anything
    pages.table[1] = -7
    given = (starts(SLOTS), int32(flat), pages.table)
    slab = pages.slab
    if implementation is torch.ops.specc_reference:
        slab = slab.contiguous()
    call = implementation.write_rows.default
    assert is_unchanged(lambda: call(x, slab, *given), x, *given) is None
    pages.slab.copy_(slab)
    assert torch.equal(pages.memory, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", LAYOUTS)
@pytest.mark.parametrize("count", [1, 3])
def test_rows_are_taken_from_their_slots(implementation, block_size, count, dtype):
    """A slot of -1 gives zeros, and so does what no sequence owns."""
    pages = Pages(len(SLOTS), block_size, dtype)
    chooser = random.Random(count)
    read = [
        [[slot, *(chooser.randrange(-1, CAPACITY) for _ in range(count - 1))] for slot in slots]
        for slots in SLOTS
    ]
    flat = [*itertools.chain(*read), [2] * count, [3] * count]
    wanted = torch.zeros(len(flat), count, WIDTH, dtype=dtype)
    token = 0
    for sequence, slots in enumerate(read):
        for own in slots:
            for place, slot in enumerate(own):
                if slot != DEAD:
                    block, row = pages.place(sequence, slot)
                    wanted[token, place] = pages.slab[block, row]
            token += 1
    pages.table[1] = -7
    given = (int32(flat), starts(SLOTS), pages.table)
    slab = pages.slab
    if implementation is torch.ops.specc_reference:
        slab = slab.contiguous()
    call = implementation.take_rows.default
    found = is_unchanged(lambda: call(slab, *given), slab, *given)
    assert torch.equal(found, wanted)


def test_what_is_written_is_taken(implementation):
    """Rows of two prompts that share their first block: the second reads what the first wrote."""
    slab, x = torch.zeros(4, 4, WIDTH), torch.randn(6, WIDTH)
    table = int32([[2, 1], [2, 3]])
    slots = int32([0, 1, 2, 3, 4, 4])
    implementation.write_rows.default(x, slab, int32([0, 5, 6]), slots, table)
    read = int32([[0], [3], [4], [1], [4]])
    found = implementation.take_rows.default(slab, read, int32([0, 3, 5]), table)
    assert torch.equal(found[:, 0], x[[0, 3, 4, 1, 5]])


def test_no_tokens_and_no_sequences(implementation):
    slab, none = torch.ones(2, 4, WIDTH), torch.zeros(0, dtype=torch.int32)
    for table in (int32([[0]]), torch.zeros(0, 3, dtype=torch.int32)):
        start = torch.zeros(len(table) + 1, dtype=torch.int32)
        implementation.write_rows.default(torch.zeros(0, WIDTH), slab, start, none, table)
        found = implementation.take_rows.default(slab, none.view(0, 2), start, table)
        assert found.shape == (0, 2, WIDTH)
    assert (slab == 1).all()


def good_calls() -> dict[str, tuple[Tensor, ...]]:
    """Good arguments; of the two sequences the second has one block."""
    slab, start, table = torch.zeros(6, 4, WIDTH), int32([0, 2, 3]), int32([[3, 5], [1, -1]])
    return {
        "write_rows": (torch.ones(3, WIDTH), slab, start, int32([4, 7, 2]), table),
        "take_rows": (slab, int32([[4], [7], [2]]), start, table),
    }


@pytest.mark.parametrize("name", ["write_rows", "take_rows"])
@pytest.mark.parametrize(
    ("place", "index", "value", "message"),
    [
        ("slot", 1, 8, r"slot\[1\] = 8 of sequence 0, needed 0 … 7: it has 2 blocks of 4 rows"),
        ("slot", 2, 2**31 - 1, r"slot\[2\] = 2147483647 of sequence 1"),
        ("slot", 2, 4, r"block_table\[1\]\[1\] = -1, needed 0 … 5: the cache has 6 blocks"),
        ("table", (0, 1), 6, r"block_table\[0\]\[1\] = 6, needed 0 … 5"),
        ("start", 0, 1, r"q_start\[0\] = 1, needed 0"),
        ("start", 1, 4, r"q_start\[1\] = 4, needed 0 … 3: it ascends"),
        ("start", 2, 1, r"q_start\[2\] = 1, needed 2 … 3"),
    ],
)
def test_native_rows_stay_inside(native_operators, name, place, index, value, message):
    """What would leave the slab is refused before anything is written."""
    given = good_calls()[name]
    arguments = {a.name: x for a, x in zip(_schema(native_operators, name), given, strict=True)}
    names = {"slot": ("slot", "slots"), "table": ("block_table",), "start": ("q_start",)}[place]
    changed = next(arguments[x] for x in names if x in arguments)
    (changed.view(-1) if place == "slot" else changed)[index] = value
    with pytest.raises(RuntimeError, match=f"specc: found {message}"):
        getattr(native_operators, name).default(*given)
    assert not arguments["slab"].any()


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("write_rows", 0, torch.ones(3, WIDTH + 1), "x, slab and slot agree"),
        ("write_rows", 0, torch.ones(2, WIDTH), "x, slab and slot agree"),
        ("write_rows", 0, torch.ones(3, WIDTH).bfloat16(), "x, slab and slot agree"),
        ("write_rows", 0, torch.ones(WIDTH, 3).t(), r"x is \[Nt, W\], rows contiguous"),
        ("write_rows", 3, torch.zeros(3).long(), r"slot is \[Nt\] int32"),
        ("take_rows", 0, torch.ones(6, 4, WIDTH).half(), "take float32 and bfloat16"),
        ("take_rows", 0, torch.ones(6, 0, WIDTH), "a block has 1 row or more"),
        ("take_rows", 0, torch.ones(6, WIDTH), r"slab is \[blocks, block_size, W\]"),
        ("take_rows", 1, int32([4, 7, 2]), r"slots is \[Nt, K\] int32"),
        ("take_rows", 2, int32([0, 3]), "q_start and block_table agree"),
    ],
)
def test_native_shapes_are_refused(native_operators, name, place, value, message):
    given = list(good_calls()[name])
    given[place] = value
    with pytest.raises(RuntimeError, match=message):
        getattr(native_operators, name).default(*given)


def _schema(operators: Any, name: str) -> Any:
    return getattr(operators, name).default._schema.arguments
