"""What a file of tests depends on, by the imports of what it imports, and a hash of all of it.

Imports in functions count, those for types do not. Where a module is found by its name, all that
may be meant count. A file that starts Python, or a command of specc, depends on everything. What
this reading of sources overlooks, and a run of the tests imports, `tests/changed.py` adds.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

from tests.kept import ROOT, installed

SOURCES = ("specc", "passes", "runtime", "kernels")
# of every file: versions, options, and how the library of operators is compiled
COMMON = ("pyproject.toml", "constraints.txt", "CMakeLists.txt")
# modules that find others by name → where those are, and the words without which no test gets there
_BY_NAME: dict[str, tuple[str, bool]] = {
    "specc.kernels.ops": ("specc.kernels.operators.", False),
    "specc.kernels.cuda.register": ("specc.kernels.cuda.", False),
    "specc.compiler.backends.registry": ("specc.compiler.backends.", True),
    "specc.runtime.backends.registry": ("specc.runtime.backends.", True),
}
# the default of tests, and of users: every test may get there
_ALWAYS = ("cpu", "eager", "registry", "base")
# who lists backends may mean all of them
_LISTS = ("specc.artifact.backends", *(name for name, (_, chosen) in _BY_NAME.items() if chosen))
# what is forked is in memory; what is started, or is a command of specc, may be anything
_STARTS_PYTHON = re.compile(r"\bsys\.executable\b|\bcommand_line import .*\bMAIN\b")
# name sources as keys of what they keep, or choose tests, or have a word for those who use it
_KEEPERS = ("kept", "engines", "traces", "changed", "closure", "longest_first", "command_line")
# what nothing depends on but the order of tests, and what is made
_NOT_READ = {"file_seconds.json", "__pycache__", "build", "lib"}
_NATIVE = "specc.kernels.native"


class Closures:
    """Closures of the files of tests of a checkout.

    Args:
        cache: file that keeps what was read of sources that have not changed since; None keeps
            nothing.
    """

    def __init__(self, root: Path = ROOT, cache: Path | None = None) -> None:
        self.root = root
        paths = [
            path.relative_to(root)
            for folder in (*SOURCES, "tests")
            for path in sorted((root / folder).rglob("*.py"))
        ]
        self.paths = {_module(path): path for path in paths}
        self._read = _Reader(root, set(self.paths), cache)
        self._imports = {name: {*self._read(path)["imports"]} for name, path in self.paths.items()}
        self._read.write()
        self._by_prefix = {
            prefix: {name for name in self.paths if name.startswith(prefix)}
            for prefix, _ in _BY_NAME.values()
        }

    def tests(self) -> list[str]:
        """Files of tests, relative to the checkout."""
        found = [str(path) for path in self.paths.values() if path.parts[0] == "tests"]
        return sorted(name for name in found if Path(name).name.startswith("test_"))

    def modules(self, file: str) -> set[str]:
        """Modules that tests of a file may import."""
        found = self._reach([_module(Path(file)), *self._conftests(file)])
        parts: dict[str, list[str]] = {}
        takes: dict[str, set[str]] = {}
        for conftest in self._conftests(file):
            for name, part in self._read(self.paths[conftest])["parts"].items():
                parts.setdefault(name, []).extend(part["imports"])
                takes.setdefault(name, set()).update(part["takes"])
        while True:
            words = self._words(found)
            # of conftest.py counts what runs for everyone, and what has a name that stands here
            wanted = [name for name in parts if not name or name in words]
            for name in wanted:
                wanted += [x for x in takes[name] if x in parts and x not in wanted]
            more = {module for name in wanted for module in parts[name]}
            for name, (prefix, is_chosen) in _BY_NAME.items():
                if name in found:
                    more |= self._named(prefix, is_chosen, words, found)
            if more <= found:
                return found
            found |= self._reach(more)

    def files(self, file: str, more: Iterable[str] = ()) -> set[str]:
        """Files that decide what tests of a file say, relative to the checkout.

        Args:
            more: modules that its tests were seen to import.
        """
        modules = self.modules(file) | self._reach(name for name in more if name in self.paths)
        found = {*COMMON}.union(*(self._beside(name) for name in modules))
        tests = self._speaking(modules)
        if any(self._starts_python(name) for name in tests):
            found |= self._below(*SOURCES)
        elif _NATIVE in modules:
            found |= self._below("kernels/cpu")
        return found.union(*(self._read_by(name) for name in tests))

    def hash(self, file: str, more: Iterable[str] = ()) -> str:
        """Hash of the names and contents of these files, and of packages."""
        lines = [repr(installed()), *sorted(map(self._content, self.files(file, more)))]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def _named(self, prefix: str, is_chosen: bool, words: set[str], found: set[str]) -> set[str]:
        """Modules below a prefix that may be meant."""
        below = self._by_prefix[prefix]
        tests = {name for name in found if name.startswith("tests.")}
        if not is_chosen or any(self._imports[name] & {*_LISTS} for name in tests):
            return below
        named = {name: name.removeprefix(prefix).split(".")[0] for name in below}
        said = " ".join(words).lower()
        return {name for name, word in named.items() if word in _ALWAYS or word in said}

    def _reach(self, names: Iterable[str]) -> set[str]:
        return set().union(*(self._reach_of(name) for name in names))

    @functools.cache  # noqa: B019
    def _reach_of(self, first: str) -> frozenset[str]:
        found: set[str] = set()
        waiting = [first]
        while waiting:
            if (name := waiting.pop()) not in found:
                found.add(name)
                waiting += self._imports[name]
        return frozenset(found)

    def _conftests(self, file: str) -> list[str]:
        folders = Path(file).parents
        names = [_module(folder / "conftest.py") for folder in folders if folder.parts]
        return [name for name in names if name in self.paths]

    def _speaking(self, modules: set[str]) -> list[str]:
        """Tests and helpers, whose words count; those of fixtures do where their name stands."""
        skipped = ("conftest", *_KEEPERS)
        tests = [name for name in modules if name.startswith("tests.")]
        return [name for name in tests if name.rpartition(".")[2] not in skipped]

    def _words(self, modules: set[str]) -> set[str]:
        return set().union(*(self._words_of(name) for name in self._speaking(modules)))

    @functools.cache  # noqa: B019
    def _words_of(self, name: str) -> frozenset[str]:
        return frozenset(re.findall(r"\w+", self._text(name)))

    @functools.cache  # noqa: B019
    def _read_by(self, name: str) -> frozenset[str]:
        """Files that a test names: "examples", "README.md", "tests/gpu"."""
        words = set(re.findall(r"[\"']([\w./-]+)[\"']", self._text(name)))
        # a word alone is a folder where paths of the checkout are made
        is_apt = re.search(r"\b(ROOT|parents|__file__|cwd)\b", self._text(name)) is not None
        words = {x for x in words if not x.startswith((".", "/")) and (is_apt or "/" in x)}
        return self._below(*sorted(word for word in words if (self.root / word).exists()))

    @functools.cache  # noqa: B019
    def _text(self, name: str) -> str:
        return (self.root / self.paths[name]).read_text(encoding="utf-8")

    @functools.cache  # noqa: B019
    def _starts_python(self, name: str) -> bool:
        return _STARTS_PYTHON.search(self._text(name)) is not None

    @functools.cache  # noqa: B019
    def _beside(self, name: str) -> frozenset[str]:
        """A module, and files of its folder that are no modules."""
        path = self.root / self.paths[name]
        beside = (x for x in path.parent.iterdir() if x.suffix not in (".py", ".md"))
        data = (x for x in beside if x.is_file() and x.name not in _NOT_READ)
        return frozenset(str(x.relative_to(self.root)) for x in (path, *data))

    @functools.cache  # noqa: B019
    def _below(self, *names: str) -> frozenset[str]:
        paths = [self.root / name for name in names]
        found = [p for path in paths for p in ([path] if path.is_file() else path.rglob("*"))]
        return frozenset(
            str(path.relative_to(self.root))
            for path in found
            if path.is_file() and not _NOT_READ & {*path.relative_to(self.root).parts}
        )

    @functools.cache  # noqa: B019
    def _content(self, name: str) -> str:
        path = self.root / name
        text = path.read_bytes() if path.is_file() else b""
        return f"{name} {hashlib.sha256(text).hexdigest()}"


class _Reader:
    """What is read of each module: imports, and the parts of a conftest."""

    def __init__(self, root: Path, names: set[str], cache: Path | None) -> None:
        self._root, self._names, self._cache = root, names, cache
        self._kept: dict[str, Any] = {}
        if cache is not None and cache.is_file():
            self._kept = json.loads(cache.read_text(encoding="utf-8"))
        # imports are resolved by which modules there are, and by how they are read
        key = sorted(names), Path(__file__).read_text(encoding="utf-8")
        key_hash = hashlib.sha256(repr(key).encode()).hexdigest()
        if self._kept.pop("", None) != key_hash:
            self._kept = {}
        self._key_hash = key_hash
        self._exports = _exports(root)

    def __call__(self, path: Path) -> dict[str, Any]:
        status = (self._root / path).stat()
        stamp = [status.st_size, status.st_mtime_ns]
        kept = self._kept.get(str(path))
        if kept is None or kept["stamp"] != stamp:
            kept = self._kept[str(path)] = {"stamp": stamp, **self._parse(path)}
        return kept

    def write(self) -> None:
        if self._cache is not None:
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            draft = self._cache.with_suffix(".part")
            draft.write_text(json.dumps({"": self._key_hash, **self._kept}), encoding="utf-8")
            draft.replace(self._cache)

    def _parse(self, path: Path) -> dict[str, Any]:
        tree = ast.parse((self._root / path).read_bytes())
        parts: dict[str, dict[str, list[str]]] = {}
        imports = self._imports(tree) - {_module(path)}
        # of the package's names each is loaded where it is asked for
        if path == Path("specc/__init__.py"):
            imports = set()
        if path.name == "conftest.py":
            parts, imports = self._parts(tree), set()
        return {"imports": sorted(imports), "parts": parts}

    def _parts(self, tree: ast.Module) -> dict[str, dict[str, list[str]]]:
        """Statements of a conftest by the names that they bind: imports, and names that they use.

        What runs for everyone has the name "". Hooks choose tests and decide no result.
        """
        found: dict[str, dict[str, set[str]]] = {"": {"imports": set(), "takes": set()}}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("pytest_"):
                continue
            names = [""]
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.asname or alias.name for alias in node.names]
            elif isinstance(node, ast.ClassDef) or _is_asked_for(node):
                names = [node.name]
            for name in names:
                part = found.setdefault(name, {"imports": set(), "takes": set()})
                part["imports"] |= self._imports(node)
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Name | ast.arg):
                        part["takes"].add(inner.id if isinstance(inner, ast.Name) else inner.arg)
        return {name: {key: sorted(x) for key, x in part.items()} for name, part in found.items()}

    def _imports(self, tree: ast.AST) -> set[str]:
        found: set[str] = set()
        waiting: list[ast.AST] = [tree]
        while waiting:
            node = waiting.pop()
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                # specc.compile, after `import specc`
                names = [f"specc.{node.attr}"] if node.value.id == "specc" else []
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # modules that are loaded by their name
                words = re.fullmatch(r"((?:specc|tests)\.[\w.]+)(?::\w+)?", node.value)
                names = [words[1]] if words else []
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                waiting += node.orelse
            else:
                waiting += ast.iter_child_nodes(node)
            for name in names:
                name = self._exports.get(name, name)
                while name:
                    found |= {name} & self._names
                    name = name.rpartition(".")[0]
        return found


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts if parts[0] in ("specc", "tests") else ("specc", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _exports(root: Path) -> dict[str, str]:
    """Names of the package that are loaded when somebody asks for them → their modules."""
    path = root / "specc" / "__init__.py"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return {
        f"specc.{name}": module for name, module in re.findall(r'"(\w+)": "(specc[\w.]+)"', text)
    }


def _is_asked_for(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    """Whether it is a function that runs where its name stands, and not for all tests."""
    return isinstance(node, ast.FunctionDef) and not any(
        "autouse=True" in ast.unparse(mark) for mark in node.decorator_list
    )
