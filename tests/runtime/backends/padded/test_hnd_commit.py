"""Commits in caches with heads before rows, against those of flat caches."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from specc.artifact.cache_rows import CacheRows
from specc.kernels import ops
from specc.kernels.reference.commit import commit_kv_reference
from specc.runtime.backends.padded.hnd_commit import commit_by_heads, place_commits
from tests.native_library import load_native

ROWS = CacheRows(front=3, slots=24, scratch=5)
LAYERS, REQUESTS, DIM = 2, 5, 4


@pytest.fixture(scope="module", params=["reference", "native"])
def commit_kv(request: pytest.FixtureRequest) -> Any:
    if request.param == "reference":
        return commit_kv_reference
    load_native()
    return torch.ops.specc_cpu.commit_kv


def make_slab(heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    shape = (LAYERS, 2, REQUESTS, heads, ROWS.total, DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(heads)).to(dtype)


def committed_flat(slab: Tensor, moves: tuple[Tensor, Tensor], table: Tensor) -> Tensor:
    """The same moves by the oracle on [layers, 2, blocks, slots, HK, D]; the rim stays."""
    first, last = ROWS.front, ROWS.front + ROWS.slots
    flat = slab[..., first:last, :].transpose(3, 4).contiguous()
    commit_kv_reference(flat, *moves, table)
    wanted = slab.clone()
    wanted[..., first:last, :] = flat.transpose(3, 4)
    return wanted


def random_moves(chooser: random.Random, batch: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Distinct targets and any sources, some dead, of requests in no order."""
    width = chooser.randint(1, 8)
    sources, targets = [], []
    for _ in range(batch):
        sources.append([chooser.randrange(-1, ROWS.slots) for _ in range(width)])
        row = chooser.sample(range(ROWS.slots), width)
        targets.append([-1 if chooser.random() < 0.2 else slot for slot in row])
    table = torch.tensor(chooser.sample(range(REQUESTS), batch), dtype=torch.int32)[:, None]
    return (torch.tensor(sources).int(), torch.tensor(targets).int()), table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_random_overlapping_moves(commit_kv: Any, heads: int, dtype: torch.dtype) -> None:
    chooser = random.Random(heads)
    for _ in range(40):
        moves, table = random_moves(chooser, chooser.randint(1, REQUESTS))
        slab = make_slab(heads, dtype)
        wanted = committed_flat(slab, moves, table)
        commit_by_heads(ROWS, commit_kv)(slab, *moves, table)
        assert torch.equal(slab, wanted)


def test_the_first_and_the_last_slot(commit_kv: Any) -> None:
    """Rows of the rim neither move nor change."""
    moves = torch.tensor([[0, ROWS.slots - 1, -1]]).int(), torch.tensor([[5, 0, 3]]).int()
    table = torch.tensor([[REQUESTS - 1]], dtype=torch.int32)
    slab = make_slab(2)
    wanted = slab.clone()
    front = ROWS.front
    wanted[:, :, -1, :, front + 5] = slab[:, :, -1, :, front]
    wanted[:, :, -1, :, front] = slab[:, :, -1, :, front + ROWS.slots - 1]
    commit_by_heads(ROWS, commit_kv)(slab, *moves, table)
    assert torch.equal(slab, wanted)


def test_stages_commit_by_heads() -> None:
    """Every commit of a graph is placed, and other nodes are left alone."""
    graph = fx.Graph()
    names = ("slab_0", "slab_1", "source", "target", "block_table")
    node = {name: graph.placeholder(name) for name in names}
    rows = [node[name] for name in names[2:]]
    for name in names[:2]:
        graph.call_function(ops.commit_kv, (node[name], *rows))
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (node["source"], 1)))
    calls = []

    class Operators:
        @staticmethod
        def commit_kv(slab: Tensor, *args: Tensor) -> None:
            calls.append(slab.shape)
            commit_kv_reference(slab, *args)

    module = place_commits(fx.GraphModule(torch.nn.Module(), graph), ROWS, Operators)
    moves, table = random_moves(random.Random(5), 3)
    slabs = [make_slab(2), make_slab(3)]
    wanted = [committed_flat(slab, moves, table) for slab in slabs]
    assert torch.equal(module(*slabs, *moves, table), moves[0] + 1)
    assert all(torch.equal(a, b) for a, b in zip(slabs, wanted, strict=True))
    assert [shape[3:5] for shape in calls] == [(ROWS.total, 1)] * 2
