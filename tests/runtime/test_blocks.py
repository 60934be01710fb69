"""Engines whose draft fills a block in one pass."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file

from specc.cli.render import head_lines
from specc.drafters.block import BIAS_TENSORS, JOINT_TENSORS, RNN
from specc.errors import RequestError
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.execution import shared_runner
from specc.runtime.execution.shared_runner import cut_unlikely
from specc.sampling.params import SamplingParams
from specc.speculation.dynamic_tree import DynamicTree
from specc.speculation.plans import SpecPlan
from tests.block_heads import BLOCK_CASES
from tests.draft_kinds.block import RIGS
from tests.heads import VOCAB
from tests.lossless import Zoo
from tests.runtime.draft_cases import outputs
from tests.runtime.head_rig import BLOCK, CHAIN, TREE, load, prompts_of, serve
from tests.runtime.live_rig import SLOW, ByAcceptance

RIG = RIGS[0]


@pytest.mark.parametrize("backend", ["eager", pytest.param("cpu", marks=pytest.mark.slow)])
def test_trees_that_end_where_the_drafter_is_unsure(
    backend: str, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many nodes as each request's own draws say, in one batch; outputs are those of off."""
    label = backend if backend == "eager" else f"{backend}-{BLOCK}"
    engine = load(RIG.engine(zoo, "dspark-deepspec", label, backend=backend, block_size=BLOCK))
    sizes: list[tuple[int, ...]] = []

    def noted(*given: Any) -> Any:
        group = cut_unlikely(*given)
        sizes.append(group.live)
        return group

    monkeypatch.setattr(shared_runner, "cut_unlikely", noted)
    kinds = ({"temperature": 0.0}, {"temperature": 1.0, "rule": "delta"}, {"temperature": 1.0})
    core = EngineCore(engine, TREE.name, confidence_threshold=0.52)
    found = outputs(core, *kinds)
    assert found == outputs(EngineCore(engine, "off"), *kinds)
    assert {1, 1 + 2, TREE.num_nodes} <= {live for own in sizes for live in own}
    assert any(len(set(own)) > 1 for own in sizes)
    # what counts as drafted is what was verified
    assert 0 < core.scheduler.stats.num_draft_tokens <= sum(sum(own) - len(own) for own in sizes)


def test_what_drafters_say_of_their_tokens(zoo: Zoo) -> None:
    """Of every node, beside a drafter by formulas; and which requests may go by it."""
    core = EngineCore(load(RIG.engine(zoo, "dspark-deepspec")), TREE.name)
    oracle = RIG.oracle(zoo, "dspark-deepspec")
    oracle.sees_confidence = True
    oracle.check_trees(core, TREE)
    serve(core, oracle, prompts_of(BLOCK)[:2], num_tokens=4, temperature=1.5)
    assert oracle.num_confident > 8
    cutting = EngineCore(core.engine, TREE.name, confidence_threshold=0.5)
    for rule in ("mss", "swor"):
        options = SamplingParams(temperature=1.0, rule=rule)
        with pytest.raises(RequestError, match=f"rule='{rule}', and --confidence-threshold"):
            cutting.requests.make([1, 2], options)
        cutting.requests.make([1, 2], SamplingParams(temperature=0.0, rule=rule))


@pytest.mark.slow
def test_a_drafter_and_a_policy_that_both_leave_nodes_out(zoo: Zoo) -> None:
    """The smaller number counts; what the drafter left out is no refusal."""
    engine = load(RIG.engine(zoo, "dspark-deepspec"))
    core = EngineCore(engine, policy="goodput", adapts_verification=True, confidence_threshold=0.52)
    plans = {name: plan for name, plan in engine.plans.items() if plan.is_static}
    policy = ByAcceptance(plans, SLOW, {"draft_0": [[0.9]]})
    core.scheduler.use(policy)
    kinds = ({"temperature": 0.0}, {"temperature": 1.0, "rule": "delta"}, {"temperature": 1.0})
    assert outputs(core, *kinds) == outputs(EngineCore(engine, "off"), *kinds)
    pairs = [pair for x in policy.groups for pair in zip(x.live, x.allowed, strict=True)]
    whole = {group.plan.num_nodes for group in policy.groups}
    assert {live < most for live, most in pairs} == {True, False}
    # the policy has left some out, too
    assert not {most for _, most in pairs} <= whole
    # nearly nothing is accepted of random drafts
    assert policy._acceptance.rates(CHAIN)[0] < 0.9
    assert 0.3 < policy._ends.going_on(CHAIN)[0] < 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "nodes"), [("jetspec", 128), ("jetspec", 256), ("dflash2", 128), ("lilicorr", 48)]
)
def test_large_trees(case: str, nodes: int, zoo: Zoo) -> None:
    """As JetSpec drafts: seven children, and fifteen levels, or as many as a block has."""
    size = BLOCK_CASES[case].size
    count = 7 if case != "lilicorr" else 4
    plan = SpecPlan.from_dynamic(DynamicTree(nodes, count, size - 1))
    changes = {"plans": (plan,), "max_seq_len": 128, "backend": "cpu"}
    engine = load(RIG.engine(zoo, case, f"large-{nodes}", **changes))
    kinds = ({"temperature": 0.0}, {"temperature": 1.0, "rule": "delta"}, {"temperature": 1.0})
    found = outputs(EngineCore(engine, plan.name), *kinds)
    assert found == outputs(EngineCore(engine, "off"), *kinds)


@pytest.mark.slow
def test_drawn_children(zoo: Zoo) -> None:
    """Rules that verify with what children were drawn from: the same rows, of other trees."""
    core, oracle = EngineCore(load(RIG.engine(zoo)), TREE.name), RIG.oracle(zoo)
    oracle.watch(core)
    for rule in ("mss", "swor"):
        serve(core, oracle, prompts_of(BLOCK)[1:3], num_tokens=6, temperature=1.0, rule=rule)
        oracle.reset()
    assert oracle.num_passes > 6


def test_what_steps_read_is_counted(zoo: Zoo) -> None:
    """Of DSpark: weights that no program has, and which of their rows are which ids."""
    path = RIG.engine(zoo, "dspark-rnn")
    manifest = Engine.load(path).manifest
    assert manifest is not None
    stored = load_file(path / manifest.weights_file(manifest.models[1], None))
    assert {*BIAS_TENSORS.values(), *JOINT_TENSORS[RNN].values()} < stored.keys()
    assert manifest.memory_plan["draft_0"].weights == sum(x.nbytes for x in stored.values())
    assert manifest.models[1].vocab_size == VOCAB
    told = "\n".join(head_lines(manifest))
    assert "logits depend on all tokens of the block before" in told
