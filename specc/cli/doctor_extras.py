"""The extras of specc's own package: what each one is for, and which of its packages are here."""

from __future__ import annotations

import importlib.metadata
import re
from functools import cache

# extra → what does not work without it; tests compare the names with pyproject.toml
NEEDED_FOR = {
    "compile": "specc compile, and bench --against transformers",
    "onnx": "the backends onnx and tensorrt",
    "tensorrt": "compiling for --backend tensorrt without a GPU",
    "serve": "specc serve, and chat templates",
    "bench": "specc bench serve --base-url",
    "plot": "pictures: --plot, and specc.draw",
    "structured": "outputs that follow a JSON schema, a regex or a grammar",
    "cuda": "running engines of the backend cuda",
    "dev": "specc's own tests",
}
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,-]+)\])?\s*([^;]*)")
_EXTRA = re.compile(r"extra == [\"']([\w-]+)")


def extras() -> dict[str, dict[str, str]]:
    """Extra → its packages with their versions; empty where specc has no metadata.

    An extra that another one includes is not repeated in it.
    """
    found: dict[str, dict[str, str]] = {}
    for line in _requirements():
        extra, match = _EXTRA.search(line), _REQUIREMENT.match(line)
        if extra and match and not match[2]:
            found.setdefault(extra[1], {})[match[1]] = match[3].strip()
    return found


def describe(extra: str, packages: dict[str, str]) -> tuple[str, str, str]:
    """State of an extra, what was found of it, and how to get what is missing."""
    versions = {name: _version(name) for name in packages}
    missing = [name for name, version in versions.items() if version is None]
    if not missing:
        return "ok", ", ".join(f"{name} {version}" for name, version in versions.items()), ""
    wanted = " ".join(f'"{name}{packages[name]}"' for name in missing)
    return "missing", f"without {', '.join(missing)}", f"pip install {wanted}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _requirements() -> tuple[str, ...]:
    # whatever the distribution is called that brings this package
    for name in importlib.metadata.packages_distributions().get("specc", ()):
        return tuple(importlib.metadata.requires(name) or ())
    return ()
