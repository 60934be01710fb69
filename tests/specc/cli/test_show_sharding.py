"""`specc inspect --sharding`: the tables of three architectures, as files to read and compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specc.cli.main import app
from specc.sharding.shard_plan import ShardPlan
from tests import models
from tests.specc.sharding.test_weight_pieces import compiled

GOLDEN = Path(__file__).parent / "sharding"


@pytest.mark.parametrize(("name", "num_ranks"), [("qwen3", 4), ("gpt2", 2), ("mixtral", 2)])
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


def test_an_engine_of_one_rank_is_told(tiny_engine: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(tiny_engine), "--sharding"])
    assert result.exit_code == 2
    assert "an engine of one rank" in result.stderr
    assert "--tensor-parallel-size" in result.stderr
