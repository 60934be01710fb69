"""Engines for CUDA whose drafter says how much of each tree is verified, beside the backend eager.

A simulated device stands for the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.errors import EngineError
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.captured import backend, confident_step
from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.captured.captures import CaptureWarning
from specc.runtime.backends.captured.pending_replay import HalfReplay, PendingReplay
from specc.runtime.backends.failed_operator import OperatorError
from specc.runtime.backends.step_io import StepResult
from specc.runtime.core import EngineCore
from specc.runtime.llm import LLM
from specc.runtime.policies.base import FixedPolicy
from specc.runtime.scheduling.batch import StepGroup
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from specc.speculation.live_nodes import captured_rows
from specc.speculation.plans import SpecPlan
from tests import engines
from tests.lossless import Zoo
from tests.runtime.backends.captured.simulated_device import LateDevice, SimulatedDevice
from tests.runtime.backends.cuda.confident_rig import (
    PROMPTS,
    THRESHOLD,
    Cut,
    Served,
    params,
    served,
    write_drafter,
    write_target,
)
from tests.runtime.head_rig import CHAIN, DYNAMIC, TREE, load, options
from tests.runtime.live_rig import COUNTERS, SLOW, ByAcceptance
from tests.tiers import checkered, only

RULES = [None, "coupled", "delta"]


@pytest.fixture(scope="module")
def engine_of(zoo: Zoo) -> Callable[..., Path]:
    """An engine for CUDA with a drafter that has a confidence head, of some layout."""
    target = zoo.once("repeating-target", write_target)

    def make(name: str = "dspark-deepspec", **changes: Any) -> Path:
        drafter = zoo.once(f"repeating-{name}", lambda path: write_drafter(path, name))
        config = options(backend="cuda", plans=(CHAIN, TREE, DYNAMIC), **changes)
        label = "-".join(map(str, changes.values()))
        return zoo.once(
            f"confident-{name}-{label}", lambda made: engines.build(target, drafter, made, config)
        )

    return make


@pytest.fixture(scope="module")
def eager(engine_of: Any) -> Callable[[SpecPlan, str | None], Served]:
    """What the backend eager does with the requests of a rule, once for all tests."""

    @functools.cache
    def run(plan: SpecPlan, rule: str | None) -> Served:
        return served(engine_of(), "eager", FixedPolicy(plan.name), params(rule))

    return run


@pytest.mark.default("chain-3-coupled")
@pytest.mark.parametrize(("plan", "rule"), checkered([CHAIN, TREE], RULES, first=1))
def test_outputs_steps_and_counters_are_those_of_eager(
    engine_of: Any, eager: Any, device: SimulatedDevice, plan: SpecPlan, rule: str | None
) -> None:
    """One of the layouts whose head reads tokens; requests of a batch differ."""
    path, own, wanted = engine_of(), params(rule), eager(plan, rule)
    found = served(path, None, FixedPolicy(plan.name), own)
    assert found[:3] == wanted[:3]
    assert {1, plan.num_nodes} < {count for live in found.batches for count in live}
    assert any(len(set(live)) > 1 for live in found.batches)
    steps = [step for own in found.steps.values() for step in own]
    assert 0 < sum(accepted for _, accepted in steps) < sum(live - 1 for live, _ in steps)


@pytest.mark.default("tree")
@pytest.mark.parametrize(
    ("name", "plan"),
    [("dspark-deepspec", TREE), ("dspark-specforge", CHAIN)],
    ids=["tree", "head that reads rows alone"],
)
def test_no_more_is_verified_than_the_policy_says(
    engine_of: Any, device: SimulatedDevice, name: str, plan: SpecPlan
) -> None:
    path, own = engine_of(name), params("coupled")
    wanted = served(path, "eager", Cut(plan), own)
    found = served(path, None, policy := Cut(plan), own)
    assert found[:3] == wanted[:3]
    # both have a say
    most = {count for asked in policy.asked for count in asked}
    whole = served(path, None, FixedPolicy(plan.name), own)
    assert max(most) == plan.num_nodes
    assert wanted.counters[2] < whole.counters[2]
    pairs = [
        pair
        for live, asked in zip(found.batches, policy.asked, strict=True)
        for pair in zip(live, asked, strict=True)
    ]
    assert all(live <= most for live, most in pairs)
    assert {live < most for live, most in pairs} == {True, False}


# other rules and plans: test_outputs_steps_and_counters_are_those_of_eager, test_both_options
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "rule"), only([f"{TREE.name}-coupled"], checkered([CHAIN, TREE], RULES))
)
def test_goodput_learns_as_on_eager(
    engine_of: Any, device: SimulatedDevice, plan: SpecPlan, rule: str | None
) -> None:
    """It leaves nodes out by what it has learned, and so it does from step to step."""
    path, own = engine_of(), [replace(one, max_tokens=24) for one in params(rule)]
    # all begin together on every backend
    prompts = [prompt[:1] for prompt in PROMPTS]

    def policy() -> ByAcceptance:
        # an iteration takes so long that drafting goes on for a while
        table = replace(SLOW, iteration_s=3.0)
        return ByAcceptance({plan.name: plan}, table, {"draft_0": [[0.95]]}, shares_pass=False)

    policies = policy(), policy()
    wanted = served(path, "eager", policies[0], own, prompts=prompts)
    found = served(path, None, policies[1], own, prompts=prompts)
    assert found[:3] == wanted[:3]
    shown = [[(x.live, x.allowed) for x in one.groups] for one in policies]
    assert shown[0] == shown[1]
    pairs = {pair for live, allowed in shown[0] for pair in zip(live, allowed, strict=True)}
    assert {live < most for live, most in pairs} == {True, False}
    assert {most < plan.num_nodes for _, most in pairs} == {True, False}
    learned = [(one._acceptance.rates(plan), one._ends.going_on(plan)) for one in policies]
    assert learned[0] == learned[1]
    plain = served(path, "eager", FixedPolicy("off"), own, 0.0, prompts)
    assert found.tokens == plain.tokens


@pytest.mark.slow
def test_both_options(engine_of: Any, device: SimulatedDevice) -> None:
    """As an engine is opened with them: goodput decides while results are on their way."""
    path, own = engine_of(), [replace(one, max_tokens=24) for one in params("coupled")]
    engine = load(path, capture=CaptureLimits.lazy())
    # without it what nodes cost would be learned from this machine's clock
    engine.profile = {"latency": SLOW.to_json()}
    core = EngineCore(
        engine, policy="goodput", adapts_verification=True, confidence_threshold=THRESHOLD
    )
    groups: list[StepGroup] = []
    observe = core.scheduler.policy.observe

    def noted(group: StepGroup, step: StepResult) -> None:
        groups.append(group)
        observe(group, step)

    core.scheduler.policy.observe = noted  # type: ignore[method-assign]
    requests = [core.requests.make(p, x) for p, x in zip(PROMPTS, own, strict=True)]
    for request in requests:
        core.scheduler.add(request)
    while core.scheduler.has_work:
        core.advance()
    plain = served(path, "eager", FixedPolicy("off"), own, threshold=0.0)
    assert [request.output_token_ids for request in requests] == plain.tokens
    assert any(group.live != group.allowed for group in groups if group.allowed)
    # goodput has a say, too
    assert any(most < group.plan.num_nodes for group in groups for most in group.allowed)


# a late device: test_engines_that_serve_several
@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps_are_drafted_ahead_of_results(
    engine_of: Any, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """The device may have drafted, or do so when somebody waits for it."""
    if late:
        monkeypatch.setattr(backend, "cuda_device", LateDevice)
    path, own = engine_of(), params("coupled")
    # as long as each other, so that batches stay as they are
    own = [replace(one, max_tokens=16) for one in own[:3]]
    wanted = served(path, "eager", FixedPolicy(TREE.name), own)
    queued: list[PendingReplay | HalfReplay] = []
    queue = CapturedStep._queue

    def noted(*given: Any, **more: Any) -> PendingReplay | HalfReplay:
        queued.append(queue(*given, **more))
        return queued[-1]

    monkeypatch.setattr(CapturedStep, "_queue", noted)
    found = served(path, None, FixedPolicy(TREE.name), own)
    assert found[:3] == wanted[:3]
    num_half = sum(isinstance(step, HalfReplay) for step in queued)
    assert num_half > len(queued) / 2


@pytest.mark.default("thresholds0-False")
@pytest.mark.parametrize(
    ("thresholds", "late"), [((THRESHOLD, 0.0, 0.6), False), ((THRESHOLD, THRESHOLD), True)]
)
def test_engines_that_serve_several(
    engine_of: Any,
    device: SimulatedDevice,
    monkeypatch: pytest.MonkeyPatch,
    thresholds: tuple[float, ...],
    late: bool,
) -> None:
    """A step that was drafted ahead is queued anew where another one came in between.

    Of one threshold both are of the same graphs and read the same memory: on a late device the
    draft that was dropped still leaves its numbers there, before that of the step in between.
    """
    if late:
        monkeypatch.setattr(backend, "cuda_device", LateDevice)
    completed: list[bool] = []
    complete = HalfReplay.complete

    def noted(half: HalfReplay) -> PendingReplay | None:
        found = complete(half)
        completed.append(found is not None)
        return found

    monkeypatch.setattr(HalfReplay, "complete", noted)
    path = engine_of()
    engine = load(path, capture=CaptureLimits.lazy())
    cores = [EngineCore(engine, CHAIN.name, confidence_threshold=x) for x in thresholds]
    alone = load(path, backend="eager")
    found, wanted = [], []
    for place, (core, threshold) in enumerate(zip(cores, thresholds, strict=True)):
        other = EngineCore(alone, CHAIN.name, confidence_threshold=threshold)
        # requests differ where thresholds do not
        prompt = PROMPTS[place * late]
        for into, one in ((found, core), (wanted, other)):
            request = one.requests.make(
                prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
            )
            one.scheduler.add(request)
            into.append(request)
        while other.scheduler.has_work:
            other.advance()
    while any(core.scheduler.has_work for core in cores):
        for core in cores:
            core.advance()
    assert [x.output_token_ids for x in found] == [x.output_token_ids for x in wanted]
    counts = [x.stats.num_draft_tokens for x in found]
    assert counts == [x.stats.num_draft_tokens for x in wanted]
    assert len(set(counts)) == len(thresholds)
    assert completed.count(False) > 5


# of trees: test_live_nodes.py
@pytest.mark.parametrize(
    "plan", [CHAIN, pytest.param(TREE, marks=pytest.mark.slow)], ids=lambda plan: plan.name
)
def test_masks_and_log_probabilities_beside_unsure_drafts(
    engine_of: Any, device: SimulatedDevice, plan: SpecPlan
) -> None:
    """Grammars mask drafts before they say how sure they are, and what is verified of them."""
    path = engine_of()
    # letters of the engine's vocabulary, and never the one before, which drafts propose
    word = StructuredOutputsParams(regex="(!#){3,5}")
    more: list[dict[str, Any]] = [
        {"structured_outputs": word}, {"logit_bias": {66: 3.0}}, {"logprobs": 2}, {},
    ]  # fmt: skip
    own = [replace(one, **x) for one, x in zip(params("coupled"), more, strict=True)]
    found = []
    for backend_name in ("eager", None):
        result = served(path, backend_name, FixedPolicy(plan.name), own)
        again = result.llm.generate(PROMPTS[2], own[2])[0].outputs[0]
        found.append((result[:3], again.token_ids, again.logprobs))
    (wanted, tokens, scores), (mine, own_tokens, own_scores) = found
    assert mine == wanted
    assert own_tokens == tokens
    for one, other in zip(own_scores, scores, strict=True):
        assert one.keys() == other.keys()
        for token, entry in one.items():
            assert entry.logprob == pytest.approx(other[token].logprob, abs=1e-4)


# the default tier has drafters of requests that give way in test_blocks.py, and captured steps of
# such requests in test_in_flight_mixed.py
@pytest.mark.slow
def test_requests_that_had_to_give_way(engine_of: Any, device: SimulatedDevice) -> None:
    path, own = engine_of(), params("coupled", min_tokens=8)
    own = [replace(one, max_tokens=20) for one in own]
    wanted = served(path, "eager", FixedPolicy(TREE.name), own)
    found = served(path, None, FixedPolicy(TREE.name), own, kv_cache_tokens=76)
    assert found.llm.get_metrics().num_preemptions > 0
    assert found.tokens == wanted.tokens
    assert {1, TREE.num_nodes} < {count for live in found.batches for count in live}


def test_four_graphs_verify_whatever_is_drafted(
    engine_of: Any, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One drafts; of as many rows as are asked for, each is captured when it first is."""
    path = engine_of()
    limits = CaptureLimits(sizes=(4,), max_seconds=-1)
    made: list[int] = []
    monkeypatch.setattr(
        confident_step, "captured_rows", lambda *of: made.append(captured_rows(*of)) or made[-1]
    )
    own = [replace(one, max_tokens=16) for one in params("coupled")]
    found = served(path, None, FixedPolicy(TREE.name), own, capture=limits)
    assert len(found.batches) > len(set(made)) > 1
    assert set(made) <= {captured_rows(TREE.num_nodes, 4, count) for count in range(4, 45)}
    # every request reads the same rows, however many of them there are
    assert len(device.tapes) == 1 + len(set(made))
    draft, *tails = [[call.function for call in tape.calls] for tape in device.tapes]
    assert torch.ops.aten.sigmoid.default in draft
    assert torch.ops.specc.accept.default not in draft
    for tail in tails:
        assert torch.ops.aten.sigmoid.default not in tail
        assert torch.ops.specc.accept.default in tail


