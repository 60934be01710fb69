"""Who imports whom in specc, read from files alone; imports in functions and for types count."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def linked_package(folder: Path) -> Iterator[Path]:
    """The package as it is installed, as links, beside which a test may put modules.

    Args:
        folder: gets `specc/`, and is where it is found first.
    """
    path = folder / "specc"
    (path / "runtime").mkdir(parents=True)
    for source in (*(ROOT / "specc").iterdir(), ROOT / "passes", ROOT / "kernels"):
        (path / source.name).symlink_to(source)
    for source in (ROOT / "runtime").iterdir():
        (path / "runtime" / source.name).symlink_to(source)
    # what is loaded stays what it is
    loaded = {name: sys.modules.pop(name) for name in list(sys.modules) if name == "specc"}
    sys.path.insert(0, str(folder))
    try:
        yield path
    finally:
        sys.path.remove(str(folder))
        sys.modules.update(loaded)


def import_graph() -> networkx.DiGraph:
    """Modules, and an edge to each that a module imports; within `linked_package`."""
    import grimp

    graph = grimp.build_graph("specc", cache_dir=None, exclude_type_checking_imports=False)
    imports = networkx.DiGraph()
    imports.add_nodes_from(graph.modules)
    imports.add_edges_from(
        (module, imported)
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    )
    return imports
