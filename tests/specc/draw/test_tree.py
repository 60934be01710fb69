"""Pictures of trees: everything is there, in its place, and nothing covers anything."""

from __future__ import annotations

import itertools
import math
import sys

import pytest

from specc.cost.acceptance import expected_tokens
from specc.cost.best_tree import best_tree
from specc.draw.tree import tree_svg
from specc.errors import ConfigError, OutputError
from specc.speculation.tree import TokenTree
from tests.specc.draw.read_svg import Svg

TABLE = [[0.72, 0.12, 0.06, 0.03, 0.01]]
RADIUS = 14


def acceptance_of(tree: TokenTree) -> list[float]:
    ranks = [0] * tree.num_nodes
    for parent in range(tree.num_nodes):
        for rank, child in enumerate(tree.children(parent)):
            ranks[child] = rank
    return [1.0, *(TABLE[0][rank] for rank in ranks[1:])]


def draw(tree: TokenTree, tmp_path, acceptance="table", title="a tree") -> Svg:
    path = tmp_path / "tree.svg"
    given = acceptance_of(tree) if acceptance == "table" else acceptance
    tree_svg(tree, given, title, path)
    return Svg(path)


TREES = {
    "root": TokenTree.chain(0),
    "chain": TokenTree.chain(4),
    "expansion": TokenTree.from_widths((3, 2, 1)),
    "best 32": best_tree(TABLE, 32),
    "best 64": best_tree(TABLE, 64),
}


@pytest.mark.parametrize("name", TREES)
def test_every_node_and_edge_is_labelled(name, tmp_path):
    tree = TREES[name]
    svg, acceptance = draw(tree, tmp_path), acceptance_of(tree)
    nodes, edges = svg.texts("node-"), svg.texts("edge-")
    assert set(map(int, nodes)) == set(range(tree.num_nodes))
    assert set(map(int, edges)) == set(range(1, tree.num_nodes))
    for node in range(tree.num_nodes):
        chance, above = 1.0, node
        while above:
            chance, above = chance * acceptance[above], tree.parents[above]
        assert float(nodes[str(node)]) == pytest.approx(chance, abs=0.00501)
        if node:
            assert float(edges[str(node)]) == pytest.approx(acceptance[node], abs=0.00501)
    assert len(svg.marks("nodes")) == tree.num_nodes
    assert len(svg.marks("dots")) == 0
    assert len(svg.paths("edges")) == tree.num_nodes - 1
    size = f"{tree.num_nodes} node{'s' if tree.num_nodes > 1 else ''}, depth {tree.max_depth}"
    expected = f"{expected_tokens(tree, TABLE):.2f} tokens a step expected"
    assert svg.texts("title") == {"": f"a tree: {size}, {expected}"}


@pytest.mark.parametrize("name", [*TREES, "best 1024", "star"])
def test_places(name, tmp_path):
    """Levels are rows, children lie below their parent, circles do not touch, all is inside."""
    tree = TREES.get(name) or {
        "best 1024": best_tree(TABLE, 1024),
        "star": TokenTree((-1, *[0] * 200)),
    }.get(name)
    svg = draw(tree, tmp_path, None)
    circles, dots = svg.marks("nodes"), svg.marks("dots")
    assert len(circles) + len(dots) == tree.num_nodes
    # the likeliest come first, and without probabilities that is the order of the nodes
    places = [*circles, *dots]
    rows = [{round(places[node][1], 2) for node in level} for level in tree.levels]
    assert all(len(row) == 1 for row in rows)
    heights = [row.pop() for row in rows]
    assert heights == sorted(heights)
    assert len(set(heights)) == len(heights)
    for node in range(tree.num_nodes):
        children = [places[child][0] for child in tree.children(node)]
        if children:
            assert min(children) - 1e-3 <= places[node][0] <= max(children) + 1e-3
            assert children == sorted(children)
    for a, b in itertools.combinations(circles, 2):
        assert math.dist(a, b) > 2 * RADIUS
    for a, b in itertools.product(circles, dots):
        assert math.dist(a, b) > RADIUS + 2
    width, height = svg.size
    for x, y in places:
        assert RADIUS < x < width - RADIUS
        assert RADIUS < y < height - RADIUS


