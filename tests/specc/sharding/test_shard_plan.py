"""A cut as data: pieces of ranks, what they take of a weight, and its JSON."""

from __future__ import annotations

import json

import pytest
import torch

from specc.sharding.shard_plan import (
    ALL_REDUCE,
    FIRST_ROW,
    OWN_ROWS,
    PADDING,
    Collective,
    Interval,
    RankConstant,
    ShardPlan,
    WeightCut,
    local_offset,
    local_size,
)

# rows of q [8], k [4] and v [4]: 4 ranks, two of which share each piece of k and v
FUSED = (Interval(0, 8, 4), Interval(8, 12, 2, 2), Interval(12, 16, 2, 2))
WHOLE = (Interval(0, 3),)


def test_neighbours_share_a_piece() -> None:
    assert [FUSED[1].piece(rank) for rank in range(4)] == [(8, 10), (8, 10), (10, 12), (10, 12)]
    assert [FUSED[0].piece(rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [WHOLE[0].piece(rank) for rank in range(4)] == [(0, 3)] * 4


def test_boundaries_of_a_ranks_part() -> None:
    assert local_size(FUSED) == 6
    assert [local_offset(FUSED, index) for index in (0, 8, 12, 16)] == [0, 2, 4, 6]


def test_a_rank_takes_a_piece_of_each_interval() -> None:
    cut = WeightCut("w", "float32", (16, 3), (FUSED, WHOLE))
    whole = torch.arange(48.0).view(16, 3)
    assert cut.local_shape == (6, 3)
    assert (cut.local_bytes, cut.whole_bytes) == (72, 192)
    assert torch.equal(cut.take(whole, 2), whole[[4, 5, 10, 11, 14, 15]])
    assert torch.equal(cut.take(whole, 1), whole[[2, 3, 8, 9, 12, 13]])


def test_what_pads_is_zero_and_on_the_last_rank() -> None:
    cut = WeightCut("w", "float32", (3, 5), (WHOLE, (Interval(0, 6, 2),)))
    whole = torch.ones(3, 5)
    assert torch.equal(cut.take(whole, 0), whole[:, :3])
    assert torch.equal(cut.take(whole, 1), torch.tensor([1.0, 1.0, 0.0]).expand(3, 3))


def test_only_the_first_rank_adds_a_bias_of_a_sum() -> None:
    cut = WeightCut("b", "float32", (3,), (WHOLE,), is_first_only=True)
    whole = torch.ones(3)
    assert torch.equal(cut.take(whole, 0), whole)
    assert torch.equal(cut.take(whole, 1), torch.zeros(3))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_constants_of_ranks(dtype: str) -> None:
    first_row = RankConstant("first", FIRST_ROW, 2, 5)
    assert [first_row.value(rank).tolist() for rank in range(3)] == [[0], [2], [4]]
    padding = RankConstant("padding", PADDING, 2, 5, dtype)
    inf = -torch.inf
    assert [padding.value(rank).tolist() for rank in range(4)] == [
        [0, 0],
        [0, 0],
        [0, inf],
        [inf] * 2,
    ]
    assert padding.value(0).dtype == getattr(torch, dtype)


def test_own_rows_of_intervals() -> None:
    follow = RankConstant("rows", OWN_ROWS, 2, 8)
    assert [follow.value(rank).tolist() for rank in (0, 3)] == [[0, 1], [6, 7]]
    rows = RankConstant("rows", OWN_ROWS, 6, 16, cut=FUSED)
    assert [rows.value(rank).tolist() for rank in (1, 2)] == [
        [2, 3, 8, 9, 12, 13],
        [4, 5, 10, 11, 14, 15],
    ]


def test_json_says_all_of_a_plan() -> None:
    plan = ShardPlan(
        4,
        (
            WeightCut("w", "bfloat16", (16, 3), (FUSED, WHOLE)),
            WeightCut("b", "bfloat16", (3,), (WHOLE,), is_first_only=True),
        ),
        (Collective("all_reduce", ALL_REDUCE, "linear", 1, 6),),
        (
            RankConstant("first", FIRST_ROW, 2, 5),
            RankConstant("p", PADDING, 2, 5, "bfloat16"),
            RankConstant("rows", OWN_ROWS, 6, 16, cut=FUSED),
        ),
        5,
        2,
    )
    assert ShardPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert (plan.local_bytes, plan.whole_bytes, plan.bytes_per_token) == (42, 102, 6)
    assert plan.cuts_vocabulary


@pytest.mark.parametrize(
    "change", [{"weights": [{}]}, {"num_ranks": None, "constants": [{"a": 1}]}]
)
def test_what_is_no_plan_is_refused(change: dict) -> None:
    data = ShardPlan(2, (), (), (), 5, 5).to_json() | change
    with pytest.raises((KeyError, TypeError)):
        ShardPlan.from_json(data)
