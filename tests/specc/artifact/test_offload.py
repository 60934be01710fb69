"""Which weights stay in memory, by a budget."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pytest

from specc.artifact.offload import PAGE, OffloadPlan, Piece, find_pieces, plan_offload
from specc.artifact.segments import SegmentedModel
from specc.errors import ConfigError

LAYER, HEAD = 100 * PAGE, 250 * PAGE


def pieces(sizes: Sequence[int]) -> list[Piece]:
    ends = itertools.accumulate(sizes, initial=PAGE)
    return [
        Piece(i + 1, begin, size, (f"w{i}",))
        for i, (begin, size) in enumerate(zip(ends, sizes, strict=False))
    ]


def best(found: Sequence[Piece], budget: int) -> int:
    """Bytes a pass of the best choice of all."""
    choices = (
        OffloadPlan(kept, tuple(p for p in found if p not in kept), ())
        for count in range(len(found) + 1)
        for kept in itertools.combinations(found, count)
    )
    return min(plan.bytes_per_pass for plan in choices if plan.memory_bytes <= budget)


@pytest.mark.parametrize("num_layers", [3, 8])
@pytest.mark.parametrize("budget", [450 * PAGE, 500 * PAGE, 700 * PAGE, 801 * PAGE, 2000 * PAGE])
def test_a_plan_reads_as_little_as_it_can(num_layers: int, budget: int) -> None:
    found = pieces([LAYER] * num_layers + [HEAD])
    plan = plan_offload(found, ["table"], budget)
    assert plan.memory_bytes <= budget
    assert plan.bytes_per_pass == best(found, budget)
    assert sorted((*plan.kept, *plan.streamed), key=lambda p: p.segment) == found
    assert plan.rest == ("table",)


def test_what_is_kept_is_spread_over_the_model() -> None:
    plan = plan_offload(pieces([LAYER] * 12), [], 5 * LAYER)
    assert [piece.segment for piece in plan.kept] == [3, 7, 11]
    assert plan.buffer_bytes == 2 * LAYER


def test_nothing_is_read_where_all_of_it_fits() -> None:
    plan = plan_offload(pieces([LAYER] * 4), [], 4 * LAYER)
    assert plan.streamed == ()
    assert plan.memory_bytes == 4 * LAYER
    assert plan.bytes_per_pass == plan.buffer_bytes == 0


def test_a_budget_below_two_buffers_is_refused() -> None:
    # the head is kept: two buffers for layers
    assert plan_offload(pieces([LAYER] * 4 + [LAYER]), [], 2 * LAYER).kept == ()
    told = (
        "--offload-weights 796.0 KiB; needed: at least 800.0 KiB: two buffers for segments of up to"
        " 400.0 KiB"
    )
    with pytest.raises(ConfigError) as error:
        plan_offload(pieces([LAYER] * 5), [], 2 * LAYER - PAGE)
    text = re.sub(r"\s+", " ", str(error.value))
    assert "796.0 KiB" in text
    assert told.split("needed: ")[1] in text


def test_pages_are_counted_whole() -> None:
    piece = Piece(1, PAGE - 1, 2, ())
    assert piece.span == 2 * PAGE
    assert Piece(1, PAGE, PAGE, ()).span == PAGE


def test_a_piece_is_what_lies_together_and_belongs_to_one_segment() -> None:
    kinds = [
        {"inputs": [{"kind": "weight"}] * count + [{"kind": "cache", "layer": 0}] * bool(layers)}
        for count, layers in ((1, 0), (3, 1), (2, 0))
    ]
    model = SegmentedModel.from_json(
        {
            "schema_version": 1,
            "name": "target",
            "kinds": kinds,
            "segments": [
                {"kind": 0, "keys": ["table"], "layers": []},
                {"kind": 1, "keys": ["a", "b", "freq"], "layers": [0]},
                {"kind": 1, "keys": ["c", "d", "freq"], "layers": [1]},
                {"kind": 2, "keys": ["head", "table"], "layers": []},
            ],
        }
    )
    places = {"freq": (64, 8), "table": (72, 100), "a": (172, 4), "b": (176, 40)}
    places |= {"c": (216, 4), "d": (300, 40), "head": (340, 10)}
    found, rest = find_pieces(model, places)
    assert found == [
        Piece(1, 172, 44, ("a", "b")),
        Piece(2, 300, 40, ("d",)),
        Piece(3, 340, 10, ("head",)),
    ]
    assert rest == ["table", "freq", "c"]
