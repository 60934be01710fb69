"""The C++ of `tree_attention` and `commit_kv` refuses numbers that would leave the cache.

Caches and tables lie between canaries: a wrong number that is not refused writes over some, or
reads their huge values. What a call does not use may be anything.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specc.kernels.reference.core import tree_attention_reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CANARY = 1e30
HUGE = 2**31 - 1
BLOCKS, BLOCK_SIZE, COUNT = 8, 4, 3  # blocks of the cache, their rows, and blocks of a sequence
MARGIN = 6  # blocks of canaries on each side


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Call:
    """Two sequences: 2 tokens after 5 rows, 3 tokens after 2 rows; the last blocks are unused."""

    def __init__(self, causal: bool = False, **changes: Any) -> None:
        torch.manual_seed(0)
        self.memory = torch.full((2, BLOCKS + 2 * MARGIN, BLOCK_SIZE, 1, 8), CANARY)
        self.memory[0, :MARGIN] = self.memory[0, -MARGIN:] = 0.0  # scores like any other
        self.caches = [part[MARGIN : MARGIN + BLOCKS].normal_() for part in self.memory]
        # an index beyond a table finds a canary's block
        tables = torch.full((4, COUNT), BLOCKS, dtype=torch.int32)
        self.table = tables[1:3].copy_(int32([[6, 1, -1], [3, 0, HUGE]]))
        self.args: dict[str, Any] = {
            "q_start": int32([0, 2, 5]),
            "position": torch.tensor([5, 6, 2, 3, 4]),
            "slot": int32([5, 6, 2, 3, 4]),
            "cache_len": int32([5, 2]),
            "ancestors": None if causal else torch.tensor([[1], [3], [1], [3], [7]]),
        }
        self.options = {"scale": 0.3}
        for name, value in changes.items():
            if name in ("window", "sink"):
                self.options[name] = value
            else:
                self.change(name, *value)
        tokens = len(self.args["slot"])
        self.q, self.k, self.v = torch.randn(3, 1, tokens, 8)

    def change(self, name: str, index: Any, value: int) -> None:
        (self.table if name == "block_table" else self.args[name])[index] = value

    def run(self, operators: Any) -> Tensor:
        return operators.tree_attention(
            self.q, self.k, self.v, *self.caches, *self.args.values(), self.table, **self.options
        )  # fmt: skip

    def canaries(self) -> Tensor:
        return torch.cat([self.memory[:, :MARGIN], self.memory[:, MARGIN + BLOCKS :]], 1)


REFUSED = [
    ("block_table", (0, 0), -1, r"block_table\[0\]\[0\] = -1, needed 0 … 7: the cache has 8"),
    ("block_table", (0, 1), BLOCKS, r"block_table\[0\]\[1\] = 8, needed 0 … 7"),
    ("block_table", (1, 0), HUGE, r"block_table\[1\]\[0\] = 2147483647, needed 0 … 7"),
    ("block_table", (1, 1), -(2**31), r"block_table\[1\]\[1\] = -2147483648, needed 0 … 7"),
    ("slot", 1, 12, r"slot\[1\] = 12 of sequence 0, needed 0 … 11: it has 3 blocks of 4 rows"),
    ("slot", 4, HUGE, r"slot\[4\] = 2147483647 of sequence 1, needed 0 … 11"),
    ("cache_len", 0, 13, r"cache_len\[0\] = 13, needed 0 … 12"),
    ("cache_len", 1, -1, r"cache_len\[1\] = -1, needed 0 … 12"),
    ("cache_len", 1, HUGE, r"cache_len\[1\] = 2147483647"),
    ("position", 2, -1, r"position\[2\] = -1, needed 0 … 2147483647"),
    ("position", 2, 2**63 - 1, r"position\[2\] = 9223372036854775807"),
    ("q_start", 0, 1, r"q_start\[0\] = 1, needed 0"),
    ("q_start", 0, -1, r"q_start\[0\] = -1, needed 0"),
    ("q_start", 1, -1, r"q_start\[1\] = -1, needed 0 … 5"),
    ("q_start", 1, 6, r"q_start\[1\] = 6, needed 0 … 5: it ascends"),
    ("q_start", 2, 1, r"q_start\[2\] = 1, needed 2 … 5"),
    ("q_start", 2, 6, r"q_start\[2\] = 6, needed 2 … 5"),
]


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
@pytest.mark.parametrize(
    ("name", "index", "value", "message"), REFUSED, ids=[f"{c[0]}={c[2]}" for c in REFUSED]
)
def test_tree_attention_refuses(operators, name, index, value, message, causal):
    call = Call(causal, **{name: (index, value)})
    before = call.memory.clone()
    with pytest.raises(RuntimeError, match=f"specc: found {message}"):
        call.run(operators)
    assert torch.equal(call.memory.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
def test_the_last_row_of_a_cache_is_no_error(operators, causal):
    call = Call(causal, block_table=((0, 2), 7))
    last = COUNT * BLOCK_SIZE - 1
    call.args["cache_len"][0] = last - 1
    for name in ("slot", "position"):
        call.args[name][:2] = torch.tensor([last - 1, last])
    assert call.run(operators).isfinite().all()


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
@pytest.mark.parametrize("entry", [-1, BLOCKS, HUGE, -(2**31)])
def test_what_is_not_used_may_be_anything(operators, entry, causal):
    """Entries after the last block; and all of a sequence whose tokens are dead."""
    call = Call(causal)
    want = call.run(operators)
    call.table[:, 2] = entry
    assert torch.equal(call.run(operators), want)
    call.args["slot"][2:] = -1
    call.args["cache_len"][1] = entry
    call.table[1] = entry
    found = call.run(operators)
    assert torch.equal(found[:, :2], want[:, :2])
    assert not found[:, 2:].any()


@pytest.mark.parametrize("causal", [False, True], ids=["tree", "causal"])
@pytest.mark.parametrize("sink", [0, 1, 4, 5])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8])
def test_blocks_that_the_window_cuts_for_all_tokens(operators, window, sink, causal):
    """Blocks between the sink and the window may be anything; every other one is checked."""
    length = 30
    torch.manual_seed(0)
    caches = torch.randn(2, 8, BLOCK_SIZE, 1, 8)
    q, k, v = torch.randn(3, 1, 2, 8)
    rest = (
        int32([0, 2]),
        torch.tensor([length, length + 1]),
        int32([length, length + 1]),
        int32([length]),
        None if causal else torch.tensor([[1], [3]]),
    )
    table = torch.arange(8, dtype=torch.int32)[None]
    options = {"scale": 0.3, "window": window, "sink": sink}
    want = tree_attention_reference(q, k, v, *caches.clone(), *rest, table, **options)
    used = set()
    for row in (*range(sink), *range(length - window + 1, length + 2)):
        used.add(row // BLOCK_SIZE)
    for block in range(8):
        broken = table.clone()
        broken[0, block] = -1
        if block in used:
            with pytest.raises(RuntimeError, match=rf"block_table\[0\]\[{block}\] = -1"):
                operators.tree_attention(q, k, v, *caches.clone(), *rest, broken, **options)
        else:
            found = operators.tree_attention(q, k, v, *caches.clone(), *rest, broken, **options)
            torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


FIELDS = {"block_table": (2, COUNT), "slot": (5,), "cache_len": (2,), "q_start": (3,)}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    causal=st.booleans(),
    window=st.sampled_from([0, 0, 1, 3]),
    changes=st.lists(
        st.tuples(st.sampled_from(list(FIELDS)), st.integers(0, 99), st.integers(-5, 14)),
        min_size=1,
        max_size=3,
    ),
)
def test_any_numbers_are_refused_or_stay_inside(operators, causal, window, changes):
    call = Call(causal, window=window)
    for name, place, value in changes:
        sizes = FIELDS[name]
        index = (place % sizes[0], place % sizes[-1])[: len(sizes)]
        call.change(name, index, value)
    rows, canaries = call.memory[:, MARGIN : MARGIN + BLOCKS].clone(), call.canaries()
    out, refusal = None, ""
    try:
        out = call.run(operators)
    except RuntimeError as error:
        refusal = str(error)
    if out is None:
        assert refusal.startswith("specc: found")
        assert torch.equal(call.memory[:, MARGIN : MARGIN + BLOCKS], rows)
    else:  # NaN is no canary: a token whose numbers changed may see nothing
        assert not (out.abs() > 1e3).any()
    assert torch.equal(call.canaries(), canaries)


def make_commit(**changes: Any) -> tuple[Tensor, list[Tensor]]:
    """Slab between canaries, and the inputs; moves of two sequences with tables as above."""
    slab = torch.arange(4.0 * BLOCKS * BLOCK_SIZE * 6).view(2, 2, BLOCKS, BLOCK_SIZE, 2, 3)
    table = int32([[6, 1, -1], [3, 0, HUGE]])
    inputs = {"source": int32([[5, 7], [2, -1]]), "target": int32([[4, 6], [1, HUGE]])}
    for name, (index, value) in changes.items():
        (table if name == "block_table" else inputs[name])[index] = value
    return slab, [*inputs.values(), table]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": ((0, 1), 12)}, r"source\[1\] = 12 of sequence 0, needed 0 … 11: it has 3"),
        ({"source": ((1, 0), HUGE)}, r"source\[0\] = 2147483647 of sequence 1, needed 0 … 11"),
        ({"target": ((0, 0), 12)}, r"target\[0\] = 12 of sequence 0, needed 0 … 11"),
        ({"target": ((1, 0), HUGE)}, r"target\[0\] = 2147483647 of sequence 1"),
        ({"source": ((0, 0), 8)}, r"block_table\[0\]\[2\] = -1, needed 0 … 7: the cache has 8"),
        ({"target": ((1, 0), 8)}, r"block_table\[1\]\[2\] = 2147483647, needed 0 … 7"),
        ({"block_table": ((0, 1), BLOCKS)}, r"block_table\[0\]\[1\] = 8, needed 0 … 7"),
        ({"block_table": ((1, 0), -1)}, r"block_table\[1\]\[0\] = -1, needed 0 … 7"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_commit_kv_refuses(operators, changes, message, dtype):
    """Before any row is moved: a later sequence, or move, may be the wrong one."""
    slab, (source, target, table) = make_commit(**changes)
    before = slab.clone()
    with pytest.raises(RuntimeError, match=f"specc: found {message}"):
        operators.commit_kv(slab, source.to(dtype), target.to(dtype), table)
    assert torch.equal(slab, before)


def test_commit_kv_uses_only_what_moves(operators):
    """A move without a source or target, or onto itself, reads no table."""
    slab, inputs = make_commit(target=((1, 1), HUGE))
    before = slab.clone()
    operators.commit_kv(slab, *inputs)
    assert not torch.equal(slab, before)
    slab, inputs = make_commit(source=(0, -1), block_table=(0, -1))
    inputs[0][1], inputs[1][1] = int32([9, 10]), int32([9, 10])
    before = slab.clone()
    operators.commit_kv(slab, *inputs)
    assert torch.equal(slab, before)


def test_no_sequences_and_no_rows(operators):
    empty = torch.zeros(1, 0, 8)
    caches = torch.zeros(2, 0, BLOCK_SIZE, 1, 8)
    rest = (int32([0]), torch.zeros(0, dtype=torch.int64), int32([]), int32([]), None)
    table = torch.zeros(0, 0, dtype=torch.int32)
    out = operators.tree_attention(empty, empty, empty, *caches, *rest, table, scale=1.0)
    assert out.numel() == 0
    token, position = torch.zeros(1, 1, 8), torch.zeros(1, dtype=torch.int64)
    rest = (int32([0, 1]), position, int32([0]), int32([0]), None)
    table = torch.zeros(1, 0, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"slot\[0\] = 0 of sequence 0, needed 0 … -1: it has 0"):
        operators.tree_attention(token, token, token, *caches, *rest, table, scale=1.0)
