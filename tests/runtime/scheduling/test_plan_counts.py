"""Steps by plan and by load."""

from __future__ import annotations

import pytest

from specc.runtime.llm import LLM
from specc.runtime.scheduling.plan_counts import PlanCounts
from specc.sampling.params import SamplingParams


@pytest.mark.parametrize(
    ("together", "load"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (256, 256)]
)
def test_loads_are_powers_of_two(together: int, load: int) -> None:
    counts = PlanCounts()
    counts.begin("chain-4", 1, together)
    assert counts.by_load == {("chain-4", load): 1}


def test_a_copy_does_not_change() -> None:
    counts = PlanCounts()
    counts.begin("chain-4", 2, 2).record_step((1, 1), 2, 3)
    copy = counts.copy()
    counts.begin("chain-4", 2, 2).record_step((1, 1, 1), 3, 4)
    assert copy.by_load == {("chain-4", 2): 2}
    assert copy.by_plan["chain-4"].accepted_at_depth == [1, 1]
    assert copy.by_plan["chain-4"].num_spec_steps == 1


def test_plans_add_up_to_the_engine(make_engine, prompts) -> None:
    """Steps, drafted and accepted tokens, depth by depth; each request in the load it had."""
    llm = LLM(make_engine(), plan="chain-4")
    params = SamplingParams(temperature=0, max_tokens=12)
    llm.generate([prompts[0]], params)
    alone = llm._core.scheduler.plan_counts.copy()
    llm.generate(prompts[:3], params)
    stats, counts = llm._core.scheduler.stats, llm._core.scheduler.plan_counts
    assert set(alone.by_load) <= {("chain-4", 1), ("off", 1)}
    assert counts.by_load["chain-4", 4] > 0, "never did three have a step together"
    assert sum(counts.by_load.values()) == stats.num_steps
    for name in ("num_steps", "num_spec_steps", "num_draft_tokens", "num_accepted_tokens"):
        assert sum(getattr(x, name) for x in counts.by_plan.values()) == getattr(stats, name)
    assert counts.by_plan["chain-4"].accepted_at_depth == stats.accepted_at_depth
    for name, of_plan in counts.by_plan.items():
        steps = [count for (plan, _), count in counts.by_load.items() if plan == name]
        assert sum(steps) == of_plan.num_steps
