"""Figures of the layout: how large modules are, which have one user, where backends are compared.

    python -P tests/house.py [--root CHECKOUT] [--json FILE] [--list]

It reads source only, so that `--root` may be a checkout of any commit. `docs/notebook/house.md`
holds its figures from before and after the packages.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDERS = ("specc", "passes", "runtime", "kernels")
LONG, SHORT, THIN = 400, 60, 100
# comparisons that a backend as an object makes needless
_COMPARED = re.compile(r"\bbackend (?:==|!=|in|not in) [(\"'A-Z_]|\.backend (?:==|!=|in|not in) ")
_ASKED = re.compile(r"\b(?:hasattr|isinstance)\((?:self\.)?_?step\b|getattr\((?:self\.)?_?policy\b")


def module_name(path: Path) -> str:
    """The dotted name of a file, relative to the checkout: specc.passes.base."""
    parts = list(path.with_suffix("").parts)
    if parts[0] != "specc":
        parts.insert(0, "specc")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module, names: set[str]) -> Iterator[tuple[str, bool]]:
    """Modules of specc that a module imports, and whether it does so when it is loaded."""
    late = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            joined = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name in names else node.module for name in joined]
        for name in found:
            if name in names:
                yield name, id(node) not in late


def components(edges: dict[str, set[str]]) -> list[list[str]]:
    """Cycles of a graph: its strongly connected components of more than one module."""
    import networkx

    graph = networkx.DiGraph([(a, b) for a, others in edges.items() for b in others])
    found = [sorted(part) for part in networkx.strongly_connected_components(graph)]
    return sorted(part for part in found if len(part) > 1)


def figures(root: Path) -> dict[str, Any]:
    paths = sorted(
        path.relative_to(root) for folder in FOLDERS for path in (root / folder).rglob("*.py")
    )
    texts = {module_name(path): (root / path).read_text(encoding="utf-8") for path in paths}
    names = set(texts)
    packages = {module_name(path) for path in paths if path.name == "__init__.py"}
    edges: dict[str, set[str]] = defaultdict(set)
    first: dict[str, set[str]] = defaultdict(set)
    users: dict[str, set[str]] = defaultdict(set)
    for name, text in texts.items():
        for other, is_first in imported(ast.parse(text), names):
            if other != name:
                edges[name].add(other)
                users[other].add(name)
                if is_first:
                    first[name].add(other)
    length = {name: text.count("\n") for name, text in texts.items()}
    modules = sorted(names - packages)
    sites = {
        kind: [
            f"{n}:{i}"
            for n, t in texts.items()
            for i, x in enumerate(t.splitlines(), 1)
            if p.search(x)
        ]
        for kind, p in (("backend compared", _COMPARED), ("step or policy asked", _ASKED))
    }
    tests = [p.read_text(encoding="utf-8").count("\n") for p in (root / "tests").rglob("*.py")]
    return {
        "modules": len(modules),
        "in_folders": {f: sum(p.parts[0] == f for p in paths) for f in FOLDERS},
        "largest_folder": max(
            (sum(q.parent == p.parent for q in paths), str(p.parent)) for p in paths
        ),
        f"over_{LONG}_lines": [f"{n} {length[n]}" for n in modules if length[n] > LONG],
        f"under_{SHORT}_lines": [f"{n} {length[n]}" for n in modules if length[n] < SHORT],
        f"one_user_under_{THIN}_lines": [
            f"{n} {length[n]} {next(iter(users[n]))}"
            for n in modules
            if length[n] < THIN and len(users[n]) == 1
        ],
        "sites": sites,
        "cycles_when_loaded": components(first),
        "cycles": components(edges),
        "source_lines": sum(length.values()),
        "test_files": len(tests),
        "test_lines": sum(tests),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="names, not only their number")
    options = parser.parse_args()
    found = figures(options.root)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, value in found.items():
        if isinstance(value, dict) and any(isinstance(part, list) for part in value.values()):
            value = {key: part if options.list else len(part) for key, part in value.items()}
        elif isinstance(value, list) and not options.list:
            value = len(value)
        print(f"{name}: {json.dumps(value, indent=1) if options.list else value}")


if __name__ == "__main__":
    main()
