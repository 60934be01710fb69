"""`specc inspect --sharding`: the tables of three architectures, as files to read and compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specc.cli.main import app
from specc.sharding.shard_plan import ShardPlan
from tests import models
from tests.specc.draw.read_svg import Svg
from tests.specc.sharding.test_weight_pieces import compiled

GOLDEN = Path(__file__).parent / "sharding"


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        pytest.param("qwen3", 4, marks=pytest.mark.slow),
        ("gpt2", 2),
        pytest.param("mixtral", 2, marks=pytest.mark.slow),
    ],
)
def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, num_ranks: int) -> None:
    """A new file is written where there is none: read it before it is committed."""
    monkeypatch.setenv("COLUMNS", "140")
    checkpoint = models.save_tiny(name, tmp_path / "checkpoint")
    engine = compiled(checkpoint, tmp_path / "engine", num_ranks)
    result = CliRunner().invoke(app, ["inspect", str(engine), "--sharding"])
    assert result.exit_code == 0, result.stderr
    lines = "\n".join(line.rstrip() for line in result.stdout.splitlines()) + "\n"
    golden = GOLDEN / f"{name}-{num_ranks}.txt"
    if not golden.exists():
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(lines, encoding="utf-8")
        pytest.fail(f"{golden} is new")
    assert lines == golden.read_text(encoding="utf-8")
    result = CliRunner().invoke(app, ["inspect", str(engine), "--sharding", "--json"])
    plan = ShardPlan.from_json(json.loads(result.stdout)["target"])
    assert plan == ShardPlan.from_json(json.loads((engine / "target" / "shard.json").read_text()))
    picture = tmp_path / "sharding.svg"
    result = CliRunner().invoke(app, ["inspect", str(engine), "--sharding", "--svg", str(picture)])
    assert result.exit_code == 0, result.stderr
    assert f"target, {num_ranks} ranks" in result.stdout
    sums = Svg(picture).texts("sum-").values()
    assert set(sums) == {f"Σ  all_reduce: {plan.collectives[0].bytes_per_token} bytes a token"}


def test_a_picture_of_nothing_is_refused(tiny_engine: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(tiny_engine), "--svg", "a.svg"])
    assert result.exit_code == 2
    assert "--svg a.svg without --sharding" in result.stderr


@pytest.mark.slow
def test_reshard_says_what_it_makes(tiny_engine: Path, tmp_path: Path) -> None:
    """As a compilation does: phases, models, memory, and what comes next."""
    two = tmp_path / "two"
    given = ["reshard", str(tiny_engine), "-tp", "2", "--no-probe", "-o", str(two)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.stderr
    assert "write target weights" in result.stderr
    assert f"specc run {two}" in result.stdout.replace("\n", "")
    assert CliRunner().invoke(app, ["inspect", str(two), "--sharding"]).exit_code == 0
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert "exists" in result.stderr
    given[3] = "3"
    result = CliRunner().invoke(app, [*given, "--force"])
    assert result.exit_code == 2
    assert "for 3 ranks" in result.stderr
    assert CliRunner().invoke(app, ["inspect", str(two), "--verify"]).exit_code == 0


def test_an_engine_of_one_rank_is_told(tiny_engine: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(tiny_engine), "--sharding"])
    assert result.exit_code == 2
    assert "an engine of one rank" in result.stderr
    assert "--tensor-parallel-size" in result.stderr
