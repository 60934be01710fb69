"""Engines for CUDA whose captured steps verify parts of trees, beside the backend eager.

A simulated device stands for the GPU.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.config import CompileConfig
from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.captured.step_scores import StepKind
from specc.runtime.backends.step_io import StepInputs, StepResult
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.scheduling.batch import StepGroup
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from specc.speculation.plans import SpecPlan
from tests import engines
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.runtime.backends.cuda.test_backend import Launches
from tests.runtime.live_rig import COUNTERS, ScriptedNodes
from tests.tiers import checkered


class Told(ScriptedNodes):
    """The same numbers on every backend: asked when all results are there."""

    needs_results = True


class ByRequest(ScriptedNodes):
    """A number for each request, so that steps may be queued ahead."""

    def live_nodes(self, plan: SpecPlan, requests: Sequence[Request]) -> tuple[int, ...]:
        self.asked.append(tuple(1 + int(r.request_id) % self._most for r in requests))
        return self.asked[-1]


PROMPTS = [[5, 6, 7, 8], [40, 41], [9] * 7, list(range(60, 83))]
TREES = [SpecPlan.from_widths((3, 2, 1)), SpecPlan.from_widths((1, 1, 1))]


def params(rule: str | None, **options: Any) -> list[SamplingParams]:
    hot = {} if rule is None else {"temperature": 0.9, "rule": rule}
    return [
        SamplingParams(
            max_tokens=9 + i, ignore_eos=True, seed=i, **{"temperature": 0, **hot}, **options
        )
        for i in range(len(PROMPTS))
    ]


@pytest.fixture(scope="module")
def cuda_engine(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target and itself as its draft: what is cut would have been accepted."""
    path = tmp_path_factory.mktemp("engines") / "cuda"
    config = CompileConfig(plans=tuple(TREES), max_seq_len=64, max_batch_size=4, backend="cuda")
    return engines.build(tiny_models.target, tiny_models.target, path, config)


@pytest.mark.default("chain-3-None")
@pytest.mark.parametrize(
    ("plan", "rule"), checkered(TREES, [None, "coupled", "delta", "mss", "swor"], first=1)
)
def test_outputs_and_counters_are_those_of_eager(
    cuda_engine: Path, device: SimulatedDevice, plan: SpecPlan, rule: str | None
) -> None:
    found = []
    for backend in ("eager", None):
        engine = Engine.load(cuda_engine, backend=backend)
        policy = Told(plan)
        llm = LLM(engine, policy=policy)
        outputs = llm.generate(PROMPTS, params(rule))
        tokens = [output.outputs[0].token_ids for output in outputs]
        stats = llm.get_metrics()
        found.append((tokens, policy.asked, [getattr(stats, name) for name in COUNTERS]))
    (wanted, asked, counters), mine = found
    assert mine == (wanted, asked, counters)
    assert any(len(set(live)) > 1 for live in asked)
    # a root is no draft token
    num_roots, num_nodes = sum(map(len, asked)), sum(map(sum, asked))
    assert 0 < counters[3] <= counters[2] <= num_nodes - num_roots


class AtRandom(ByRequest):
    """Numbers that differ from step to step, whatever the steps before have shown."""

    def __init__(self, plan: SpecPlan) -> None:
        super().__init__(plan)
        self._random = random.Random(3)
        # of each step that was committed: levels that were verified, and accepted
        self.seen: list[tuple[list[int], list[int]]] = []

    def live_nodes(self, plan: SpecPlan, requests: Sequence[Request]) -> tuple[int, ...]:
        return tuple(self._random.randint(1, plan.num_nodes) for _ in requests)

    def observe(self, group: StepGroup, step: StepResult) -> None:
        levels = [len(group.levels(i)) for i in range(len(group.requests))]
        self.seen.append((levels, step.num_accepted))


def test_steps_ahead_verify_what_was_decided_for_them(
    cuda_engine: Path, device: SimulatedDevice
) -> None:
    """All that is verified is accepted, as the target drafts for itself."""
    plan = TREES[1]
    policy = AtRandom(plan)
    own = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    LLM(Engine.load(cuda_engine), policy=policy).generate(PROMPTS[:3], [own] * 3)
    assert all(levels == accepted for levels, accepted in policy.seen)
    assert len({tuple(levels) for levels, _ in policy.seen}) > 4


@pytest.mark.slow
@pytest.mark.parametrize("rule", [None, pytest.param("coupled", marks=pytest.mark.slow)])
def test_steps_are_queued_ahead(
    cuda_engine: Path, device: SimulatedDevice, rule: str | None
) -> None:
    plan = TREES[0]
    engine = Engine.load(cuda_engine)
    step = engine.steps[plan.name]
    ahead: list[bool] = []
    submit_next, submit = step.submit_next, step.submit

    def noted_next(*args: Any, **options: Any) -> Any:
        ahead.append(True)
        return submit_next(*args, **options)

    def noted(inputs: StepInputs, requests: Any = (), carried: Any = (), extras: Any = None) -> Any:
        ahead.append(any(carried))
        assert extras is not None
        assert inputs.extra["live"].tolist()
        return submit(inputs, requests, carried, extras)

    step.submit_next, step.submit = noted_next, noted
    policy = ByRequest(plan)
    llm = LLM(engine, policy=policy)
    own = params(rule)
    outputs = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, own)]
    plain = LLM(Engine.load(cuda_engine, backend="eager"), plan="off").generate(PROMPTS, own)
    assert outputs == [output.outputs[0].token_ids for output in plain]
    assert sum(ahead) >= len(ahead) / 2
    assert llm.get_metrics().num_accepted_tokens > 0