def test_numbers_where_acceptance_is_unknown(tmp_path):
    svg = draw(TREES["expansion"], tmp_path, None, title="")
    assert svg.texts("node-") == {str(node): str(node) for node in range(16)}
    assert svg.texts("edge-") == {}
    assert svg.texts("title") == {"": "16 nodes, depth 3"}


def test_labels_are_thinned(tmp_path):
    """The 64 likeliest of 1024 nodes have labels; the others are dots."""
    tree = best_tree(TABLE, 1024)
    svg, acceptance = draw(tree, tmp_path), acceptance_of(tree)
    chances = [1.0]
    for node in range(1, tree.num_nodes):
        chances.append(chances[tree.parents[node]] * acceptance[node])
    labelled = set(map(int, svg.texts("node-")))
    assert len(labelled) == 64
    least = min(chances[node] for node in labelled)
    assert all(chances[node] <= least for node in set(range(1024)) - labelled)
    assert len(svg.marks("nodes")) == 64
    assert len(svg.marks("dots")) == 960
    assert len(svg.paths("edges")) == 1023
    # edges are labelled where both ends are to be seen
    assert set(map(int, svg.texts("edge-"))) <= labelled
    assert len(svg.texts("edge-")) > 50
    assert svg.size[0] < 72 * 60


def test_edge_labels_do_not_cover_each_other(tmp_path):
    for name in ("best 64", "expansion"):
        svg = draw(TREES[name], tmp_path)
        places = [svg.place(f"edge-{node}") for node in svg.texts("edge-")]
        for (x, y), (other_x, other_y) in itertools.combinations(places, 2):
            assert abs(x - other_x) > 14 or abs(y - other_y) > 8


@pytest.mark.parametrize(
    ("chance", "text"),
    [(1, "1"), (0.999, ".99"), (0.994, ".99"), (0.5, ".50"), (0.0051, ".01"), (0.0049, ".005"),
     (0.0012, ".001"), (0.00051, ".0005"), (0.0004, "0"), (0, "0")],
)  # fmt: skip
def test_short_numbers(chance, text, tmp_path):
    svg = draw(TokenTree.chain(1), tmp_path, [1.0, chance])
    assert svg.texts("edge-") == {"1": text}


def test_likely_nodes_are_dark(tmp_path):
    svg = draw(TokenTree.chain(2), tmp_path, [1.0, 0.8, 0.1])
    styles = [use.get("style") for use in svg.groups["nodes"].iter() if use.tag.endswith("use")]
    shades = [sum(bytes.fromhex(s.split("fill: #")[1][:6])) for s in styles]
    assert shades == sorted(shades)
    assert len(set(shades)) == 3


def test_the_same_tree_gives_the_same_file(tmp_path):
    for name in ("a.svg", "b.svg"):
        tree_svg(TREES["best 32"], acceptance_of(TREES["best 32"]), "t", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_no_figure_stays_behind(tmp_path):
    from matplotlib._pylab_helpers import Gcf

    before = len(Gcf.figs)
    draw(TREES["chain"], tmp_path)
    assert len(Gcf.figs) == before


def test_bad_input(tmp_path):
    chain = TokenTree.chain(2)
    with pytest.raises(ConfigError, match="2 probabilities for 3 nodes"):
        tree_svg(chain, [1.0, 0.5], "t", tmp_path / "a.svg")
    with pytest.raises(ConfigError, match=r"probability 1\.5 of node 2"):
        tree_svg(chain, [1.0, 0.5, 1.5], "t", tmp_path / "a.svg")
    with pytest.raises(ConfigError, match=r"ends in \.svg"):
        tree_svg(chain, None, "t", tmp_path / "a.png")
    with pytest.raises(OutputError):
        tree_svg(chain, None, "t", tmp_path / "absent" / "a.svg")


@pytest.mark.parametrize("library", ["matplotlib", "networkx"])
def test_a_missing_library(library, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=library):
        tree_svg(TokenTree.chain(2), None, "t", tmp_path / "a.svg")
