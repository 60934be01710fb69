"""Greedy output of compiled code equals `transformers.generate`, token for token.

The same harness as test_lossless.py, with the backend cpu. Compiling a pair takes half a minute of
a core, so the default tier takes three architectures that differ in what compiled code sees: norms
of heads; sliding windows and a tied head; biases and learned positions. The slow tier takes all,
and leaves its figures in build/lossless_compiled.json.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.config import SamplingParams, SpecPlan
from specc.runtime.compiled_program import CompiledProgram, CompiledStep
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from tests import models
from tests.lossless import (
    PLANS,
    Reference,
    Tie,
    Zoo,
    check_all_plans,
    check_full_acceptance,
    check_matrix,
    forgive_near_ties,
    layout_of,
    run_case,
    shared_zoo,
    write_figures,
)
from tests.runtime.test_lossless_ends import argmax_by_width

PLAN_IDS = [plan.name for plan in PLANS]
NAMES = ("qwen3", "gemma3-tied", "opt")
CPU = {"backend": "cpu"}


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return shared_zoo(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """Figures of the slow cases; written when the last of them has run."""
    rows: list[dict[str, Any]] = []
    yield rows
    write_figures(Path(request.config.rootpath) / "build" / "lossless_compiled.json", rows)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_runs_compiled_code(zoo: Zoo, name: str) -> None:
    """Else the tests below would say nothing."""
    engine = zoo.engine(name, "noisy", **layout_of(name), **CPU)
    assert engine.backend == "cpu"
    assert {type(model) for model in (engine.target, *engine.drafts)} == {CompiledProgram}
    assert {type(step) for step in engine.steps.values()} == {CompiledStep}
    assert engine.steps.keys() == set(PLAN_IDS)


@pytest.mark.parametrize("plan", PLANS, ids=PLAN_IDS)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_generate(zoo: Zoo, name: str, plan: SpecPlan) -> None:
    outcome, _ = check_matrix(zoo, name, plan, "noisy", **layout_of(name), **CPU)
    if plan.tree.max_depth > 1:
        # some proposals are accepted and some are not, else a wrong step could hide
        assert 1.2 <= outcome.stats.mean_acceptance_length < len(plan.widths) + 0.9
        assert outcome.stats.accepted_at_depth[1] > 0


@pytest.mark.parametrize("plan", PLANS[1:], ids=PLAN_IDS[1:])
@pytest.mark.parametrize("name", NAMES)
def test_a_draft_equal_to_the_target_is_always_accepted(
    zoo: Zoo, name: str, plan: SpecPlan
) -> None:
    check_full_acceptance(zoo, name, plan, **layout_of(name, other=True), **CPU)


@pytest.mark.parametrize("plan", PLANS[2:], ids=PLAN_IDS[2:])
def test_a_random_draft_changes_nothing(zoo: Zoo, plan: SpecPlan) -> None:
    outcome, _ = check_matrix(zoo, "opt", plan, "random", **layout_of("opt"), **CPU)
    assert outcome.stats.mean_acceptance_length < 1.3


@pytest.mark.parametrize("name", NAMES)
def test_each_prompt_alone(zoo: Zoo, name: str) -> None:
    engine = zoo.engine(name, "noisy", **layout_of(name), **CPU)
    for prompt in models.prompts():
        run_case(zoo, name, engine, "tree-3-2-1-1", [prompt])


@pytest.mark.parametrize("plan", PLANS, ids=PLAN_IDS)
def test_requests_join_and_leave_while_others_run(zoo: Zoo, plan: SpecPlan) -> None:
    """The batch grows and shrinks between steps; plain requests run among speculative ones."""
    name, lengths = "qwen3", [9, 33, 5, 64, 17]
    engine = zoo.engine(name, "noisy", **layout_of(name), max_num_seqs=3, **CPU)
    llm = LLM(engine, plan=plan.name)
    params = [
        SamplingParams(max_tokens=length, ignore_eos=True, speculative=length != 33)
        for length in lengths
    ]
    prompts = models.prompts()
    for prompt, length, output in zip(prompts, lengths, llm.generate(prompts, params), strict=True):
        whole = zoo.reference(name, prompt, models.NUM_TOKENS)
        reference = Reference(whole.tokens[:length], whole.logits[:length])
        forgive_near_ties(llm, plan.name, prompt, output.outputs[0].token_ids, reference)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", NAMES)
def test_two_threads(zoo: Zoo, name: str) -> None:
    """A chunk of 64 tokens of each of five prompts is wider than what runs on one thread."""
    engine = zoo.engine(name, "noisy", block_size=16, prefill_chunk=512, **CPU)
    for plan in ("off", "chain-4", "tree-3-2-1-1"):
        run_case(zoo, name, engine, plan, models.prompts())
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", ["qwen3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_bfloat16(zoo: Zoo, name: str) -> None:
    """As precise as the target alone: a mismatch needs a position where its rounding decides."""
    check_bfloat16(zoo, zoo.engine(name, "noisy", dtype="bfloat16", **CPU), name)


def check_bfloat16(zoo: Zoo, engine: Engine, name: str) -> None:
    model = zoo.reference_model(name, dtype="bfloat16")
    exact = copy.deepcopy(model).float()

    def require_rounding_to_matter(prompt: Sequence[int], reference: Reference, tie: Tie) -> None:
        tokens = [*prompt, *reference.tokens[: tie.position]]
        choices = argmax_by_width(model, tokens) | argmax_by_width(exact, tokens)
        assert len(choices) > 1, f"the target alone decides for {choices}: {tie}"

    ties = 0
    for plan in ("off", "tree-3-2-1-1"):
        prompts, rule = models.prompts(), require_rounding_to_matter
        outcome = run_case(zoo, name, engine, plan, prompts, 32, rule, dtype="bfloat16")
        ties += len(outcome.ties)
    assert ties <= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "other"),
    [("noisy", False), ("noisy", True), ("target", True), ("random", False)],
    ids=["noisy", "noisy-other-layout", "target", "random"],
)
@pytest.mark.parametrize("name", models.DRAFT_NOISE)
def test_full_matrix(
    zoo: Zoo, outcomes: list[dict[str, Any]], name: str, draft: str, other: bool
) -> None:
    outcomes += check_all_plans(zoo, name, draft, **layout_of(name, other), **CPU)
