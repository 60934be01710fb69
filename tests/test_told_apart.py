"""Backends and kinds of drafts are told apart by their facts: other code names neither."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from specc.artifact.backends import backend_names
from specc.drafters.block import BIAS_KINDS
from specc.drafters.registry import ALL
from tests.test_layering import ROOT, module_of, sources

# where backends are told apart: their facts, and what each of them does
BACKENDS = ("specc/artifact/backends.py", "specc/compiler/backends", "runtime/backends")
BACKEND_NAMES = set(backend_names())


def names_of_backends(node: ast.expr) -> bool:
    """The name of a backend, or a collection of nothing but such names."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return bool(node.elts) and all(names_of_backends(item) for item in node.elts)
    return isinstance(node, ast.Constant) and node.value in BACKEND_NAMES


def told_apart(tree: ast.AST) -> Iterator[str]:
    """Code that asks which backend something is, or lists some of them to ask it later."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            others = [side for side in sides if not names_of_backends(side)]
            if len(others) < len(sides) and any("backend" in ast.unparse(x) for x in others):
                yield ast.unparse(node)
        elif isinstance(node, ast.Match) and "backend" in ast.unparse(node.subject):
            yield f"match {ast.unparse(node.subject)}"
        elif isinstance(node, ast.Assign) and names_of_backends(node.value):
            # one name alone is no question
            yield from [] if isinstance(node.value, ast.Constant) else [ast.unparse(node)]


@pytest.mark.parametrize(
    "code",
    [
        'backend == "cuda"', 'manifest.backend in ("cpu", "onnx")', '"onnx" != engine.backend',
        'ON_GPU = ("cuda", "tensorrt")', 'match backend:\n    case "cpu":\n        pass',
    ],
)  # fmt: skip
def test_telling_backends_apart_is_found(code):
    assert list(told_apart(ast.parse(code)))


def found(finds: Callable[[ast.AST], Iterator[str]], paths: Iterable[Path]) -> dict[str, list[str]]:
    """Module → what is found in it, of those in which anything is."""
    trees = {module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    assert len(trees) > 100
    return {name: lines for name, tree in trees.items() if (lines := list(finds(tree)))}


def test_backends_are_told_apart_by_their_facts_alone():
    """Adding one takes its facts and a file on each side: nobody else knows names."""
    others = [p for p in sources() if not p.relative_to(ROOT).as_posix().startswith(BACKENDS)]
    assert found(told_apart, others) == {}


# what is for drafts of every kind; the other modules of these folders are one kind's
ALL_DRAFTERS = {
    "specc.drafters": {"drafter", "facts", "layers", "one_pass", "registry", "views"},
    "specc.passes.drafters": {
        "compiler_drafter", "head_source", "head_spec", "recognise", "registry", "shared_weights",
        "tap_ids",
    },
    "specc.runtime.drafters": {
        "block_choice", "host_drafter", "host_drafts", "prediction", "suffix_index",
    },
}  # fmt: skip
# those two are names of operands and of an operator, too; scores of paths are kinds as well
KINDS = {facts.kind for facts in ALL} - {"self", "lookup"} | set(BIAS_KINDS)
# words of other programs, and of other protocols
_OTHER_WORDS = (
    "specc/bench/peers/", "specc/bench/rounds.py", "specc/server/protocol.py",
    "specc/server/native_apis/",
)  # fmt: skip


def names_of_kinds(tree: ast.AST) -> Iterator[str]:
    """Modules of one kind of draft that code imports, and kinds that it names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in KINDS:
            yield ast.unparse(node)
        if not isinstance(node, ast.ImportFrom):
            continue
        for package, known in ALL_DRAFTERS.items():
            names = [alias.name for alias in node.names] if node.module == package else []
            if node.module and node.module.startswith(f"{package}."):
                names = [node.module.removeprefix(f"{package}.")]
            yield from (f"{package}.{name}" for name in names if name not in known)


@pytest.mark.parametrize(
    "code",
    [
        'head.kind == "medusa"', 'score == "gated"', 'draft == "suffix"',
        'KINDS = ("dflash", "dspark")',
        "from specc.drafters.block import BlockDraft", "from specc.drafters import medusa",
        "from specc.passes.drafters.mtp_spec import MtpSpec",
    ],
)  # fmt: skip
def test_naming_a_kind_of_draft_is_found(code):
    assert list(names_of_kinds(ast.parse(code)))


def test_drafts_are_told_apart_by_their_facts_alone():
    """Adding a kind takes its facts and a file on each side: nobody else knows names."""
    others = [
        path
        for path in sources()
        if "drafters" not in (*path.relative_to(ROOT).parts, path.stem)
        and not path.relative_to(ROOT).as_posix().startswith(_OTHER_WORDS)
    ]
    assert found(names_of_kinds, others) == {}
