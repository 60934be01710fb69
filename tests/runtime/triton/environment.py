"""What a Triton Inference Server in the tests needs: `make` runs this file to set it up.

    python environment.py build/triton-server

The server and its Python backend come from the wheel `nvidia-pytriton`. The interpreter inside is
another one than that of the tests: numpy below 2, which the wheel's backend needs, and of the
packages only what specc's runtime needs to run an engine, linked from the environment that calls
this. So neither transformers nor a command line library exists there.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

SERVER = "nvidia-pytriton==0.7.0"
NUMPY = "numpy==1.26.4"
# for the tests themselves; in no environment, found by those who put it on their path
CLIENT = ("tritonclient==2.73.0", "grpcio==1.85.1", "python-rapidjson==1.25")
RUNTIME = ("specc-llm", "torch", "safetensors", "tokenizers", "llguidance")
# other versions there, or needed only by what specc's runtime never imports
NOT_LINKED = {"numpy", "typer", "rich", "huggingface-hub"}
LIBPYTHON = f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"


def unsupported() -> str | None:
    """Why the wheel has nothing for this machine; None where it has."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"the wheel is for x86_64 Linux, not {platform.machine()} {sys.platform}"
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split("."))) < (2, 35):
        return f"the wheel needs glibc 2.35, this is {name} {version}"
    return None


def make_environment(root: Path) -> None:
    """Fill an empty directory.

    Args:
        root: gets `venv`, `client` and, where the system has no libpython, `lib`.
    """
    root = root.resolve()
    shutil.rmtree(root, ignore_errors=True)
    venv = root / "venv"
    _run(sys.executable, "-m", "venv", "--without-pip", str(venv))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    _run(*pip, "--python", str(venv), "install", "-qq", "--no-compile", "--no-deps", SERVER, NUMPY)
    _run(
        *pip,
        "install",
        "-qq",
        "--no-compile",
        "--no-deps",
        "--target",
        str(root / "client"),
        *CLIENT,
    )
    packages = site_packages(venv)
    for name in linked_distributions():
        _link_distribution(name, packages)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    triton = packages / "pytriton" / "tritonserver"
    source = triton / "python_backend_stubs" / version / "triton_python_backend_stub"
    # where the server looks for it; a file, as a backend that stands on this one needs no links
    stub = backends(root) / "python" / source.name
    shutil.copy2(source, stub)
    if library_directory(root) is None:
        _download_libpython(root / "lib")
    # with a library missing, the server would hang at its start
    found = subprocess.run(
        ["ldd", str(stub)], env=environment(root), capture_output=True, text=True, check=True
    )
    missing = [line.strip() for line in found.stdout.splitlines() if "not found" in line]
    if missing:
        raise SystemExit(f"found:  {missing}\nneeded: {LIBPYTHON}\ndo:     install libpython")


def site_packages(venv: Path) -> Path:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return venv / "lib" / version / "site-packages"


def backends(root: Path) -> Path:
    """The server's own directory of backends; it holds `python` alone."""
    return site_packages(root / "venv") / "pytriton" / "tritonserver" / "backends"


def linked_distributions() -> list[str]:
    """Names of specc's runtime and all that it requires here, but for `NOT_LINKED`."""
    names, todo = [], [*RUNTIME]
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in names or name in NOT_LINKED:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform
        names.append(name)
        for item in requires:
            requirement, _, condition = item.partition(";")
            if "extra" not in condition:
                todo.append(re.match(r"[\w.-]+", requirement)[0])
    return names


def environment(root: Path) -> dict[str, str]:
    """Variables of a server: the first python3 on the path is the one that models run in."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env["PATH"] = os.pathsep.join([str((root / "venv" / "bin").resolve()), env.get("PATH", "")])
    directory = library_directory(root)
    if directory is not None:
        paths = [str(directory), env.get("LD_LIBRARY_PATH")]
        env["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
    return env


def library_directory(root: Path) -> Path | None:
    """Where libpython is; the flags of an interpreter do not tell."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    places = [sysconfig.get_config_var("LIBDIR") or "", f"/usr/lib/{multiarch}"]
    for place in (*map(Path, places), *sorted((root / "lib").glob("usr/lib/*"))):
        if (place / LIBPYTHON).is_file():
            return place.resolve()
    return None


def _link_distribution(name: str, packages: Path) -> None:
    distribution = importlib.metadata.distribution(name)
    for file in distribution.files or ():
        top = file.parts[0]
        if top in ("..", "__pycache__") or (packages / top).is_symlink():
            continue
        (packages / top).symlink_to(Path(distribution.locate_file(top)).resolve())


def _download_libpython(directory: Path) -> None:
    """Debian and its relatives have it in a package; unpacking one needs no rights."""
    directory.mkdir()
    package = LIBPYTHON.removesuffix(".so.1.0")
    try:
        _run("apt-get", "download", "-qq", package, directory=directory)
        _run("dpkg-deb", "-x", *map(str, directory.glob("*.deb")), str(directory))
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit(
            f"found:  no {LIBPYTHON}, which models of the Triton Inference Server run in\n"
            f"needed: that library\ndo:     apt-get install {package}"
        ) from None


def _run(*command: str, directory: Path | None = None) -> None:
    subprocess.run(command, check=True, cwd=directory)


if __name__ == "__main__":
    if reason := unsupported():
        print(f"specc: no Triton Inference Server in the tests: {reason}")
    else:
        make_environment(Path(sys.argv[1]))