@pytest.mark.slow
def test_masks_and_log_probabilities_beside_dead_nodes(
    cuda_engine: Path, device: SimulatedDevice
) -> None:
    """Graphs of several parts, too: grammars mask drafts, and what is verified of them."""
    plan = TREES[0]
    word = StructuredOutputsParams(regex="(ab){2,5}c(ab){3}")
    own = [
        replace(one, **more)
        for one, more in zip(
            params("coupled"),
            [{"structured_outputs": word}, {"logit_bias": {66: 3.0}}, {"logprobs": 2}, {}],
            strict=True,
        )
    ]
    found = []
    for backend in ("eager", None):
        engine = Engine.load(cuda_engine, backend=backend)
        llm = LLM(engine, policy=Told(plan))
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, own)]
        stats = llm.get_metrics()
        counters = [getattr(stats, name) for name in COUNTERS]
        found.append(([output.token_ids for output in outputs], counters, outputs[2].logprobs))
    (tokens, counters, scores), (own_tokens, own_counters, own_scores) = found
    assert own_tokens == tokens
    assert own_counters == counters
    for mine, wanted in zip(own_scores, scores, strict=True):
        assert mine.keys() == wanted.keys()
        for token, entry in mine.items():
            assert entry.logprob == pytest.approx(wanted[token].logprob, abs=1e-4)


def test_a_step_with_a_hook_verifies_whole_trees(
    cuda_engine: Path, device: SimulatedDevice
) -> None:
    """Counters are then those of whole trees."""
    plan = TREES[0]
    engine = Engine.load(cuda_engine)
    seen: list[int] = []
    engine.steps[plan.name].before_accept = lambda values: seen.append(len(values["logits"]))
    llm = LLM(engine, policy=Told(plan))
    own = params(None)
    outputs = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, own)]
    whole = LLM(Engine.load(cuda_engine, backend="eager"), plan=plan.name)
    wanted = [output.outputs[0].token_ids for output in whole.generate(PROMPTS, own)]
    assert outputs == wanted
    assert seen
    found, stats = llm.get_metrics(), whole.get_metrics()
    for name in COUNTERS:
        assert getattr(found, name) == getattr(stats, name), name


@pytest.mark.slow
def test_launches_do_not_depend_on_what_is_live(
    cuda_engine: Path, device: SimulatedDevice, triton_kernels: None
) -> None:
    """The same kernels with the same numbers, and no host read: one graph serves every choice."""
    plan, found = TREES[0], []
    loaded = Engine.load(cuda_engine, capture=CaptureLimits.lazy())
    step = loaded.steps[plan.name]
    table = torch.arange(loaded.cache.shape.num_blocks, dtype=torch.int32).view(4, -1)[:2]
    values = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]] * 2)
    rows = step.pass_rows(2, 12)
    for live in ([7, 5], [1, 11], [2, 1]):
        extra = {"live": torch.tensor(live, dtype=torch.int32)}
        words = torch.zeros(2, 4, dtype=torch.int64)
        inputs = StepInputs([(5, 6, 1), (7, 8, 30)], table, values, words, extra)
        step.buffers.copy_from(inputs, 2)
        bound = step._bind(2, StepKind(num_rows=rows))
        with pytest.MonkeyPatch.context() as patch:
            launches = Launches(patch)
            bound.run()
        found.append(launches.made)
    assert found[0] == found[1] == found[2]
    names = [name for name, _ in found[0]]
    assert {"attend_kernel", "accept_walk_kernel", "commit_kv_kernel"} <= set(names)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["coupled", "swor"])
def test_the_kernels_say_the_same(
    cuda_engine: Path, device: SimulatedDevice, request: pytest.FixtureRequest, rule: str
) -> None:
    """With the Triton kernels, interpreted; one request is greedy."""
    plan, found = TREES[0], []
    hot = {"temperature": 0.9, "rule": rule, "repetition_penalty": 1.1}
    own = [
        SamplingParams(max_tokens=4, ignore_eos=True, seed=i, **{"temperature": 0, **more})
        for i, more in enumerate([{}, hot])
    ]
    for backend in ("eager", None):
        if backend is None:
            # until now the oracles run
            request.getfixturevalue("triton_kernels")
        limits = CaptureLimits(sizes=(2,), max_seconds=-1)
        engine = Engine.load(cuda_engine, backend=backend, capture=limits)
        llm = LLM(engine, policy=Told(plan))
        outputs = [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:2], own)]
        stats = llm.get_metrics()
        found.append((outputs, [getattr(stats, name) for name in COUNTERS]))
    assert found[0] == found[1]
    assert found[0][1][3] > 0


def test_the_option_is_taken(
    cuda_engine: Path, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By goodput, which asks what its plan's pass costs by the rows of graphs."""
    llm = LLM(Engine.load(cuda_engine), policy="goodput", adapts_verification=True)
    policy = llm._core.scheduler.policy
    # graphs of 1, 2 and 4 requests
    assert [policy._seconds.graph_size(count) for count in (1, 2, 3)] == [1, 2, 4]
    asked: list[tuple[int, ...]] = []
    live_nodes = policy.live_nodes

    def noted(plan: SpecPlan, requests: Sequence[Request]) -> tuple[int, ...]:
        live_nodes(plan, requests)
        # whatever its table says of this machine
        asked.append(tuple(1 + i % plan.num_nodes for i in range(len(requests))))
        return asked[-1]

    monkeypatch.setattr(policy, "live_nodes", noted)
    own = params(None)
    outputs = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, own)]
    plain = LLM(Engine.load(cuda_engine, backend="eager"), plan="off").generate(PROMPTS, own)
    assert outputs == [output.outputs[0].token_ids for output in plain]
    assert asked
