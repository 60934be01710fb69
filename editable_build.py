"""The build backend: setuptools', whose editable installs lose to no folder called `specc`.

Python looks through the folders of sys.path before it asks what setuptools puts into an editable
install. Where one of them holds a clone of this repository, whose root is no package, that would
be what `import specc` finds: a namespace package of nothing. So an editable install also gets a
finder that comes first. It lets real packages win, as a plain wheel does by itself, and finds the
checkout where there would be such a folder, or nothing.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - all that a backend has

_MODULE = "_specc_checkout"
_FINDER = '''\
"""Finds specc in its checkout before folders of this name; editable_build.py there wrote it."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location

_INIT = {init!r}


class CheckoutFinder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "specc":
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is not None and found.origin is not None:
            return found
        return spec_from_file_location(name, _INIT) if os.path.isfile(_INIT) else None


if CheckoutFinder not in sys.meta_path:
    sys.meta_path.insert(0, CheckoutFinder)
'''


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """PEP 660: what setuptools builds, and the finder."""
    name = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    init = str(Path("specc", "__init__.py").resolve())
    added = {
        f"{_MODULE}.py": _FINDER.format(init=init),
        f"{_MODULE}.pth": f"import {_MODULE}\n",
    }
    _add_files(Path(wheel_directory, name), added)
    return name


def _add_files(wheel: Path, added: dict[str, str]) -> None:
    """Put files into a wheel, and into its RECORD, which names all of them with their hashes."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {item: archive.read(item) for item in archive.infolist()}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in added.items():
            archive.writestr(name, text)
        for item, data in contents.items():
            if item.filename.endswith(".dist-info/RECORD"):
                data += "".join(map(_record, added, added.values())).encode()
            archive.writestr(item, data)


def _record(name: str, text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
    return f"{name},sha256={digest.decode()},{len(text.encode())}\n"
