"""Ranks that draw tokens together generate what one does, and no logits leave their rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specc.runtime.execution.draws import can_draw
from specc.runtime.llm import LLM
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from tests import models
from tests.lossless import Zoo
from tests.runtime.ranks.test_led_engine import PLAN_IDS, generate, params
from tests.runtime.ranks.test_sharded_engine import PLAIN, Engines

DELTA = {"temperature": 0.8, "rule": "delta"}


@pytest.fixture(scope="module")
def load(zoo: Zoo) -> Iterator[Engines]:
    loaded = Engines(zoo)
    yield loaded
    loaded.close()


class Passes:
    """Counts the passes of a led target: those that yield tokens, and those that yield logits."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn = self.gathered = 0
        leader = engine.target.leader
        draw, gather = leader.run_draw, leader.run_pass

        def run_draw(*args: Any) -> Any:
            self.drawn += 1
            return draw(*args)

        def run_pass(*args: Any) -> Any:
            self.gathered += 1
            return gather(*args)

        monkeypatch.setattr(leader, "run_draw", run_draw)
        monkeypatch.setattr(leader, "run_pass", run_pass)


USUAL = {"off-greedy", "off-coupled", "chain-3-coupled", "tree-3-2-1-delta"}


def cases() -> list[Any]:
    """Every plan with every kind of rows; the others are slow."""
    kinds = {"greedy": {}, "coupled": PLAIN, "delta": DELTA}
    return [
        pytest.param(
            plan,
            options,
            id=f"{plan}-{name}",
            marks=[] if f"{plan}-{name}" in USUAL else [pytest.mark.slow],
        )
        for plan in PLAN_IDS
        for name, options in kinds.items()
    ]


@pytest.mark.default("off-greedy", "off-coupled", "chain-3-coupled")
@pytest.mark.parametrize(("plan", "options"), cases())
def test_no_logits_leave_their_rank(
    load: Engines, plan: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = params(4, **options)
    wanted = generate(LLM(load("llama", 1), plan=plan), given)
    cut = load("llama", 2)
    passes = Passes(cut, monkeypatch)
    llm = LLM(cut, plan=plan)
    assert generate(llm, given) == wanted
    assert len({tuple(tokens) for tokens, _ in wanted}) > 1
    assert passes.drawn > 0
    assert passes.gathered == 0
    if plan != "off":
        assert llm.get_metrics().mean_acceptance_length > 1.2


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.2},
        {"prompt_logprobs": 1},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"temperature": 0.8, "top_p": 0.9},
                {"temperature": 0.8, "rule": "mss"},
                {"logprobs": 1},
                {"allowed_token_ids": [1, 2, 3, 4, 5]},
            )
        ),
    ],
    ids=lambda options: "-".join(options),
)
def test_logits_for_those_that_want_them(
    load: Engines, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four requests needs logits: its batch's are gathered, and all is as before."""
    given = [*params(3, **PLAIN), *params(1, **options)]
    whole, cut = load("llama", 1), load("llama", 2)
    passes = Passes(cut, monkeypatch)
    wanted, found = (generate(LLM(engine, plan="chain-3"), given) for engine in (whole, cut))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    assert passes.gathered > 0


def test_a_shared_pass_is_drawn(load: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts, requests without speculation, and trees, in one pass."""
    given = [
        SamplingParams(
            max_tokens=8 + 6 * i, ignore_eos=True, speculative=i % 2 == 0, seed=i, temperature=i / 4
        )
        for i in range(5)
    ]
    wanted = generate(LLM(load("llama", 1), plan="tree-3-2-1"), given)
    cut = load("llama", 2)
    passes = Passes(cut, monkeypatch)
    llm = LLM(cut, plan="tree-3-2-1")
    assert generate(llm, given) == wanted
    assert llm._runner.num_shared_passes > 3
    assert passes.gathered == 0


def test_a_hook_sees_logits(load: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks replace what acceptance reads; a step that draws has none of it."""
    cut = load("llama", 2)
    passes, seen = Passes(cut, monkeypatch), []
    step = cut.steps["chain-3"]
    monkeypatch.setattr(step, "before_accept", lambda values: seen.append(values["logits"].shape))
    generate(LLM(cut, plan="chain-3"), params(2))
    assert seen
    assert passes.gathered >= len(seen)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, True),
        ({"top_p": 0.5, "top_k": 3, "rule": "mss"}, True),
        ({"temperature": 1.0}, True),
        ({"temperature": 1.0, "rule": "delta"}, True),
        ({"temperature": 1.0, "rule": "swor"}, False),
        ({"temperature": 1.0, "top_p": 0.99}, False),
        ({"temperature": 1.0, "top_k": 7}, False),
        ({"temperature": 1.0, "min_p": 0.01}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"logprobs": 0}, False),
    ],
)
def test_which_requests_can_be_drawn(options: dict[str, Any], wanted: bool) -> None:
    request = Request(
        "0",
        list(models.prompts()[0]),
        SamplingParams(**{"temperature": 0, **options}),
        max_seq_len=64,
    )
    assert can_draw([request]) is wanted
    plain = Request("1", list(models.prompts()[0]), SamplingParams(temperature=0), max_seq_len=64)
    assert can_draw([plain, request]) is wanted
