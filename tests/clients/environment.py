"""Where clients live: Python environments and an npm folder in the user's cache.

They are made once for each list of packages, from the registries that this machine's pip and npm
use. What is not to be had there is told by name; the others are installed all the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
SECONDS = 1800


def python_with(requirements: Sequence[str]) -> tuple[Path, dict[str, str]]:
    """An interpreter that has these packages, and those that it has not, with pip's reason."""
    return _made(f"python{sys.version_info[0]}.{sys.version_info[1]}", requirements, _make_python)


def node_with(requirements: Sequence[str]) -> tuple[Path, dict[str, str]]:
    """A folder with these packages of npm and the scripts of this one; likewise."""
    home, missing = _made("node", requirements, _make_node)
    for script in HERE.glob("*.mjs"):
        shutil.copy(script, home)
    return home, missing


def versions_in(home: Path) -> dict[str, str]:
    """Package → version of all that an interpreter or a folder has."""
    if home.is_dir():
        files = [*home.glob("node_modules/*/package.json"),
                 *home.glob("node_modules/@*/*/package.json")]  # fmt: skip
        # by folder: what a package has for one platform has the package's name in it
        names = [str(file.parent.relative_to(home / "node_modules")) for file in files]
        found = [json.loads(file.read_text()).get("version") for file in files]
        return {name: version for name, version in zip(names, found, strict=True) if version}
    listed = subprocess.run(
        [*_pip(home), "list", "--format", "json"], check=True, capture_output=True, text=True
    )
    return {each["name"].lower(): each["version"] for each in json.loads(listed.stdout)}


def _made(
    kind: str, requirements: Sequence[str], make: Callable[[Path, Sequence[str]], dict[str, str]]
) -> tuple[Path, dict[str, str]]:
    digest = hashlib.sha256("\n".join(sorted(requirements)).encode()).hexdigest()[:12]
    home = _caches() / f"{kind}-{digest}"
    done = home / "missing.json"
    with _locked(home):
        if not done.exists():
            shutil.rmtree(home, ignore_errors=True)
            missing = make(home, requirements)
            done.write_text(json.dumps(missing))
    found = home if kind == "node" else home / "bin" / "python"
    return found, json.loads(done.read_text())


def _caches() -> Path:
    found = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "specc-clients"
    found.mkdir(parents=True, exist_ok=True)
    return found


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    with home.with_name(f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_python(home: Path, requirements: Sequence[str]) -> dict[str, str]:
    venv.create(home)
    pip = [*_pip(home / "bin" / "python"), "install", "-q", "--no-compile"]
    return _install(pip, requirements, home)


def _pip(python: Path) -> list[str]:
    """This environment's own, at work for another one."""
    return [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]


def _make_node(home: Path, requirements: Sequence[str]) -> dict[str, str]:
    home.mkdir()
    (home / "package.json").write_text("{}")
    if shutil.which("npm") is None:
        return dict.fromkeys(requirements, "there is no npm")
    # no script of a package runs
    npm = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"]
    return _install(npm, requirements, home)


def _install(command: list[str], requirements: Sequence[str], home: Path) -> dict[str, str]:
    """All at once; where that fails, one by one, to know which."""
    if not _run([*command, *requirements], home):
        return {}
    found = {each: _run([*command, each], home) for each in requirements}
    return {each: reason for each, reason in found.items() if reason}


def _run(command: list[str], home: Path) -> str:
    """Why it has failed; "" where it has not."""
    try:
        done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"not installed within {SECONDS} s"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return "" if not done.returncode else (errors or lines or ["no reason"])[0][:300]
