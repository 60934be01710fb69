"""`specc inspect --tree` and `--step`: which figures the pictures of an engine show."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specc.artifact.directory import open_engine
from specc.compiler.extend import extend_engine
from specc.speculation.plans import MERGE, OFF, DynamicTree, SpecPlan
from tests.command_line import assert_refused, invoke
from tests.specc.draw.read_svg import Svg

TREE = SpecPlan.from_widths((2, 1))
ACCEPTANCE = [[0.6, 0.25], [0.5, 0.125]]
DYNAMIC = SpecPlan.from_dynamic(DynamicTree(6, 2, 3))
LOOKUP = SpecPlan.from_widths((1, 1), ("lookup-2",))
MERGED = SpecPlan.from_widths((1, 1), ("draft_0", "lookup-2"), MERGE)


@pytest.fixture
def tuned(tiny_engine: Path, tmp_path: Path) -> Path:
    """The tiny engine with other plans, and measured acceptance of one draft."""
    path = Path(shutil.copytree(tiny_engine, tmp_path / "engine"))
    with extend_engine(path, open_engine(path)) as extension:
        plans = [TREE, DYNAMIC, LOOKUP, MERGED, OFF]
        extension.commit(plans, "fixed", {"acceptance": {"draft_0": ACCEPTANCE}, "plans": {}})
    return path


def test_the_tree_has_its_own_drafts_acceptance(tuned: Path, tmp_path: Path) -> None:
    out = tmp_path / "tree.svg"
    result = invoke("inspect", tuned, "--tree", out)
    assert result.exit_code == 0, result.output
    assert "plan tree-2-1, measured acceptance" in result.stdout
    svg = Svg(out)
    # root, its two children by rank, and the first child of each of those
    edges = svg.texts("edge-")
    assert [float(edges[str(node)]) for node in range(1, 5)] == [0.6, 0.25, 0.5, 0.5]
    expected = 1 + 0.6 + 0.25 + (0.6 + 0.25) * 0.5
    assert f"{expected:.2f} tokens a step expected" in svg.texts("title")[""]


@pytest.mark.parametrize("plan", [LOOKUP, MERGED], ids=lambda plan: plan.name)
def test_nothing_measured_is_said(tuned: Path, tmp_path: Path, plan: SpecPlan) -> None:
    """Of another draft, or of several, one draft's table says nothing."""
    out = tmp_path / "tree.svg"
    result = invoke("inspect", tuned, "--tree", out, "--plan", plan.name)
    assert result.exit_code == 0, result.output
    assert "no acceptance: specc tune measures it" in result.stdout
    assert not Svg(out).texts("edge-")
    # of drafts that are merged, the nodes of both
    assert len(Svg(out).texts("node-")) == plan.num_nodes == (5 if plan is MERGED else 3)


def test_of_a_chain_the_probe_will_do(tiny_engine: Path, tmp_path: Path) -> None:
    """Accepted per depth counts from the root; the picture's figures are those of each edge."""
    path = Path(shutil.copytree(tiny_engine, tmp_path / "engine"))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["default_plan"] = "chain-3"
    manifest["probe"] = manifest["probe"] | {"accepted_per_depth": [0.8, 0.4, 0.0]}
    (path / "manifest.json").write_text(json.dumps(manifest))
    out = tmp_path / "tree.svg"
    assert invoke("inspect", path, "--tree", out).exit_code == 0
    edges = Svg(out).texts("edge-")
    assert [float(edges[str(node)]) for node in range(1, 4)] == [0.8, 0.5, 0.0]


def test_the_step_is_that_of_the_plan(tuned: Path, tmp_path: Path) -> None:
    out = tmp_path / "step.svg"
    result = invoke("inspect", tuned, "--step", out, "--plan", MERGED.name)
    assert result.exit_code == 0, result.output
    assert f"step of plan {MERGED.name}" in result.stdout
    text = out.read_text()
    assert "merge_trees" in text
    assert "lookup" in text


def test_refusals(tuned: Path, tmp_path: Path) -> None:
    out = tmp_path / "tree.svg"
    refused = invoke("inspect", tuned, "--tree", out, "--plan", DYNAMIC.name)
    assert_refused(refused, DYNAMIC.name, "another one at every step", "--step")
    unknown = invoke("inspect", tuned, "--tree", out, "--plan", "chain-9")
    assert_refused(unknown, "--plan chain-9", "off")
    assert not out.exists()
