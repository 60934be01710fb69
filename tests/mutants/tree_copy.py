"""A copy of the working tree that mutants are put into, one at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.mutant import Mutant

# of these no result depends: prose, results, commands, and mutants, which have a digest
_NOT_SOURCES = ("docs/", "tests/mutants/", "Makefile")
_LINKED_BYTES = 1 << 20


def tree_files(root: Path) -> list[str]:
    """Files of a working tree, from its root: tracked ones, and new ones that are not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    names = sorted({os.fsdecode(name) for name in listed.split(b"\0") if name})
    return [name for name in names if (root / name).is_file()]


def sources_digest(root: Path) -> str:
    """Hash of all files that decide what a test says."""
    digest = hashlib.sha256()
    for name in tree_files(root):
        if not name.startswith(_NOT_SOURCES) and not name.endswith(".md"):
            content = hashlib.sha256((root / name).read_bytes()).digest()
            digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()[:16]


def commit_of(root: Path) -> str | None:
    """The commit that is checked out; None where there is none yet."""
    command = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True)
    return found.stdout.strip() or None


class TreeCopy:
    """A copy of a working tree, made anew.

    Packages whose folder has another name than they (`packages` of pyproject.toml) are links in
    it, so that with the copy alone on PYTHONPATH nothing is imported from where it was copied.

    Args:
        root: the working tree, a git repository.
        path: of the copy; what is there is removed.
    """

    def __init__(self, root: Path, path: Path) -> None:
        self.path = path
        shutil.rmtree(path, ignore_errors=True)
        for name in tree_files(root):
            source, target = root / name, path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # times stay: caches of byte code go by them
            if source.stat().st_size < _LINKED_BYTES:
                shutil.copy2(source, target)
            else:
                os.link(source, target)
        self._link_packages()

    def _link_packages(self) -> None:
        project = self.path / "pyproject.toml"
        if not project.is_file():
            return
        tools = tomllib.loads(project.read_text(encoding="utf-8")).get("tool", {})
        folders = tools.get("scikit-build", {}).get("wheel", {}).get("packages", {})
        for package, folder in sorted(folders.items()):
            link = self.path.joinpath(*package.split("/"))
            if not link.exists():
                link.symlink_to(os.path.relpath(self.path / folder, link.parent))

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Inside, the copy has the mutant in it.

        Raises:
            MutantError: it does not apply.
        """
        path = self.path / mutant.file
        text, times = path.read_text(encoding="utf-8"), path.stat()
        # what is compiled goes by times that are newer than what was made
        is_compiled = path.suffix in (".cpp", ".h", ".txt")
        changed = mutant.apply(text).encode()
        # byte code is kept by time in whole seconds and size: a time that goes by the content
        seconds = 10**9 + int.from_bytes(hashlib.sha256(changed).digest()[:3])
        try:
            path.write_bytes(changed)
            if not is_compiled:
                os.utime(path, (seconds, seconds))
            yield
        finally:
            path.write_text(text, encoding="utf-8")
            if not is_compiled:
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