@pytest.mark.parametrize("plan", [CHAIN, DYNAMIC], ids=lambda plan: plan.name)
def test_steps_that_ask_no_drafter_do_not_compute_it(
    engine_of: Any, device: SimulatedDevice, plan: SpecPlan
) -> None:
    """Whole trees have one graph, without a launch of the confidence head."""
    engine = load(engine_of(), capture=CaptureLimits.lazy())
    LLM(engine, plan=plan.name).generate(PROMPTS[0], params(None)[0])
    # for any batch, and for those without filters
    assert len(device.tapes) == 2
    functions = {call.function for tape in device.tapes for call in tape.calls}
    assert torch.ops.aten.sigmoid.default not in functions
    assert torch.ops.aten.searchsorted.Tensor not in functions


@pytest.mark.slow
def test_a_step_with_a_hook_verifies_whole_trees(engine_of: Any, device: SimulatedDevice) -> None:
    path, own = engine_of(), params("coupled")
    engine = load(path, capture=CaptureLimits.lazy())
    seen: list[int] = []
    engine.steps[TREE.name].before_accept = lambda values: seen.append(len(values["logits"]))
    llm = LLM(engine, plan=TREE.name, confidence_threshold=THRESHOLD)
    outputs = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, own)]
    whole = LLM(load(path, backend="eager"), plan=TREE.name)
    assert outputs == [output.outputs[0].token_ids for output in whole.generate(PROMPTS, own)]
    assert seen
    found, stats = llm.get_metrics(), whole.get_metrics()
    for name in COUNTERS:
        assert getattr(found, name) == getattr(stats, name), name


