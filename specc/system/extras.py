"""What specc's extras are made of, and the command that installs one of them.

The name of the distribution is not that of the package: on the public index, `specc` is somebody
else's. So advice names the packages themselves, which is right for a checkout, a wheel, and any
directory that a user is in.
"""

from __future__ import annotations

import importlib.metadata
import re
from functools import cache

DISTRIBUTION = "specc-llm"
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,-]+)\])?\s*([^;]*)(?:;.*extra == [\"']([\w-]+))?")


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra, e.g. `pip install "llguidance>=1.3"`."""
    packages = requirements(extra)
    if not packages:
        return f'pip install -e ".[{extra}]" in the checkout of specc'
    return "pip install " + " ".join(f'"{name}{versions}"' for name, versions in packages.items())


def requirements(extra: str = "") -> dict[str, str]:
    """Package → versions, such as `>=3.6,<3.8`; those of no extra are what specc always needs.

    Empty where specc's own metadata are not installed.
    """
    found: dict[str, str] = {}
    for name, nested, versions, own in all_requirements():
        if own != extra:
            continue
        if name == DISTRIBUTION:
            for other in nested.split(","):
                found |= requirements(other)
        else:
            found[name] = versions
    return found


def supported_versions(package: str) -> str:
    """Versions of a package that specc declares, whatever needs it; empty where nothing does."""
    return next((versions for name, _, versions, _ in all_requirements() if name == package), "")


@cache
def all_requirements() -> tuple[tuple[str, str, str, str], ...]:
    """(package, its extras, versions, specc's extra) of every requirement."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    matches = [_REQUIREMENT.match(line) for line in lines]
    return tuple(
        (m[1], m[2] or "", (m[3] or "").strip(), m[4] or "") for m in matches if m is not None
    )
