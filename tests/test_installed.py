"""`import specc` finds the package, whatever folders of this name lie around, however installed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("specc", "passes", "runtime", "kernels")
# of every part of the package one module that needs no package of others
SCRIPT = textwrap.dedent(
    """
    import specc, specc.errors, specc.passes, specc.runtime, specc.kernels
    assert specc.SpeccError is specc.errors.SpeccError
    for module in (specc, specc.passes, specc.runtime, specc.kernels):
        print(module.__file__)
    """
)


def clone(folder: Path) -> Path:
    """A checkout in a folder of its own, with links."""
    folder.mkdir(parents=True)
    for name in (*PARTS, "pyproject.toml", "README.md", "CMakeLists.txt", "editable_build.py"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def python(script: str, cwd: Path, *options: str, prefix: str = "") -> str:
    """What a script prints that is begun in a folder, which Python then looks through first."""
    command = [sys.executable, *options, "-c", prefix + script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> tuple[Path, str]:
    """A clone called specc, and what stands for site-packages where it is installed, editable."""
    root = clone(tmp_path_factory.mktemp("parent") / "specc")
    wheels, site = root.parent / "wheels", root.parent / "site"
    wheels.mkdir()
    build = f"import sys; sys.path.insert(0, '.'); import editable_build as build;\
        build.build_editable({str(wheels)!r}, {{'wheel.cmake': 'false'}})"
    python(build, root, "-P")
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        archive.extractall(site)
        (record,) = (name for name in archive.namelist() if name.endswith("RECORD"))
        listed = {line.split(",")[0] for line in archive.read(record).decode().splitlines()}
        assert listed == set(archive.namelist())
    return root, f"import site; site.addsitedir({str(site)!r});"


def test_an_editable_install_beside_its_clone(installed) -> None:
    """In the folder that the clone is in, in the clone, and elsewhere."""
    root, prefix = installed
    wanted = [str(ROOT / name / "__init__.py") for name in PARTS]
    for folder in (root.parent, root, root.parent / "site"):
        found = python(SCRIPT, folder, "-S", prefix=prefix).splitlines()
        assert [str(Path(line).resolve()) for line in found] == wanted, folder
    # without what the build adds, it is the folder that is found
    bare = python("import specc; print(specc.__file__)", root.parent, "-S")
    assert bare.strip() == "None"


def test_a_real_package_wins(installed, tmp_path) -> None:
    """One that is first on the path, as without an editable install."""
    (tmp_path / "specc").mkdir()
    (tmp_path / "specc" / "__init__.py").write_text("here = 7\n")
    script = "import specc; print(specc.here)"
    assert python(script, tmp_path, "-S", prefix=installed[1]) == "7\n"


def test_a_wheel_beside_a_clone(tmp_path) -> None:
    """In the folder of the clone the wheel's is found, and within the clone all of the clone's."""
    site, root = tmp_path / "site", clone(tmp_path / "parent" / "specc")
    package = site / "specc"
    package.mkdir(parents=True)
    # as it is unpacked: one tree
    for item in (ROOT / "specc").iterdir():
        (package / item.name).symlink_to(item)
    for name in PARTS[1:]:
        (package / name).symlink_to(ROOT / name)
    prefix = f"import sys; sys.path.append({str(site)!r});"
    found = python(SCRIPT, root.parent, "-S", prefix=prefix).splitlines()
    assert all(line.startswith(str(package)) for line in found), found
    inside = python(SCRIPT, root, "-S", prefix=prefix).splitlines()
    assert all(line.startswith(str(root)) for line in inside), inside


def test_a_script_beside_a_clone(tmp_path) -> None:
    """What a user types first, with the interpreter that runs these tests."""
    clone(tmp_path / "specc")
    (tmp_path / "first.py").write_text("import specc\nprint(specc.SpeccError.__module__)\n")
    done = subprocess.run(
        [sys.executable, "first.py"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "specc.errors\n", (
        f"{done.stderr}\nwas specc installed before editable_build.py? pip install -e . again"
    )
