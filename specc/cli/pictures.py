"""`specc inspect --tree` and `--step`: pictures of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specc.artifact.directory import open_engine
from specc.artifact.manifest import PROFILE_FILE, Manifest
from specc.artifact.manifest_entries import PlanEntry
from specc.cli import render
from specc.close_name import advice
from specc.cost.acceptance import node_acceptance
from specc.errors import ConfigError, RequestError
from specc.speculation.plans import MERGE, SpecPlan
from specc.speculation.tree import TokenTree
from specc.system.json_file import read_engine_json

_AGAIN = "compile or copy the engine again"


def draw_pictures(
    directory: Path, plan: str | None, *, tree: Path | None, step: Path | None
) -> None:
    """Draw what is asked for and say where it is.

    Args:
        plan: of it; None is the default.
        tree: file for the tree, with measured acceptance where there is some.
    Raises:
        SpeccError: of the engine; no such plan; a tree whose topology is data.
    """
    manifest = open_engine(directory)
    entry = _entry_of(manifest, plan or manifest.default_plan)
    console = render.make_console()
    if tree is not None:
        from specc.draw.tree import tree_svg

        chosen = entry.plan
        shape = _shape_of(chosen)
        acceptance = _acceptance_of(directory, manifest, chosen, shape)
        tree_svg(shape, acceptance, f"plan {chosen.name}", tree)
        source = "measured acceptance" if acceptance else "no acceptance: specc tune measures it"
        size = (
            "; at most so many nodes, fewer where drafts agree" if chosen.combine == MERGE else ""
        )
        console.print(f"{tree}: plan {chosen.name}, {source}{size}", soft_wrap=True)
    if step is not None:
        from specc.draw.step import step_svg

        program = read_engine_json(directory / entry.file, "a step program", _AGAIN)
        step_svg(program, f"step of plan {entry.name}", step)
        console.print(f"{step}: step of plan {entry.name}", soft_wrap=True)


def _entry_of(manifest: Manifest, name: str) -> PlanEntry:
    for entry in manifest.plans:
        if entry.name == name:
            return entry
    names = [entry.name for entry in manifest.plans]
    do = advice(name, names, "choose one of them")
    raise RequestError(f"plan {name!r}", f"a plan of this engine: {', '.join(names)}", do)


def _shape_of(plan: SpecPlan) -> TokenTree:
    if plan.dynamic is not None:
        raise ConfigError(
            f"plan {plan.name}, whose tree is another one at every step",
            "a tree of static shape",
            "choose another plan with --plan, or draw --step",
        )
    return plan.largest_tree


def _acceptance_of(
    directory: Path, manifest: Manifest, plan: SpecPlan, tree: TokenTree
) -> list[float] | None:
    """Acceptance of every node as `specc tune` measured it, or as the compiler's probe did."""
    table: Any = None
    if PROFILE_FILE in manifest.files:
        profile = read_engine_json(directory / PROFILE_FILE, "a profile", _AGAIN)
        table = profile.get("acceptance", {}).get(plan.drafts[0])
    if table is None and manifest.probe and plan.name == manifest.default_plan:
        table = _table_of_probe(manifest.probe, tree)
    if not table or plan.combine:
        return None
    return node_acceptance(tree, table)


def _table_of_probe(probe: dict[str, Any], tree: TokenTree) -> list[list[float]] | None:
    """Of a chain, what depth by depth was accepted; of wider trees the probe knows no ranks."""
    if tree.num_nodes != tree.max_depth + 1:
        return None
    shares = [1.0, *probe["accepted_per_depth"]]
    pairs = zip(shares[1:], shares[:-1], strict=True)
    return [[own / before if before else 0.0] for own, before in pairs]
