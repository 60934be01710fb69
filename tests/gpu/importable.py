"""`specc` and `tests` without an installation: a folder of links for PYTHONPATH."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTEST = ROOT / "build/gpu-check/pytest"


@contextlib.contextmanager
def importable() -> Iterator[Path]:
    """The folder; this process and those that get it on PYTHONPATH import from it.

    `tests` is a package of its own here: another one may be installed, and would win over a folder
    without `__init__.py` wherever that lies on the path.
    """
    site = Path(tempfile.mkdtemp(prefix="specc-site-"))
    try:
        (site / "specc").mkdir()
        folders = [ROOT / name for name in ("passes", "runtime", "kernels")]
        # a copy of the tree may have links to these folders in it
        own = [item for item in (ROOT / "specc").iterdir() if not item.is_symlink()]
        for item in [*own, *folders]:
            (site / "specc" / item.name).symlink_to(item)
        (site / "tests").mkdir()
        text = f"__path__ = [{str(ROOT / 'tests')!r}]\n"
        (site / "tests" / "__init__.py").write_text(text, encoding="utf-8")
        sys.path.insert(0, str(site))
        yield site
    finally:
        sys.path[:] = [path for path in sys.path if path != str(site)]
        shutil.rmtree(site, ignore_errors=True)


def _compiled_kernels() -> Path:
    """Where Triton leaves what it compiles, for the next command, too: here, if that can be."""
    own = ROOT / "build/gpu-check/triton"
    try:
        own.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=own):
            return own
    except OSError:
        return Path(tempfile.gettempdir()) / "specc-gpu-check-triton"


def bundle_pytest() -> None:
    """Copy pytest, which is Python alone, to where the check finds it on a machine without it."""
    shutil.rmtree(PYTEST, ignore_errors=True)
    for name in ("pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        for file in importlib.metadata.files(name) or []:
            if file.suffix == ".py" or file.name == "METADATA":
                (PYTEST / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), PYTEST / file)


def environment(site: Path) -> dict[str, str]:
    """Variables of the check's processes: nothing that changes what is checked comes along."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SPECC_", "PYTEST_", "TRITON_INTERPRET"))
        and name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_LAUNCH_BLOCKING")
    }
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    if importlib.util.find_spec("pytest") is None:
        paths.append(str(PYTEST))
    defaults = {"TRITON_CACHE_DIR": str(_compiled_kernels())}
    return {
        **defaults,
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        # nothing that a check needs is elsewhere; a look for it there may wait for minutes
        "HF_HUB_OFFLINE": "1",
        # what a machine has beside pytest is none of the tests' business
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


if __name__ == "__main__":
    bundle_pytest()
