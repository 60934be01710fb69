"""Steps of which the target verifies some nodes of each request: what smaller trees would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specc.errors import ConfigError
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.execution.draws import tree_draws
from specc.runtime.execution.shared_pass import accepted_values, tree_tokens
from specc.runtime.llm import LLM
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.sampling.rows import Word
from specc.speculation.live_nodes import DEAD
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import DynamicTree, SpecPlan
from specc.speculation.tree import TokenTree
from tests.runtime.live_rig import EveryNode, ScriptedNodes
from tests.tiers import checkered

CHAINS = [SpecPlan.from_widths((1,) * depth) for depth in range(1, 5)]
TREE = SpecPlan.from_widths((3, 2, 1))
# the first six nodes of that tree
PREFIX = SpecPlan.from_tree(TokenTree(TREE.tree.parents[:6]))
STAR = SpecPlan.from_widths((3,))
VIEW = SpecPlan.from_widths((1, 1, 1), ("self_w4_s4",))
PLANS = [SpecPlan("off"), *CHAINS, TREE, PREFIX, STAR, VIEW]


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    made = make_engine(plans=PLANS, max_num_seqs=4)
    for slabs in made.cache.slabs.values():
        for slab in slabs:
            # whoever attends to a row that was never written shall not get zeros
            slab.normal_(0.0, 30.0)
    return made


def params(rule: str | None, count: int, **options: Any) -> list[SamplingParams]:
    hot = {} if rule is None else {"temperature": 0.9, "rule": rule}
    return [
        SamplingParams(
            max_tokens=12, ignore_eos=True, seed=i, **{"temperature": 0, **hot}, **options
        )
        for i in range(count)
    ]


def tokens_of(llm: LLM, prompts: list[list[int]], options: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, options)]


@pytest.mark.default("coupled-tree-3-2-1", "delta-selfw4s4-chain-3")
@pytest.mark.parametrize(
    ("rule", "plan"), checkered([None, "coupled", "delta"], [CHAINS[3], TREE, VIEW])
)
def test_output_is_that_without_speculation(
    engine: Engine, prompts: list[list[int]], plan: SpecPlan, rule: str | None
) -> None:
    own = params(rule, len(prompts))
    policy = ScriptedNodes(plan)
    llm = LLM(engine, policy=policy)
    assert tokens_of(llm, prompts, own) == tokens_of(LLM(engine, plan="off"), prompts, own)
    # requests of one batch differ, and steps do
    assert any(len(set(live)) > 1 for live in policy.asked)
    stats = llm.get_metrics()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    # only what was verified counts as drafted, and a root alone is a plain step
    assert stats.num_draft_tokens < sum(sum(live) for live in policy.asked)
    assert stats.num_spec_steps < stats.num_steps


@pytest.mark.default("chain-None", "level-swor", "part-of-a-level-mss")
@pytest.mark.parametrize(
    ("plan", "live", "smaller", "rule"),
    checkered(
        [
            pytest.param(CHAINS[3], 3, CHAINS[1], id="chain"),
            pytest.param(CHAINS[3], 1, PLANS[0], id="root"),
            pytest.param(TREE, 4, STAR, id="level"),
            pytest.param(TREE, 6, PREFIX, id="part-of-a-level"),
        ],
        [None, "coupled", "delta", "mss", "swor"],
    ),
)
def test_first_nodes_are_the_plan_of_the_smaller_tree(
    engine: Engine,
    prompts: list[list[int]],
    plan: SpecPlan,
    live: int,
    smaller: SpecPlan,
    rule: str | None,
) -> None:
    """Also under rules whose output depends on the tree."""
    own = params(rule, 3)
    cut = LLM(engine, policy=EveryNode(plan, live))
    whole = LLM(engine, plan=smaller.name)
    assert tokens_of(cut, prompts[:3], own) == tokens_of(whole, prompts[:3], own)
    found, wanted = cut.get_metrics(), whole.get_metrics()
    for name in ("num_steps", "num_accepted_tokens", "num_draft_tokens", "accepted_at_depth"):
        assert getattr(found, name) == getattr(wanted, name), name


def test_dead_nodes_have_no_part_in_the_targets_pass(
    engine: Engine, prompts: list[list[int]]
) -> None:
    target: Any = engine.target
    policy = ScriptedNodes(CHAINS[3])
    llm = LLM(engine, policy=policy)
    target.num_tokens.clear()
    tokens_of(llm, prompts[:1], params(None, 1))
    # one token of a prompt, then a pass for each step
    assert target.num_tokens == [1, *(sum(live) for live in policy.asked)]


class Alternating(EveryNode):
    """Every other request runs another plan; of the first one, a part of each tree is live."""

    def __init__(self, plan: SpecPlan, live: int, other: SpecPlan) -> None:
        super().__init__(plan, live)
        self._names = (plan.name, other.name)
        self.asked: set[str] = set()

    def choose_each(self, requests: list[Request], stats: SpecStats) -> list[str]:
        return [self._names[i % 2] for i in range(len(requests))]

    def live_nodes(self, plan: SpecPlan, requests: Sequence[Request]) -> tuple[int, ...]:
        self.asked.add(plan.name)
        return super().live_nodes(plan, requests)


def test_beside_a_plan_in_tiles_all_nodes_are_verified(
    make_engine: Callable[..., Engine], prompts: list[list[int]]
) -> None:
    """Each then has a pass of its own, of a whole tree, and counters are those of whole trees."""
    tiled = replace(TREE, tile=4)
    engine = make_engine(plans=[SpecPlan("off"), CHAINS[3], tiled], max_num_seqs=4)
    own, policy = params(None, 4), Alternating(CHAINS[3], 2, tiled)
    llm = LLM(engine, policy=policy)
    assert tokens_of(llm, prompts[:4], own) == tokens_of(LLM(engine, plan="off"), prompts[:4], own)
    assert llm.get_metrics().num_accepted_tokens > 0
    # a request that is left alone has a pass that takes any number of nodes
    assert policy.asked <= {CHAINS[3].name}


@pytest.mark.parametrize("live", [(0, 1), (1, 6), (1,), (5, 5, 5)])
def test_numbers_that_no_tree_has_are_refused(
    engine: Engine, prompts: list[list[int]], live: tuple[int, ...]
) -> None:
    class Wrong(EveryNode):
        def live_nodes(self, plan: SpecPlan, requests: Sequence[Request]) -> tuple[int, ...]:
            return live

    llm = LLM(engine, policy=Wrong(CHAINS[3], 1))
    with pytest.raises(ConfigError, match="live_nodes of Wrong") as caught:
        llm.generate(prompts[:2], params(None, 2))
    assert f"live nodes {list(live)} for" in caught.value.found
    assert "one number of 1 … 5" in caught.value.needed


def test_only_plans_that_can_be_cut_are_asked_about(
    make_engine: Callable[..., Engine], prompts: list[list[int]]
) -> None:
    dynamic = SpecPlan.from_dynamic(DynamicTree(6, 2, 3))
    engine = make_engine(plans=[SpecPlan("off"), dynamic], max_num_seqs=4)
    policy = ScriptedNodes(dynamic)
    llm = LLM(engine, policy=policy)
    own = params(None, 3)
    assert tokens_of(llm, prompts[:3], own) == tokens_of(LLM(engine, plan="off"), prompts[:3], own)
    assert policy.asked == []


def test_controls_and_log_probabilities_beside_dead_nodes(
    engine: Engine, prompts: list[list[int]]
) -> None:
    options = {"logit_bias": {3: 4.0, 7: -5.0}, "logprobs": 2, "min_tokens": 4}
    own = params("coupled", 4, **options)
    plain = LLM(engine, plan="off").generate(prompts[:4], own)
    found = LLM(engine, policy=ScriptedNodes(TREE)).generate(prompts[:4], own)
    for one, other in zip(found, plain, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        pairs = zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True)
        for mine, wanted in pairs:
            assert mine.keys() == wanted.keys()
            for token, entry in mine.items():
                assert entry.logprob == pytest.approx(wanted[token].logprob, abs=1e-4)


def begun(engine: Engine, prompts: list[list[int]]) -> tuple[Any, Any]:
    """Inputs of a step of the tree for two requests, and what it has drafted."""
    core = EngineCore(engine, TREE.name)
    made = [
        core.requests.make(prompt, SamplingParams(temperature=0, max_tokens=9, seed=i))
        for i, prompt in enumerate(prompts[:2])
    ]
    for request in made:
        core.scheduler.add(request)
    while not all(request.is_prefilled for request in made):
        core.advance()
    (group,) = core.scheduler.schedule().groups
    inputs = core.runner.inputs(group)
    step: Any = engine.steps[TREE.name]
    return inputs, step.draft(inputs, engine.cache.environment)


def test_rows_of_live_nodes_are_those_of_the_whole_tree(
    engine: Engine, prompts: list[list[int]]
) -> None:
    inputs, drafted = begun(engine, prompts)
    whole, cut = (tree_tokens(TREE, inputs, drafted, live) for live in ((), (2, 5)))
    rows = [0, 1, *range(16, 21)]
    for name in ("tokens", "positions", "slots", "ancestors"):
        assert torch.equal(getattr(cut, name), getattr(whole, name)[rows]), name
    assert (cut.counts, cut.logit_rows.tolist()) == ([2, 5], list(range(7)))
    assert torch.equal(cut.cache_len, whole.cache_len)
    # what acceptance reads has the place of every node again
    logits, winners = torch.randn(7, 3), torch.arange(7)
    found = accepted_values(TREE, logits, inputs, drafted, (2, 5))
    assert torch.equal(found["logits"][rows], logits)
    assert found["logits"].shape == (32, 3)
    tokens = found["tokens"].flatten()
    assert torch.equal(tokens[rows], whole.tokens[rows])
    assert int((tokens == DEAD).sum()) == 32 - 7
    drawn = accepted_values(TREE, winners, inputs, drafted, (2, 5))
    assert torch.equal(drawn["winners"].flatten()[rows], winners)
    assert int((drawn["winners"] < 0).sum()) == 32 - 7
    assert torch.equal(drawn["tokens"], found["tokens"])
    # the token after each node, by its request's seed and its own position
    draws = tree_draws(cut, inputs.sampling_values, inputs.sampling_words)
    assert torch.equal(draws.positions, cut.positions + 1)
    seeds = inputs.sampling_words[:, Word.SEED]
    assert torch.equal(draws.seeds, seeds[[0] * 2 + [1] * 5])
    assert seeds[0] != seeds[1]
