"""Pictures of cuts: every weight with its pieces to scale, and every sum where it stands."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from specc.draw.sharding import sharding_svg
from specc.draw.sharding_items import AttentionItem, Section, SumItem, WeightItem, sections
from specc.errors import ConfigError, EngineError
from specc.passes.pipeline import Pipeline
from specc.passes.program import Program
from specc.passes.program_json import program_to_json
from specc.sharding.shard_plan import ShardPlan
from tests import models
from tests.passes.shard.lockstep import shard_phases
from tests.specc.draw.read_svg import Svg
from tests.traces import trace_once

FUSED = "self_attn.q_proj + k_proj + v_proj"


@cache
def cut(name: str, num_ranks: int) -> tuple[Program, ShardPlan]:
    program = trace_once(models.build_model(name), "target")
    Pipeline(shard_phases(num_ranks)).run(program)
    assert program.shard is not None
    return program, program.shard


def sections_of(name: str, num_ranks: int) -> list[Section]:
    program, plan = cut(name, num_ranks)
    heads = [(layer.num_heads, layer.num_kv_heads) for layer in program.layers]
    return sections(program_to_json(program), plan, heads)


def names(section: Section) -> list[Any]:
    return [item.name if isinstance(item, WeightItem) else type(item) for item in section.items]


def test_weights_and_sums_stand_in_the_order_of_execution() -> None:
    before, layers, after = sections_of("llama", 4)
    assert names(before) == ["embed_tokens", SumItem]
    assert names(layers) == [
        "input_layernorm", FUSED, AttentionItem, "self_attn.o_proj", SumItem,
        "post_attention_layernorm", "mlp.gate_proj + up_proj", "mlp.down_proj", SumItem,
    ]  # fmt: skip
    assert (layers.title, layers.count) == ("layers 0 to 1 (2 alike)", 2)
    assert layers.items[2] == AttentionItem(1, 1)
    assert layers.items[4] == SumItem("all_reduce", 64 * 4)
    assert names(after) == ["norm", "lm_head"]


@pytest.mark.default("mixtral-4")
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("gpt2", 2), pytest.param("phi", 2, marks=pytest.mark.slow), ("mixtral", 4)],
)
def test_all_bytes_and_all_sums_are_there(name: str, num_ranks: int) -> None:
    _, plan = cut(name, num_ranks)
    found = sections_of(name, num_ranks)
    weights = [
        (section.count, item.cut)
        for section in found
        for item in section.items
        if isinstance(item, WeightItem) and not item.is_again
    ]
    assert sum(count * weight.local_bytes for count, weight in weights) == plan.local_bytes
    sums = [
        (section.count, item.bytes_per_token)
        for section in found
        for item in section.items
        if isinstance(item, SumItem)
    ]
    assert sum(count for count, _ in sums) == len(plan.collectives)
    assert sum(count * size for count, size in sums) == plan.bytes_per_token


@pytest.mark.slow
def test_layers_of_another_kind_and_tied_heads() -> None:
    """The only sum of a layer of Phi is its last; a tied head is its embedding again."""
    _, layers, _ = sections_of("phi", 2)
    assert [type(item) for item in layers.items].count(SumItem) == 1
    *_, after = sections_of("gpt2", 2)
    assert [item.is_again for item in after.items if isinstance(item, WeightItem)][-1]


def boxes(svg: Svg, name: str) -> list[tuple[float, float, float, float, str]]:
    """Left, top, width, height and color of each piece of a weight."""
    found = []
    number = 0
    while (group := svg.groups.get(f"cut-{name}-{number}")) is not None:
        path = next(group.iter("{http://www.w3.org/2000/svg}path"))
        points = [
            (float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path.get("d"))
        ]
        xs, ys = zip(*points, strict=True)
        color = re.search(r"fill: (#\w+)", path.get("style", ""))
        assert color is not None
        box = min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)
        found.append((*box, color[1]))
        number += 1
    return found


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Svg:
    path = tmp_path_factory.mktemp("pictures") / "sharding.svg"
    sharding_svg(cut("llama", 4)[1], sections_of("llama", 4), "llama", path)
    return Svg(path)


def colors(svg: Svg) -> list[str]:
    keys = [f"key-rank-{rank}" for rank in range(4)]
    found = []
    for key in keys:
        path = next(svg.groups[key].iter("{http://www.w3.org/2000/svg}path"))
        found.append(re.search(r"fill: (#\w+)", path.get("style", ""))[1])  # type: ignore[index]
    return found


def test_pieces_are_drawn_to_scale(picture: Svg) -> None:
    ranks = colors(picture)
    assert len(set(ranks)) == 4
    fused = boxes(picture, "1-1")
    # four pieces of the queries; two of keys and of values, each of two ranks side by side
    assert [box[4] for box in fused] == [*ranks, *ranks, *ranks]
    heights = [box[3] for box in fused]
    assert heights[0] == pytest.approx(heights[4], rel=0.01)
    assert fused[0][2] == pytest.approx(2 * fused[4][2], rel=0.01)
    for upper, lower in pairwise(fused[:4]):
        assert lower[1] == pytest.approx(upper[1] + upper[3], abs=0.1)
    columns = boxes(picture, "1-3")
    assert [box[4] for box in columns] == ranks
    assert {round(box[3], 2) for box in columns} == {round(0.4 * 72, 2)}
    for left, right in pairwise(columns):
        assert right[0] == pytest.approx(left[0] + left[2], abs=0.1)
    (norm,) = boxes(picture, "1-0")
    assert norm[4] not in ranks


def test_words_say_the_same(picture: Svg) -> None:
    assert picture.texts("weight-")["1-1"] == FUSED
    assert picture.texts("words-")["1-3-0"] == "64 × 64: columns 16 of 64"
    assert picture.texts("words-")["1-0-0"] == "64: on every rank"
    # of both layers
    assert picture.texts("bytes-")["1-3"] == "8.0 KiB"
    assert "5 collectives" in picture.texts("total-")["0"]
    assert [text for text in picture.texts("sum-").values()] == [
        "Σ  all_reduce: 256 bytes a token"
    ] * 3
    # nothing runs over the edge, and no text into the bytes at the right
    for name in picture.groups:
        if name.startswith("words-"):
            x, _ = picture.place(name)
            assert x + 3.3 * len("".join(picture.groups[name].itertext()).strip()) < 500


@pytest.mark.slow
def test_a_rank_that_alone_has_a_bias_and_many_ranks(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    sharding_svg(cut("gpt2", 4)[1], sections_of("gpt2", 4), "gpt2", path)
    svg = Svg(path)
    name = next(key for key, text in svg.texts("weight-").items() if text == "attn.c_proj.bias")
    ((*_, color),) = boxes(svg, name)
    assert color == colors(svg)[0]
    assert svg.texts("words-")[f"{name}-0"] == "64: rank 0: all; others: zeros"


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    program, plan = cut("llama", 4)
    data = program_to_json(program)
    with pytest.raises(EngineError, match="a program that its plan does not fit"):
        sections(data, cut("gpt2", 2)[1], [(1, 1)] * 2)
    with pytest.raises(EngineError, match="a program that its plan does not fit"):
        sections(data, plan, [])
    with pytest.raises(ConfigError, match=r"picture\.png"):
        sharding_svg(plan, [], "llama", tmp_path / "picture.png")
