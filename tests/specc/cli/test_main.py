"""The command line as a whole, and what `specc inspect` and `specc doctor` print."""

from __future__ import annotations

import json

import pytest

from specc.errors import RankError
from tests.command_line import assert_refused, invoke

COMMANDS = {
    "compile", "run", "chat", "serve", "bench", "bench serve", "tune", "fit-draft", "triton",
    "inspect", "doctor",
}  # fmt: skip


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_has_options_and_examples(command):
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0
    assert f"Examples:\n    specc {command}" in result.stdout
    assert "--debug" in result.stdout


def test_help_has_every_command():
    lines = invoke("--help").stdout.partition("Commands:\n")[2].splitlines()
    assert {line.partition("  ")[0] for line in map(str.strip, lines) if line} >= COMMANDS
    assert "Did you mean" in invoke("servee").stderr


def test_a_lost_rank_exits_with_1(monkeypatch):
    """Nothing that the user passed; what starts the process may start it again."""

    def fail(*args: object, **options: object) -> None:
        raise RankError("rank 1 was killed by signal 9", "all ranks", "start it again")

    monkeypatch.setattr("specc.cli.run.run_request", fail)
    result = invoke("run", "engine/", "text")
    assert result.exit_code == 1
    assert result.stderr.startswith("found:  rank 1 was killed")


def test_usage_errors_exit_with_2():
    assert invoke("run").exit_code == 2
    assert invoke("compile", "--no-such-option").exit_code == 2
    assert invoke("no-such-command").exit_code == 2


def test_version():
    assert invoke("--version").stdout.startswith("specc ")


def test_inspect_shows_everything(tiny_engine):
    result = invoke("inspect", tiny_engine, "--verify")
    assert result.exit_code == 0, result.stderr
    for word in (
        "LlamaForCausalLM",
        "plan tree-2-1 (default)",
        "├── 1 ─ 3",
        "root ─ 1 ─ 2 ─ 3",
        "RewriteTreeAttention",
        "workspace",
        "all hashes agree",
        "steps/off.json",
    ):
        assert word in result.stdout


def test_inspect_one_pass(tiny_engine):
    result = invoke("inspect", tiny_engine, "--pass", "FuseQKV", "--why")
    assert result.exit_code == 0
    assert "FuseQKV" in result.stdout
    assert "SelectLogits" not in result.stdout
    assert_refused(invoke("inspect", tiny_engine, "--pass", "Nope"), "FuseQKV")


def test_inspect_json(tiny_engine):
    data = json.loads(invoke("inspect", tiny_engine, "--json").stdout)
    assert data["manifest"]["default_plan"] == "tree-2-1"
    assert {"pass", "rewrites", "declined", "seconds"} <= set(data["report"]["passes"][0])
    assert data["errors"] == []


def test_doctor():
    result = invoke("doctor", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["cpu"]["usable_cores"] >= 1
    assert data["memory"]["total"] > 2**20
    checks = {check["name"]: check for check in data["checks"]}
    assert checks["torch"]["state"] == "ok"
    for check in checks.values():
        assert check["state"] == "ok" or check["how"], check
    text = invoke("doctor")
    assert "CPU operators" in text.stdout
