"""`specc doctor` knows every extra of pyproject.toml, whatever is added there."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specc.cli.doctor import NEEDED_FOR, describe, extras
from specc.cli.main import app

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def declared() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["optional-dependencies"]


def test_every_extra_has_a_line(declared):
    assert set(NEEDED_FOR) == set(declared)
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["checks"]
    rows = {check["name"]: check for check in found if check["name"].startswith("extra ")}
    assert set(rows) == {f"extra {name}" for name in declared if name != "dev"}
    assert all(row["needed_for"] for row in rows.values())


def test_their_packages_are_those_of_the_project(declared):
    for name, packages in extras().items():
        own = [line for line in declared[name] if not line.startswith("specc")]
        assert len(packages) == len(own), name
        for package in packages:
            assert any(line.startswith(package) for line in own), package


def test_missing_packages_are_named():
    state, detail, how = describe("serve", {"pytest": ">=8", "no-such-package": ">=1.2"})
    assert (state, detail) == ("missing", "without no-such-package")
    assert how == 'pip install "no-such-package>=1.2"'
