"""What of the check's own code a result depends on: a digest that changes when it does.

The source of specc and of the kernel tests is a fact of the whole report (`facts.source_facts`);
here is the rest: the task itself, the module of its entry, and what that imports of `tests`.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.gpu.facts import digest
from tests.gpu.importable import ROOT
from tests.gpu.tasks import Task

# of every process
PROCESS = ("tests.gpu.child",)
# stand in for a GPU in rehearsals: no result of one depends on them
NOT_ON_A_GPU = ("tests.gpu.simulated", "tests.gpu.faults")


def code_of(task: Task) -> str:
    """Digest of a task, and of the files of `tests` that its process imports."""
    arguments = json.dumps(task.arguments, sort_keys=True).replace(str(ROOT), "")
    own = f"{task.entry} {arguments} {sorted(task.environment.items())} {bool(task.sanitizer)}"
    return hashlib.sha256(f"{digest(files_of(task))} {own}".encode()).hexdigest()


def files_of(task: Task) -> set[Path]:
    """Files of `tests` that a task's process imports."""
    modules = [task.entry.partition(":")[0], *PROCESS]
    path = Path(task.arguments.get("path", ""))
    if path.is_relative_to(ROOT):
        modules.append(".".join(path.relative_to(ROOT).with_suffix("").parts))
    return imported_by(modules)


def imported_by(modules: Iterable[str]) -> set[Path]:
    """Files of these modules and of what they import of `tests`, in functions, too."""
    found: set[Path] = set()
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        path = ROOT / f"{name.replace('.', '/')}.py"
        if name in NOT_ON_A_GPU or path in found or not path.is_file():
            continue
        found.add(path)
        waiting += _imports(ast.parse(path.read_text(encoding="utf-8")))
    return found


def _imports(tree: ast.AST) -> Iterator[str]:
    """Names under `tests` that may be modules: what is imported from a folder may be one."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if name.startswith("tests."))
