"""Tokens say nothing about drafts: kinds that compare drafts fail where others are accepted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from specc.speculation.metrics import SpecStats
from tests.gpu import kinds


@pytest.fixture
def engine(monkeypatch):
    """One whose requests have the right tokens, 5 of depth 1 and 2 of depth 2 by drafts."""
    from specc.runtime import llm

    stats = SpecStats(accepted_at_depth=[5, 2])
    monkeypatch.setattr(llm, "LLM", lambda *_, **__: SimpleNamespace(get_metrics=lambda: stats))
    monkeypatch.setattr(kinds, "tokens_of", lambda *_: [[7, 8]])
    monkeypatch.setattr(kinds, "require_graphs", lambda step: None)
    return SimpleNamespace(steps={"chain-2": None})


def test_other_drafts_fail(engine):
    given = engine, "chain-2", [[3]], [[7, 8]]
    assert kinds._generate(*given)["mean_acceptance_length"] == 1
    kinds._generate(*given, [5, 2])
    for accepted in ([5, 1], [6, 2], [5, 2, 0], []):
        with pytest.raises(AssertionError, match=r"accepted at depth 1, 2, …: \[5, 2\], not"):
            kinds._generate(*given, accepted)


def test_drafts_of_one_pass_are_compared():
    compared = {name for name, case in kinds.KINDS.items() if kinds.compared_plans(case)}
    assert compared == {
        "block", "dspark", "dspark-rnn", "medusa", "hydra", "hydra-prefix", "pard", "peagle"
    }  # fmt: skip
    for name in compared:
        assert len(kinds.compared_plans(kinds.KINDS[name])) == 4
