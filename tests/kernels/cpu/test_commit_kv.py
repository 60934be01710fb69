"""The C++ of `specc::commit_kv` against its oracle: every bit of a slab."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specc.kernels.reference.commit import commit_kv_reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16)


CAPACITY = 24


@dataclass(frozen=True)
class Moves:
    """Moves of a batch in a slab of random bits, which hold NaNs of many kinds."""

    kind: str
    batch: int
    layers: int
    block_size: int  # 0: dense
    kv_heads: int
    dim: int
    dtype: torch.dtype
    index_dtypes: tuple[torch.dtype, torch.dtype]
    dead: float
    seed: int

    def check(self, operators) -> None:
        chooser = random.Random(self.seed)
        torch.manual_seed(self.seed)
        block_size = self.block_size or CAPACITY
        per_sequence = -(-CAPACITY // block_size)
        blocks = list(range(self.batch * per_sequence + 2))
        chooser.shuffle(blocks)
        table = torch.tensor(blocks[: self.batch * per_sequence], dtype=torch.int32)
        table = table.view(self.batch, per_sequence)
        as_bits = torch.int32 if self.dtype == torch.float32 else torch.int16
        info = torch.iinfo(as_bits)
        # the slab lies between canaries
        shape = (self.layers + 2, 2, len(blocks), block_size, self.kv_heads, self.dim)
        bits = torch.randint(info.min, info.max, shape, dtype=as_bits)
        for block in chooser.sample(blocks, min(2, len(blocks))):
            bits[:, :, block, chooser.randrange(block_size)] = torch.full(
                (), NAN, dtype=self.dtype
            ).view(as_bits)
        memory = bits.view(self.dtype)
        expected = memory.clone()
        pairs = [self._pairs(chooser) for _ in range(self.batch)]
        width = max(map(len, pairs), default=3)
        for sequence in pairs:
            sequence += [(-1, -1)] * (width - len(sequence))
            for i, (source, target) in enumerate(sequence):
                if chooser.random() < self.dead:
                    sequence[i] = chooser.choice([(-1, target), (source, -1), (-1, -1)])
        moves = torch.tensor(pairs, dtype=torch.int64).view(self.batch, width, 2)
        inputs = [moves[..., i].contiguous().to(self.index_dtypes[i]) for i in (0, 1)] + [table]
        copies = [tensor.clone() for tensor in inputs]
        commit_kv_reference(expected[1:-1], *inputs)
        assert operators.commit_kv(memory[1:-1], *inputs) is None
        assert torch.equal(memory.view(as_bits), expected.view(as_bits))
        for tensor, copy in zip(inputs, copies, strict=True):
            assert torch.equal(tensor, copy)

    def _pairs(self, chooser: random.Random) -> list[tuple[int, int]]:
        """Targets of a sequence are distinct."""
        count = chooser.randrange(0, 9)
        rows = chooser.sample(range(CAPACITY), count + 1)
        if self.kind == "none":
            return []
        if self.kind == "path":  # what a step moves: rows of an accepted path
            first = chooser.randrange(CAPACITY - 12)
            path = [0, *sorted(chooser.sample(range(1, 12), count))]
            return [(first + node, first + j) for j, node in enumerate(path)]
        if self.kind == "chain":  # 0 → 1 → 2 …: each target is the source of the next
            pairs = [(rows[i], rows[i + 1]) for i in range(count)]
        elif self.kind == "cycle":
            pairs = [(rows[i], rows[(i + 1) % len(rows)]) for i in range(len(rows))]
        elif self.kind == "one-source":
            pairs = [(rows[0], row) for row in rows]
        else:
            assert self.kind == "any"
            pairs = [(chooser.randrange(CAPACITY), row) for row in rows]
        if chooser.random() < 0.3:
            pairs.reverse()
        return pairs


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.builds(
        Moves,
        kind=st.sampled_from(["path", "path", "chain", "cycle", "one-source", "any", "none"]),
        batch=st.integers(0, 4),
        layers=st.integers(1, 3),
        block_size=st.sampled_from([0, 1, 3, 4, 16]),
        kv_heads=st.integers(1, 3),
        dim=st.sampled_from([1, 2, 5, 16]),
        dtype=st.sampled_from(DTYPES),
        index_dtypes=st.tuples(*[st.sampled_from([torch.int32, torch.int64])] * 2),
        dead=st.sampled_from([0.0, 0.0, 0.3]),
        seed=st.integers(0, 2**31),
    )
)
def test_commit_kv(operators, moves):
    moves.check(operators)


def int32(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"source": torch.zeros(2, 2)}, "source .* int32 or int64", id="source-fp32"),
        pytest.param({"target": torch.zeros(2, 2)}, "target .* int32 or int64", id="target-fp32"),
        pytest.param(
            {"source": int32([2, 3], [4, 5]).T}, "source .* contiguous", id="source-by-column"
        ),
        pytest.param({"source": int32([2, 3])}, "source and target", id="source-of-one"),
        pytest.param({"target": int32([2], [3])}, "source and target", id="target-short"),
        pytest.param({"block_table": torch.zeros(2, 2).long()}, "int32", id="block_table-i64"),
        pytest.param({"slab": torch.zeros(2, 5, 4, 2, 3)}, "slab is", id="slab-of-a-layer"),
        pytest.param(
            {"slab": torch.zeros(2, 2, 5, 4, 2, 6)[..., :3]}, "slab is", id="slab-strided"
        ),
        pytest.param(
            {"slab": torch.zeros(2, 2, 5, 4, 2, 3).half()}, "float32 and bfloat16", id="slab-fp16"
        ),
    ],
)
def test_commit_kv_refuses(operators, changes, message):
    args = {
        "slab": torch.arange(480.0).view(2, 2, 5, 4, 2, 3),
        "source": int32([2, 3], [4, 5]),
        "target": int32([1, 2], [3, 4]),
        "block_table": int32([3, 1], [0, 4]),
    } | changes
    before = args["slab"].clone()
    with pytest.raises(RuntimeError, match=f"specc: .*{message}"):
        operators.commit_kv(**args)
    assert torch.equal(args["slab"], before)
