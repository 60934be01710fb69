"""The build backend: scikit-build-core's, with editable installs for this layout of folders.

Two things its own editable installs cannot do. The folders passes, runtime and kernels beside specc
are parts of it: its mode `redirect` would have to list each of their modules, at every start of
Python and again after each new file. And with it the checkout would win over everything, also over
a real package of this name that is first on the path, such as a copy of the checkout whose tests
run; in its mode `inplace`, which builds among the sources, any folder called specc would win
over the checkout, for instance the clone itself, whose root is no package.

So an editable install gets a finder that comes before the folders of sys.path. It lets real
packages win, as a plain wheel does by itself, and finds the checkout where there would be such a
folder, or nothing. In the checkout specc/__init__.py finds the other parts.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path
from typing import Any

from scikit_build_core import build as backend
from scikit_build_core.build import *  # noqa: F403 - all that a backend has

_MODULE = "_specc_checkout"
# scikit-build-core's own finder, which would find nothing
_REPLACED = "_editable_skbc_"
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
    """PEP 660: what scikit-build-core builds, the library in the checkout, and the finder."""
    name = backend.build_editable(wheel_directory, config_settings, metadata_directory)
    init = str(Path("specc", "__init__.py").resolve())
    added = {
        f"{_MODULE}.py": _FINDER.format(init=init),
        f"{_MODULE}.pth": f"import {_MODULE}\n",
    }
    _change_files(Path(wheel_directory, name), added)
    return name


def _change_files(wheel: Path, added: dict[str, str]) -> None:
    """Put files into a wheel, in place of its finder, and into its RECORD with their hashes."""
    with zipfile.ZipFile(wheel) as archive:
        kept = [one for one in archive.infolist() if not one.filename.startswith(_REPLACED)]
        contents = {item: archive.read(item) for item in kept}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in added.items():
            archive.writestr(name, text)
        for item, data in contents.items():
            if item.filename.endswith(".dist-info/RECORD"):
                lines = data.decode().splitlines(keepends=True)
                listed = [line for line in lines if not line.startswith(_REPLACED)]
                data = "".join([*listed, *map(_record, added, added.values())]).encode()
            archive.writestr(item, data)


def _record(name: str, text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
    return f"{name},sha256={digest.decode()},{len(text.encode())}\n"
