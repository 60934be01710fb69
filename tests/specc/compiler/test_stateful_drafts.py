"""Compiled drafts whose layers keep states, and self-drafts of targets whose layers do.

A draft that is its target is always right; one that is wrong now and then shows nothing.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specc.artifact.backends import facts_of
from specc.artifact.directory import read_manifest
from specc.artifact.manifest import Manifest
from specc.cli.render import self_draft_lines
from specc.cli.render_states import states_table
from specc.compile_request import CompileRequest
from specc.compiler.build import build
from specc.compiler.extend import extend_engine
from specc.errors import ConfigError
from specc.refusals import refuse
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.speculation.plans import OFF, DynamicTree, SpecPlan
from tests.specc.compiler.builds import PROMPTS, Custom, options
from tests.specc.compiler.test_stateful import Hybrid
from tests.tiers import only

CHAIN, TREE = SpecPlan.from_widths((1, 1, 1)), SpecPlan.from_widths((2, 2, 1))
DYNAMIC = SpecPlan.from_dynamic(DynamicTree(5, 3, 3))
PLANS = (CHAIN, TREE, DYNAMIC)
# sequences are shorter, so that it sees all
WINDOW, LAYER_0, LAYER_1, INT8 = "self_w32_s4", "self_l0", "self_l1", "self_int8"
BACKENDS = ("cpu", "eager")


class FirstLayer(Hybrid):
    """The layers of a `Hybrid` that keep states, and not the one that attends."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.out.weight.zero_()
            self.out.bias.zero_()


def on_grid(model: nn.Module) -> nn.Module:
    """The model, its projections rounded to integers and a scale of each output."""
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, nn.Linear):
                scale = part.weight.abs().amax(dim=1, keepdim=True) / 127
                part.weight.copy_((part.weight / scale).round() * scale)
    return model


def built(path: Path, target: nn.Module, draft: nn.Module | None, *plans: SpecPlan, **kw: Any):
    build(target, draft, path, options(*plans, **kw))
    return path


def self_plans(name: str) -> list[SpecPlan]:
    shapes = (SpecPlan.from_widths((1, 1, 1), (name,)), SpecPlan.from_widths((2, 2, 1), (name,)))
    return [*shapes, SpecPlan.from_dynamic(DynamicTree(5, 3, 3), name)]


def generate(engine: Path, plan: str) -> tuple[list[list[int]], SpecStats]:
    """Greedy outputs that end with a step of chains and trees of depth 3."""
    llm = LLM(engine, plan=plan)
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)
    outputs = [list(x.outputs[0].token_ids) for x in llm.generate(PROMPTS, params)]
    return outputs, llm.get_metrics()


def accepted(metrics: SpecStats) -> list[float]:
    return list(metrics.accepted_per_depth)


def is_right(plan: SpecPlan, metrics: SpecStats) -> bool:
    """All is accepted. A dynamic tree may go on where the likeliest tokens do not, and end within a
    step.
    """
    if plan.dynamic:
        return metrics.num_spec_steps - metrics.accepted_at_depth[0] <= metrics.num_requests
    return accepted(metrics) == [1.0] * plan.max_depth


@pytest.mark.parametrize("backend", only(["cpu"], BACKENDS))
def test_a_draft_that_is_its_target(tmp_path: Path, backend: str) -> None:
    engine = built(tmp_path / "engine", Hybrid(), Hybrid(), *PLANS, backend=backend)
    wanted, _ = generate(engine, OFF.name)
    for plan in PLANS:
        found, metrics = generate(engine, plan.name)
        assert found == wanted
        assert is_right(plan, metrics), plan.name


@pytest.mark.parametrize("backend", only(["eager"], BACKENDS))
def test_beside_a_target_that_attends(tmp_path: Path, backend: str) -> None:
    engine = built(tmp_path / "engine", Custom(), Hybrid(), *PLANS, backend=backend)
    wanted, _ = generate(engine, OFF.name)
    for plan in PLANS:
        found, metrics = generate(engine, plan.name)
        assert found == wanted
        assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens


