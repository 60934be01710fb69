"""Ranks keep the states that rank 0 keeps, whatever happens to requests.

Each rank computes all of every pass here, so states have to be the same, bit for bit: after steps
of each plan, prefixes that are shared, requests that give way, and passes that are timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.speculation.plans import OFF, DynamicTree, SpecPlan
from specc.tune.timed_pass import time_pass
from tests.runtime.hybrid_engine import save_hybrid
from tests.runtime.ranks.conftest import OPTIONS
from tests.runtime.test_states import greedy, prompt_of

CHAIN, TREE = SpecPlan.from_widths((1, 1, 1)), SpecPlan.from_widths((2, 2, 1))
DYNAMIC = SpecPlan.from_dynamic(DynamicTree(6, 2, 3))
PLANS = [OFF, CHAIN, TREE, DYNAMIC, replace(TREE, name="tiles-2-2-1", tile=4)]
PROMPTS = [prompt_of(length) for length in (1, 9, 16, 33)]
TOKENS = 16


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp("hybrid") / "engine", PLANS)


@pytest.fixture(scope="module")
def alone(path: Path) -> Engine:
    return Engine.load(path)


@pytest.fixture(scope="module")
def led(path: Path) -> Iterator[Engine]:
    # not all of the requests have room
    engine = Engine.load(path, ranks=OPTIONS, kv_cache_tokens=96)
    yield engine
    engine.close()


def check_states(engine: Engine) -> None:
    """Rank 0 compares caches, states, and those of prefixes, with those of the other rank."""
    states = engine.cache.states
    assert states is not None
    slabs = [*engine.cache.slabs["target"], *states.slabs]
    sums = engine.target.leader.checksums(slabs)  # type: ignore[attr-defined]
    assert len(sums) == 2
    assert len({*sums}) == 1, [one.hex()[:8] for one in sums]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_states_and_tokens(alone: Engine, led: Engine, plan: SpecPlan) -> None:
    given = [greedy(TOKENS) for _ in PROMPTS]
    found, wanted = (
        [x.outputs[0].token_ids for x in LLM(engine, plan=plan.name).generate(PROMPTS, given)]
        for engine in (led, alone)
    )
    assert found == wanted
    assert len({tuple(tokens) for tokens in wanted}) > 1
    check_states(led)


@pytest.mark.parametrize("plan", [OFF, CHAIN, TREE], ids=lambda plan: plan.name)
def test_prefixes(alone: Engine, led: Engine, plan: SpecPlan) -> None:
    """States of prompts and of steps are kept, found, and gone on from, on both ranks."""
    found = []
    for engine in (alone, led):
        states = engine.cache.states
        assert states is not None
        engine.cache.allocator.forget_all()
        states.checkpoints.forget_all()
        core, prompt, tokens = EngineCore(engine, plan.name), list(PROMPTS[1]), []
        for _ in range(3):
            request = core.requests.make(prompt, greedy(TOKENS))
            core.scheduler.add(request)
            while not request.is_finished:
                core.advance()
            tokens.append(request.output_token_ids)
            prompt = [*request.token_ids, 1, 2]
        assert request.stats.num_cached_tokens >= 32
        found.append(tokens)
    assert found[0] == found[1]
    check_states(led)


def test_requests_that_give_way(alone: Engine, led: Engine) -> None:
    given, prompts = [greedy(40) for _ in range(3)], [prompt_of(n) for n in (20, 25, 30)]
    llm = LLM(led, plan=TREE.name)
    found = [x.outputs[0].token_ids for x in llm.generate(prompts, given)]
    wanted = LLM(alone, plan=TREE.name).generate(prompts, given)
    assert found == [x.outputs[0].token_ids for x in wanted]
    assert llm.get_metrics().num_preemptions > 0
    check_states(led)


def test_passes_that_are_timed(led: Engine) -> None:
    """They change no states, on no rank."""
    states = led.cache.states
    assert states is not None
    before = [slab.clone() for slab in states.states]
    table = led.cache.block_table([[0, 1, 2, 3], [4, 5, 6, 7]])
    for width in (1, 3, states.sizes.num_rows + 1):
        assert time_pass(led, led.target, table, 2, width) > 0
    assert all(map(lambda a, b: bool((a == b).all()), states.states, before))
    check_states(led)
