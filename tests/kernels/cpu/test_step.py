"""The C++ of `specc::tree_expand` and `accept_winners` against their oracles.

All results are integers, so everything is compared exactly: values, shapes, strides. What lies
between and around the rows would win if it were read.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specc.kernels.reference.core import tree_expand_reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")
NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.bfloat16)
# a register holds 4, 8 or 16 floats
VOCABS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 100, 2048, 2049)
# subnormal numbers differ from 0
SPECIAL = (NAN, NAN, INF, -INF, 0.0, -0.0, 1e-40, -1e-40, 1.0, 3e38, -3e38)


@dataclass(frozen=True)
class Logits:
    """Rows of logits: `kind` says which values, `padding` how many NaNs lie between two rows."""

    kind: str
    dtype: torch.dtype
    padding: int
    seed: int

    def make(self, rows: int, vocab: int) -> Tensor:
        torch.manual_seed(self.seed)
        shape = (rows, vocab)
        if self.kind == "random":
            values = torch.randn(shape)
        elif self.kind == "ties":
            values = torch.randint(-2, 3, shape).float()
        elif self.kind == "equal":
            values = torch.full(shape, 0.5)
        elif self.kind == "special":
            values = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), shape)]
        elif self.kind == "masked":
            values = torch.randn(shape).masked_fill(torch.rand(shape) < 0.9, -INF)
        elif self.kind == "mostly-nan":
            values = torch.randn(shape).masked_fill(torch.rand(shape) < 0.5, NAN)
        elif self.kind == "one-nan":
            values = torch.randint(-2, 3, shape).float()
            values[torch.rand(shape) < 1 / vocab] = NAN
        elif self.kind == "ascending":
            values = torch.arange(vocab).expand(shape) / 7
        else:
            assert self.kind == "descending"
            values = -torch.arange(vocab).expand(shape) / 7
        return self.place(values)

    def place(self, values: Tensor) -> Tensor:
        """A view of a wider tensor, between NaNs, which rank before everything."""
        rows, vocab = values.shape
        wide = torch.full((rows + 2, vocab + self.padding), NAN, dtype=self.dtype)
        view = wide[1 : rows + 1, self.padding // 2 : self.padding // 2 + vocab]
        return view.copy_(values)


KINDS = (
    "random",
    "ties",
    "equal",
    "special",
    "masked",
    "mostly-nan",
    "one-nan",
    "ascending",
    "descending",
)
logits_of_any_kind = st.builds(
    Logits,
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    padding=st.sampled_from([0, 0, 1, 2, 5, 16, 33]),
    seed=st.integers(0, 2**31),
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    logits=logits_of_any_kind,
    rows=st.integers(0, 5),
    vocab=st.sampled_from(VOCABS),
    num_children=st.integers(1, 10) | st.sampled_from([15, 16, 17, 2049]),
)
def test_tree_expand(operators, logits, rows, vocab, num_children):
    tensor = logits.make(rows, vocab)
    num_children = min(num_children, vocab)
    want = tree_expand_reference(tensor, num_children)
    got = operators.tree_expand(tensor, num_children)
    assert torch.equal(got, want)
    assert (got.dtype, got.stride()) == (want.dtype, want.stride())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [33, 2049], ids="vocab{}".format)
def test_tree_expand_finds_the_best_at_every_place(operators, vocab, dtype):
    """Row i has its maximum at token i, or its first NaN, and a tie of it at every later one."""
    for best in (1.0, INF, NAN):
        behind = torch.arange(vocab) >= torch.arange(vocab)[:, None]
        tensor = torch.where(behind, best, torch.randn(vocab, vocab).clamp(max=0.5)).to(dtype)
        assert torch.equal(operators.tree_expand(tensor, 1)[:, 0], torch.arange(vocab))
        alone = torch.where(torch.eye(vocab, dtype=torch.bool), best, -INF).to(dtype)
        got = operators.tree_expand(alone, 2)
        assert torch.equal(got[:, 0], torch.arange(vocab))
        assert torch.equal(got[:, 1], (torch.arange(vocab) == 0).long())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [4, 40], ids="vocab{}".format)
def test_minus_infinity_ranks_below_the_lowest_number(operators, vocab, dtype):
    """Where a mask is the lowest number: the target's argmax is no token that is out by -inf."""
    tensor = torch.full((1, vocab), -INF, dtype=dtype)
    tensor[0, [2, vocab - 1]] = torch.finfo(dtype).min
    assert operators.tree_expand(tensor, 1).tolist() == [[2]]
    masked = [token for token in range(vocab) if token not in (2, vocab - 1)]
    assert operators.tree_expand(tensor, vocab).tolist() == [[2, vocab - 1, *masked]]
    root = torch.zeros(1, 1, dtype=torch.int64), int32([-1])
    greedy = torch.tensor([[0.0, 1, 0, 1, 0, 0]]), torch.zeros(1, 4, dtype=torch.int64)
    paged = int32([0]), int32([0])
    assert operators.node_winners(tensor, *root, 0, *greedy, int32(0), *paged).tolist() == [2]


def int32(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize(
    ("logits", "num_children", "message"),
    [
        pytest.param(torch.zeros(3, 5), 0, "children", id="none"),
        pytest.param(torch.zeros(3, 5), 6, "children", id="more-than-tokens"),
        pytest.param(torch.zeros(5), 1, "logits is", id="one-dimension"),
        pytest.param(torch.zeros(5, 3).T, 1, "logits is .* rows contiguous", id="by-column"),
        pytest.param(torch.zeros(3, 5).half(), 1, "float32 and bfloat16", id="fp16"),
        pytest.param(torch.zeros(3, 5).double(), 1, "float32 and bfloat16", id="fp64"),
    ],
)
def test_tree_expand_refuses(operators, logits, num_children, message):
    with pytest.raises(RuntimeError, match=f"specc: .*{message}"):
        operators.tree_expand(logits, num_children)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"winners": torch.zeros(2, 2).long()}, "winners is", id="too-few-winners"),
        pytest.param({"winners": torch.zeros(3, 2).long().T}, "winners is .* rows", id="by-column"),
        pytest.param({"winners": torch.zeros(2, 3).int()}, "int64", id="winners-i32"),
        pytest.param({"tokens": torch.zeros(2, 3, dtype=torch.int32)}, "int64", id="tokens-i32"),
        pytest.param(
            {"tokens": torch.zeros(3, 2, dtype=torch.int64).T}, "tokens is", id="tokens-by-column"
        ),
        pytest.param(
            {"parents": torch.zeros(2, 3).long()}, "parents is .* int32", id="parents-i64"
        ),
        pytest.param({"parents": torch.zeros(1, 3).int()}, "parents is", id="parents-of-one"),
        pytest.param({"parents": torch.zeros(3, 2).int().T}, "parents is", id="parents-by-column"),
        pytest.param({"max_depth": -1}, "max_depth", id="negative-depth"),
        pytest.param(
            {
                "winners": torch.zeros(2, 0, dtype=torch.int64),
                "tokens": torch.zeros(2, 0, dtype=torch.int64),
                "parents": torch.zeros(2, 0).int(),
            },
            "a root",
            id="no-nodes",
        ),
    ],
)
def test_accept_winners_refuses(operators, changes, message):
    args = {
        "winners": torch.zeros(2, 3, dtype=torch.int64),
        "tokens": torch.zeros(2, 3, dtype=torch.int64),
        "parents": int32([-1, 0, 0], [-1, 0, 1]),
        "max_depth": 2,
    } | changes
    with pytest.raises(RuntimeError, match=f"specc: .*{message}"):
        operators.accept_winners(**args)
