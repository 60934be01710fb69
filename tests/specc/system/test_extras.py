"""Advice to install: the packages of an extra, and never the name that is somebody else's."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

from specc.system import extras

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# a command that installs from an index a distribution called specc, with extras or without
FOREIGN = re.compile(r"pip3? install (?:-\S+ )*[\"']?specc(?![\w-])")


@pytest.fixture
def no_metadata(monkeypatch):
    """As where the folders are on the path, and nothing was installed."""

    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    extras.all_requirements.cache_clear()
    yield
    extras.all_requirements.cache_clear()


def test_the_distribution_is_not_called_as_somebody_elses():
    assert PROJECT["name"] == extras.DISTRIBUTION != "specc"
    assert PROJECT["scripts"] == {"specc": "specc.cli.main:main"}


@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
def test_a_command_names_every_package_of_an_extra(extra):
    declared = PROJECT["optional-dependencies"][extra]
    names = {re.match(r"[\w.-]+", line)[0] for line in declared} - {extras.DISTRIBUTION}
    assert names <= extras.requirements(extra).keys()
    command = extras.install_command(extra)
    assert command.startswith("pip install ")
    assert all(f'"{name}' in command for name in names)
    assert extras.DISTRIBUTION not in command


def test_an_extra_may_bring_another():
    assert extras.requirements("onnx").items() <= extras.requirements("tensorrt").items()


def test_versions_are_those_of_the_project():
    declared = {line for line in PROJECT["dependencies"] if line.startswith("torch")}
    versions = extras.supported_versions("torch")
    assert {frozenset(line.removeprefix("torch").split(",")) for line in declared} == {
        frozenset(versions.split(","))
    }
    assert extras.supported_versions("no-such-package") == ""


@pytest.mark.usefixtures("no_metadata")
def test_without_metadata_the_checkout_is_named():
    assert "checkout" in extras.install_command("serve")
    assert extras.supported_versions("torch") == ""


def advice() -> list[Path]:
    """Files that users read, or that hold what they read."""
    folders = ("specc", "passes", "runtime", "kernels", "docs", "examples")
    files = [ROOT / "README.md", ROOT / "Makefile"]
    for folder in folders:
        files += [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".md", ".html")]
    return files


@pytest.mark.parametrize(
    "line",
    ["pip install specc", "pip install 'specc[onnx]'", 'pip install "specc[a,b]"',
     "pip install -U specc[serve]"],
)  # fmt: skip
def test_the_search_finds_what_it_looks_for(line):
    assert FOREIGN.search(line)


def test_nothing_advises_the_foreign_package():
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in advice()
        for line in path.read_text(encoding="utf-8").splitlines()
        if FOREIGN.search(line) and "not `pip install specc`" not in line
    ]
    assert found == []
