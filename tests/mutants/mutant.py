"""What a mutant is, how it is read, and what can be known of it without running anything."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# how the named tests may end, besides by a failure of their own
ENDS = ("failure", "crash", "hang")
_KEYS = {"breaks", "find", "replace", "tests", "ends", "limit_s"}
_NEEDED = _KEYS - {"ends", "limit_s"}
_CPP = (".cpp", ".h")


class MutantError(Exception):
    """A mutant that cannot be read, or does not apply."""


@dataclass(frozen=True)
class Mutant:
    """One thing that is broken, and the tests that have to notice.

    Args:
        name: the file that it is described in without its suffix, a slash, and its own name.
        file: path from the repository's root of what is changed.
        breaks: what goes wrong, in one line.
        find: text that occurs once in the file.
        replace: what stands in its place.
        tests: node ids of pytest; each has to fail. With parameters only where they matter.
        ends: "failure", or what counts as one besides: "crash" where the process may die, "hang"
            where a test may never end.
        limit_s: seconds for each test; None is the runner's.
    """

    name: str
    file: str
    breaks: str
    find: str
    replace: str
    tests: tuple[str, ...]
    ends: str = "failure"
    limit_s: float | None = None

    def digest(self) -> str:
        """Hash of all that a result of this mutant depends on, besides the sources."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def apply(self, text: str) -> str:
        """Text of the file with this mutant in it.

        Raises:
            MutantError: what it replaces is not there, or more than once.
        """
        if (count := text.count(self.find)) != 1:
            raise MutantError(
                f"{self.name}: its text occurs {count} times, not once, in {self.file}"
            )
        return text.replace(self.find, self.replace)


def read_mutants(directory: Path) -> list[Mutant]:
    """All mutants of the `.toml` files of a directory, by file and in their order there.

    Raises:
        MutantError: a file or an entry is malformed, or two have one name.
    """
    found = [mutant for path in sorted(directory.glob("*.toml")) for mutant in _read_file(path)]
    names = [mutant.name for mutant in found]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise MutantError(f"names that are there twice: {', '.join(repeated)}")
    return found


def _read_file(path: Path) -> Iterator[Mutant]:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MutantError(f"{path.name}: {error}") from error
    for file, entries in data.items():
        if not isinstance(entries, dict) or not all(isinstance(x, dict) for x in entries.values()):
            raise MutantError(f"{path.name}: {file}: not a table of mutants, name = {{breaks = …}}")
        for name, entry in entries.items():
            yield _mutant(f"{path.stem}/{name}", file, entry)


def _mutant(name: str, file: str, entry: dict[str, Any]) -> Mutant:
    if wrong := sorted(_NEEDED - set(entry)) or sorted(set(entry) - _KEYS):
        raise MutantError(f"{name}: missing or unknown: {', '.join(wrong)}")
    tests = entry["tests"]
    if not isinstance(tests, list) or not tests or len(set(tests)) != len(tests):
        raise MutantError(f"{name}: no list of tests, or one named twice")
    if not entry["breaks"].strip() or "\n" in entry["breaks"]:
        raise MutantError(f"{name}: what it breaks is said in one line")
    if entry.get("ends", "failure") not in ENDS:
        raise MutantError(f"{name}: ends is one of {', '.join(ENDS)}")
    return Mutant(**(entry | {"name": name, "file": file, "tests": tuple(tests)}))


def file_of(test: str) -> str:
    """The file of a node id."""
    return test.partition("::")[0]


def check_mutant(mutant: Mutant, root: Path, parses: bool = True) -> None:
    """See that a mutant applies, and changes what its file says.

    Args:
        mutant: that is checked.
        root: of the repository.
        parses: see that what it makes of a Python file parses; 10 ms for each.
    Raises:
        MutantError: it does not.
    """
    path = root / mutant.file
    if not path.is_file():
        raise MutantError(f"{mutant.name}: there is no {mutant.file}")
    before = path.read_text(encoding="utf-8")
    after = mutant.apply(before)
    same = _words(mutant.find, path.suffix) == _words(mutant.replace, path.suffix)
    if path.suffix == ".py" and (parses or same):
        try:
            tree = ast.parse(after)
        except SyntaxError as error:
            raise MutantError(f"{mutant.name}: {mutant.file} would not parse: {error}") from error
        # indentation alone may change what is said
        same = same and ast.dump(tree) == ast.dump(_parsed(before))
    if same:
        raise MutantError(f"{mutant.name}: nothing changes in what {mutant.file} says")


# files of tests are named many times
@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _words(text: str, suffix: str) -> list[str]:
    comment = r"//[^\n]*|/\*.*?\*/" if suffix in _CPP else r"#[^\n]*"
    return re.sub(comment, " ", text, flags=re.DOTALL).split()
