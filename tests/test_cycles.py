"""No module imports itself through others: imports inside functions and those for types count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

from tests.import_graph import import_graph, linked_package


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Path]:
    with linked_package(tmp_path) as path:
        yield path


def cycles() -> list[set[str]]:
    """Modules that import each other, directly or through others of the same set."""
    found = networkx.strongly_connected_components(import_graph())
    return [modules for modules in found if len(modules) > 1]


def test_no_module_imports_itself(package: Path) -> None:
    assert not cycles()


TYPING = """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specc.runtime.second import B
"""
LAZY = """
def f():
    from specc.runtime import first
"""


def test_imports_for_types_and_inside_functions_count(package: Path) -> None:
    (package / "runtime/first.py").write_text(TYPING, encoding="utf-8")
    (package / "runtime/second.py").write_text(LAZY, encoding="utf-8")
    assert {"specc.runtime.first", "specc.runtime.second"} in cycles()
