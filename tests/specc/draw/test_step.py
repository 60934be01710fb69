"""Pictures of steps: every stage, program, operator and buffer, and how they hang together."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import networkx
import pytest

import specc.kernels.ops  # noqa: F401
from specc.draw.step import step_svg
from specc.draw.step_items import stage_items
from specc.errors import ConfigError, EngineError
from specc.passes.step.fuse_step import fuse_step
from specc.speculation.plans import MERGE, VOTE, DynamicTree, SpecPlan
from tests.specc.draw.read_svg import Svg

PLANS = {
    "off": SpecPlan.from_widths(()),
    "chain-4": SpecPlan.from_widths((1, 1, 1, 1)),
    "tree-3-2-1": SpecPlan.from_widths((3, 2, 1)),
    "dynamic": SpecPlan.from_dynamic(DynamicTree(16, 4, 4)),
    "merge": SpecPlan.from_widths((2, 1), ("draft_0", "draft_1"), MERGE),
    "vote": SpecPlan.from_widths((1, 1, 1), ("draft_0", "draft_1", "lookup-3"), VOTE),
    "lookup": SpecPlan.from_widths((1, 1, 1, 1), ("lookup-3",)),
}
FOLDED = {
    "reshape", "slice", "unsqueeze", "expand", "repeat", "_to_copy", "clamp", "select",
    "full_like", "arange", "sym_size", "permute", "view", "clone", "contiguous",
}  # fmt: skip


@pytest.fixture(params=list(PLANS), scope="module")
def program(request):
    plan = PLANS[request.param]
    slabs = {"target": 1, **{model: 2 for model in plan.model_names}}
    return json.loads(json.dumps(fuse_step(plan, slabs).to_json()))


@pytest.fixture(scope="module")
def picture(program, tmp_path_factory) -> Svg:
    path = tmp_path_factory.mktemp("pictures") / "step.svg"
    step_svg(program, "step of a plan", path)
    return Svg(path)


def label_of(node: dict) -> str | None:
    """What a node of a program is called in the picture."""
    if node["op"] == "placeholder":
        return node["name"]
    if node["op"] == "call_module":
        return node["target"]
    namespace, operator = node["target"].split(".")[:2]
    drawn = namespace == "specc" or (namespace == "aten" and operator not in FOLDED)
    return operator if drawn else None


def used_by(node: dict) -> set[str]:
    text = json.dumps([node.get("args"), node.get("kwargs")])
    return {part.split('"')[1] for part in text.split('{"node": ')[1:]}


def whole_graph(stage: dict) -> networkx.DiGraph:
    """Everything that the program says, outputs as `name=`."""
    graph = networkx.DiGraph()
    for node in stage["graph"]["nodes"]:
        graph.add_node(node["name"], label=label_of(node))
        graph.add_edges_from((used, node["name"]) for used in used_by(node))
    for output, value in stage["graph"]["output"]["dict"].items():
        graph.add_edge(value["node"], f"{output}=")
        graph.nodes[f"{output}="]["label"] = output
    return graph


def drawn_nodes(stage: dict) -> dict[str, str]:
    """Nodes that have to be drawn, with their labels: a buffer only if it reaches something."""
    whole = whole_graph(stage)
    labels = {n: label for n, label in whole.nodes(data="label") if label is not None}
    buffers = {n["name"] for n in stage["graph"]["nodes"] if n["op"] == "placeholder"}
    for buffer in buffers:
        if not networkx.descendants(whole, buffer) & set(labels):
            del labels[buffer]
    return labels


@pytest.mark.default("dynamic")
def test_every_stage_node_and_buffer_is_there(program, picture):
    assert picture.texts("title") == {"": "step of a plan"}
    names = [stage["name"] for stage in program["stages"]]
    assert list(picture.texts("stage-").values()) == names
    for stage in program["stages"]:
        assert picture.texts(f"{stage['name']}/") == drawn_nodes(stage)


def test_buffers_that_pass_between_stages(program, picture):
    written: set[str] = set()
    want = set()
    for index, stage in enumerate(program["stages"]):
        read = {n for n, label in drawn_nodes(stage).items() if n == label}
        want |= {f"{name}-{index}" for name in read & written}
        written |= set(stage["graph"]["output"]["dict"])
    assert set(picture.texts("pass-")) == want
    assert want, "every step passes its logits on"


def test_lines_say_what_the_program_says(program):
    """Drawn nodes are joined where one's value reaches the other through what is not drawn."""
    for stage in program["stages"]:
        whole, labels = whole_graph(stage), drawn_nodes(stage)
        want = set()
        for source in labels:
            todo, seen = list(whole.successors(source)), set()
            while todo:
                node = todo.pop()
                if node in labels:
                    want.add((source, node))
                elif node not in seen:
                    seen.add(node)
                    todo += whole.successors(node)
        graph = stage_items(stage, set())
        found = set()
        for source in labels:
            todo = list(graph.successors(source))
            while todo:
                node = todo.pop()
                if graph.nodes[node]["item"].kind == "via":
                    todo += graph.successors(node)
                else:
                    found.add((source, node))
        assert found == want


