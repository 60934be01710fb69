"""The chains of files in docs/design/structure.md lead downwards, from import to import."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import networkx
import pytest

from tests.import_graph import import_graph, linked_package

ROOT = Path(__file__).resolve().parent.parent.parent
_BLOCK = re.compile(r"## Chains of files\n.*?```text\n(.*?)```", re.DOTALL)


def read_chains() -> list[list[str]]:
    """Files of each chain; a line that begins with an arrow goes on with the one before."""
    match = _BLOCK.search((ROOT / "docs/design/structure.md").read_text(encoding="utf-8"))
    assert match is not None
    text = re.sub(r"\n\s+→", " →", match[1])
    return [line.strip().split(" → ") for line in text.splitlines() if ".py" in line]


CHAINS = read_chains()


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> networkx.DiGraph:
    with linked_package(tmp_path_factory.mktemp("linked")):
        return import_graph()


def module_of(file: str) -> str:
    path = file.removesuffix(".py").replace("/", ".")
    return path if path.startswith("specc.") else f"specc.{path}"


def test_there_are_chains() -> None:
    assert len(CHAINS) >= 8
    assert all(len(chain) > 1 for chain in CHAINS)


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain[0])
def test_every_file_imports_the_next_and_none_before_it(
    graph: networkx.DiGraph, chain: list[str]
) -> None:
    modules = [module_of(file) for file in chain]
    for place, (first, second) in enumerate(itertools.pairwise(modules), start=1):
        assert graph.has_edge(first, second)
        below = networkx.descendants(graph, second)
        assert not below.intersection(modules[:place])