@pytest.mark.parametrize("backend", only(["eager"], BACKENDS))
def test_self_drafts_that_are_the_target(tmp_path: Path, backend: str) -> None:
    """By another block table, and by rounded weights that are equal; outputs stay exact."""
    plans = [plan for name in (WINDOW, INT8) for plan in self_plans(name)]
    engine = built(tmp_path / "engine", on_grid(Hybrid()), None, *plans, backend=backend)
    wanted, _ = generate(engine, OFF.name)
    for plan in plans:
        found, metrics = generate(engine, plan.name)
        assert found == wanted
        assert is_right(plan, metrics), plan.name


@pytest.mark.parametrize("backend", only(["cpu"], BACKENDS))
def test_self_drafts_of_some_layers(tmp_path: Path, backend: str) -> None:
    """The first layer alone proposes what a draft model of it does, from states of its own."""
    plans = [*PLANS, *self_plans(LAYER_0), *self_plans(LAYER_1)]
    engine = built(tmp_path / "engine", Hybrid(), FirstLayer(), *plans, backend=backend)
    wanted, _ = generate(engine, OFF.name)
    for same in zip(PLANS, self_plans(LAYER_0), self_plans(LAYER_1), strict=True):
        results = [generate(engine, plan.name) for plan in same]
        assert [found for found, _ in results] == [wanted] * 3
        first, second, other = (accepted(metrics) for _, metrics in results)
        assert first == second
        assert 0 < second[0] < 1
        assert other != second
    (line, _) = self_draft_lines(read_manifest(engine))
    assert "runs 0 of 1 layers of the target that attend" in line


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "engine"
    return built(path, Custom(), Hybrid(), CHAIN, backend="eager")


@pytest.fixture(scope="module")
def manifest(engine: Path) -> Manifest:
    return read_manifest(engine)


def test_what_the_engine_says(manifest: Manifest) -> None:
    draft, memory = manifest.models[1], manifest.memory_plan["draft_0"]
    state, row = 4 * (3 * 32 + 4 * 4 * 4), 4 * (32 + 32)
    assert (draft.state_bytes, draft.replay_bytes) == (state, row)
    assert (memory.states, memory.checkpoints) == (2 * (state + 4 * row), 0)
    assert list(states_table(manifest.models).columns[0].cells) == ["draft_0"] * 2


def test_larger_trees_have_more_replay_rows(engine: Path, manifest: Manifest) -> None:
    """What is fed may be more than what is verified."""
    wide = SpecPlan.from_dynamic(DynamicTree(2, 4, 3))
    with extend_engine(engine, manifest) as extension:
        found = extension.try_plans([OFF, wide], 1)
        cache = Engine.load(extension.directory).cache
    row = manifest.models[1].replay_bytes
    before = manifest.memory_plan["draft_0"].states
    assert found.memory_plan["draft_0"].states == before + 2 * (wide.num_rows - 4) * row
    assert wide.num_rows == 1 + 2 * 4
    assert [slab.shape[2] for slab in cache.draft_states[0].replay] == [9, 9]


@pytest.mark.parametrize("changes", [{"tensor_parallel_size": 2}, {"segments": True}], ids=str)
@pytest.mark.parametrize("own", [True, False], ids=["self", "model"])
def test_what_does_not_go_together(changes: dict[str, Any], own: bool) -> None:
    plans = tuple(self_plans(WINDOW)[:1] if own else [CHAIN])
    config, facts = options(*plans, **changes), facts_of("eager")
    asked = {"keeps_states": True} if own else {"stateful_drafts": ("draft_0",)}
    with pytest.raises(ConfigError) as caught:
        refuse(CompileRequest(config, plans, facts, facts.options, **asked))
    draft = "--draft self:window=32,sink=4" if own else "draft_0, a draft whose layers keep states"
    assert caught.value.found.startswith(f"{draft}, and --")
    assert next(iter(changes)).split("_")[0] in caught.value.found


def test_backends_that_tell_drafts_nothing() -> None:
    facts = facts_of("cuda")
    asked = CompileRequest(options(CHAIN), (CHAIN,), facts, facts.options)
    with pytest.raises(ConfigError) as caught:
        refuse(dataclasses.replace(asked, stateful_drafts=("draft_0",)))
    assert caught.value.found == "draft_0, a draft whose layers keep states, and the backend cuda"
    assert caught.value.do == "pass --backend cpu, or another draft"