def test_kinds(program):
    for stage in program["stages"]:
        kinds = Counter()
        for node in stage["graph"]["nodes"]:
            if node["op"] == "call_module":
                kinds["program"] += 1
            elif node["op"] == "call_function" and label_of(node) is not None:
                kinds["specc" if node["target"].startswith("specc.") else "operator"] += 1
        kinds["output"] = len(stage["graph"]["output"]["dict"])
        items = [item for _, item in stage_items(stage, set()).nodes(data="item")]
        found = Counter(item.kind for item in items if item.kind not in ("via", "buffer"))
        assert found == Counter({kind: count for kind, count in kinds.items() if count})


def test_nothing_covers_anything(program):
    written: set[str] = set()
    for stage in program["stages"]:
        graph = stage_items(stage, written)
        items = dict(graph.nodes(data="item"))
        for a, b in itertools.combinations(items.values(), 2):
            apart = abs(a.x - b.x) >= (a.width + b.width) / 2 - 1e-6
            assert apart or abs(a.y - b.y) >= (a.height + b.height) / 2 - 1e-6, (a, b)
        for source, reader in graph.edges:
            # from one column to the next, so that no line runs under a box
            assert items[reader].layer == items[source].layer + 1
            assert items[source].x < items[reader].x
        for item in items.values():
            if item.kind == "buffer" and item.text in written:
                assert item.layer == 0
        written |= set(stage["graph"]["output"]["dict"])


def test_all_is_inside(program, picture):
    width, height = picture.size
    last = 0.0
    for stage in program["stages"]:
        places = [picture.place(f"{stage['name']}/{n}") for n in picture.texts(f"{stage['name']}/")]
        for x, y in places:
            assert 0 < x < width
            assert last < y < height
        # bands lie below each other
        last = max(y for _, y in places)


def test_the_same_step_gives_the_same_file(tmp_path):
    program = fuse_step(PLANS["tree-3-2-1"], {"target": 1, "draft_0": 1}).to_json()
    for name in ("a.svg", "b.svg"):
        step_svg(program, "t", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    "content",
    [{}, {"stages": []}, {"stages": [{"name": "draft"}]}, [], {"stages": 3},
     {"stages": [{"name": "a", "graph": {"nodes": [{"op": "x"}], "output": {"dict": {}}}}]}],
    ids=str,
)  # fmt: skip
def test_bad_programs(content, tmp_path):
    with pytest.raises(EngineError):
        step_svg(content, "t", tmp_path / "a.svg")


def test_another_format(tmp_path):
    program = fuse_step(PLANS["off"], {"target": 1}).to_json()
    with pytest.raises(ConfigError):
        step_svg(program, "t", tmp_path / "a.pdf")