@pytest.mark.parametrize("which", [0, 1], ids=["the draft", "what verifies"])
def test_a_part_that_cannot_be_captured(
    engine_of: Any, eager: Any, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """It runs operator by operator, and so does what would read memory of its graph."""
    path, own, wanted = engine_of(), params("coupled"), eager(TREE, "coupled")
    capture, limits = device.capture, CaptureLimits(sizes=(4,), max_seconds=-1)
    number = 0

    def fails(run: Callable[[], object]) -> Any:
        nonlocal number
        number += 1
        if number == which + 1:
            raise OperatorError("a copy", None, RuntimeError("it waits"))
        return capture(run)

    monkeypatch.setattr(device, "capture", fails)
    with pytest.warns(CaptureWarning, match="runs operator by operator"):
        found = served(path, None, FixedPolicy(TREE.name), own, capture=limits)
    assert found[:3] == wanted[:3]
    assert bool(device.tapes) == bool(which)


def test_counts_that_are_not_there(
    engine_of: Any, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of an older draft never pass for them."""
    steps: list[confident_step.ConfidentStep] = []
    queue = confident_step.ConfidentStep.queue

    def forgetful(step: confident_step.ConfidentStep, graphs: Any, *given: Any) -> Any:
        # the second draft is not run
        steps.append(step)
        return queue(step, [lambda: None] if len(steps) > 1 else graphs, *given)

    monkeypatch.setattr(confident_step.ConfidentStep, "queue", forgetful)
    with pytest.raises(EngineError, match=f"a draft of plan {CHAIN.name} that is not there"):
        served(engine_of(), None, FixedPolicy(CHAIN.name), params("coupled")[:1])
    assert len(steps) > 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_tokens"), [("dspark-deepspec", 5), ("dspark-specforge", 8)])
def test_the_kernels_say_the_same(
    engine_of: Any,
    device: SimulatedDevice,
    request: pytest.FixtureRequest,
    name: str,
    num_tokens: int,
) -> None:
    """With the Triton kernels, interpreted; one request is greedy."""
    path = engine_of(name)
    # so many that a draft is right once
    own = [
        replace(params(rule)[i], max_tokens=num_tokens) for i, rule in enumerate((None, "coupled"))
    ]
    wanted = served(path, "eager", FixedPolicy(TREE.name), own)
    # until now the oracles run
    request.getfixturevalue("triton_kernels")
    limits = CaptureLimits(sizes=(2,), max_seconds=-1)
    found = served(path, None, FixedPolicy(TREE.name), own, capture=limits)
    assert found[:3] == wanted[:3]
    assert found.counters[3] > 0
