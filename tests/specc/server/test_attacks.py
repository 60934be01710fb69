"""The attacks of `tests/attack.py`, for a while: an hour of them would show more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from specc.api import compile_with
from specc.config import CompileConfig
from tests.api_attackers import Operators
from tests.attack import check, ordinary, run_attacks
from tests.attack_figures import Answered, Figures
from tests.attack_process import ATTACKS
from tests.attackers import Connections, chained_rules, chained_schema, request

PAIR = Path(__file__).resolve().parents[3] / "examples" / "pair"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("attacks") / "engine"
    compile_with(PAIR / "target", [PAIR / "draft"], path, CompileConfig(backend="eager"))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_ordinary_requests_are_served_under_attack(name: str, engine: Path) -> None:
    """The ten-minute run holds the percentiles to 3; a few seconds of a busy machine say less."""
    figures = asyncio.run(run_attacks(engine, [name], seconds=20, phase_s=10, rate=2))
    assert figures.misses(max_ratio=20) == []
    # beside other jobs, 448 connections were counted where a quiet machine makes a thousand
    assert sum(figures.attacks.values()) > (100 if name == Connections.name else 2)
    if name == Operators.name:
        # answers to bodies that nobody reads may be cut
        assert figures.attacks.keys() <= {f"{name} {end}" for end in ("401", "cut", "late")}
        assert figures.attacks[f"{name} 401"] > 2


def figures_of(**changes: object) -> Figures:
    answers = [Answered(phase, "chat", 0.1) for phase in ("quiet", "attack") for _ in range(100)]
    found = Figures(answers, levels=[100 << 20] * 2, threads=[5, 5], files=[9, 9], exit_code=0)
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def test_limits_of_figures() -> None:
    assert figures_of().misses(3.0) == []
    slow = [Answered("attack", "chat", 0.31)] * 2
    for changes in (
        {"has_died": True},
        {"exit_code": None},
        {"exit_code": -11},
        {"num_health_failures": 1},
        {"levels": [100 << 20, 300 << 20]},
        {"threads": [5, 40]},
        {"files": [9, 30]},
        {"log_bytes": 2 << 20},
        {"answers": figures_of().answers + slow},
        {"answers": [*figures_of().answers, Answered("quiet", "chat", 0.1, "late")]},
        {"answers": figures_of().answers[:100]},  # of the attack, there are none
    ):
        assert len(figures_of(**changes).misses(3.0)) == 1, changes


def test_what_ordinary_requests_have_to_answer() -> None:
    assert [ordinary(i)[0] for i in range(5)] == ["completion", "stream", "chat", "choice", "regex"]
    assert check("stream", 200, b"data: {}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n") == ""
    assert check("stream", 200, b"data: {}\n\n\r\n") == "a stream that is cut"
    text = b'{"choices": [{"text": "was 12", "finish_reason": "stop"}]}'
    assert check("regex", 200, text) == ""
    assert "text" in check("regex", 200, text.replace(b"12", b"1x"))
    assert check("choice", 503, b"no").startswith("503")


def test_what_attackers_send() -> None:
    schema, rules = chained_schema(5000), chained_rules(4000)
    assert len(request("/", schema)) > 150_000
    assert len(schema["$defs"]) == 5001
    assert rules.count("\n") == 4002
