"""Ranks of an engine that is really cut are lost: within a collective, each waits for the other."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.lossless import Zoo
from tests.runtime.ranks.lose_ranks import PHASES, SIGNALS, lose
from tests.runtime.ranks.test_sharded_engine import path_of

KILL, STOP = SIGNALS
# the default tier has one; copies that are stopped are in test_lost_ranks.py
USUAL = {(2, 1, KILL, "verify")}


def cases() -> list[Any]:
    """Each rank of two, in every phase, and a rank of four."""
    made = [(2, rank, number, phase) for rank in (0, 1) for number in SIGNALS for phase in PHASES]
    return [
        pytest.param(
            *case,
            marks=[] if case in USUAL else [pytest.mark.slow],
            id=f"{case[1]}-of-{case[0]}-{case[2].name}-{case[3]}",
        )
        for case in [*made, (4, 2, KILL, "verify"), (4, 3, STOP, "verify")]
    ]


@pytest.mark.parametrize(("num_ranks", "rank", "number", "phase"), cases())
def test_a_rank_of_a_cut_engine_is_lost(
    zoo: Zoo, num_ranks: int, rank: int, number: signal.Signals, phase: str
) -> None:
    engine = path_of(zoo, "llama", "eager", num_ranks)
    lose(engine, num_ranks, rank, number, phase).check()
