"""Greedy output of compiled engines equals `transformers.generate`, token for token.

The default tier runs every architecture with a tree, every third one without speculation, too, and
one with every plan; both batch sizes, one cache layout and one size of prefill chunks each. The
slow tier adds the other plans and the other layout, and drafts that equal the
target or have nothing to do with it. The slow tier leaves its figures in build/lossless.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specc.speculation.plans import SpecPlan
from tests import models
from tests.lossless import (
    FULL_MATRIX,
    PLANS,
    Zoo,
    check_all_plans,
    check_full_acceptance,
    check_matrix,
    collect_figures,
    layout_of,
    run_case,
)
from tests.tiers import every

# mean acceptance length of a draft that is sometimes right
PARTIAL = (1.2, 4.0)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """Figures of the slow cases; written when the last of them has run."""
    yield from collect_figures(request.config.rootpath / "build" / "lossless.json")


# that of tests/mutants, with a window
EVERY_PLAN = ("mistral",)
# of the others; two windows, or two blocks
FEWER_TOKENS = 32
# with one of the trees: learned positions, and experts; all others are slow
TELLING = ("gpt2", "qwen3_moe")
CASES = [
    pytest.param(
        name, plan,
        id=f"{name}-{plan.name}",
        marks=[]
        if (name in EVERY_PLAN and j in (0, 2, 3)) or (name in TELLING and j == 3 + i % 2)
        else [pytest.mark.slow],
    )
    for i, name in enumerate(models.ARCHITECTURES)
    for j, plan in enumerate(PLANS)
]  # fmt: skip


@pytest.mark.default("mistral-off", "mistral-chain-4", "mistral-tree-2-2-1", "gpt2-tree-3-2-1-1")
@pytest.mark.parametrize(("name", "plan"), CASES)
def test_greedy_equals_generate(zoo: Zoo, name: str, plan: SpecPlan) -> None:
    num_tokens = models.NUM_TOKENS if name in EVERY_PLAN else FEWER_TOKENS
    outcome, _ = check_matrix(zoo, name, plan, "noisy", num_tokens, **layout_of(name))
    if plan.tree.max_depth > 1:
        assert PARTIAL[0] <= outcome.stats.mean_acceptance_length <= PARTIAL[1]
        # depth 2 of a tree is never in place: its acceptance moves rows
        assert outcome.stats.accepted_at_depth[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", every(3, models.ROTARY_VARIANTS, 1))
def test_rotary_scaling(zoo: Zoo, name: str) -> None:
    plan = PLANS[2 + models.ROTARY_VARIANTS.index(name)]
    check_matrix(zoo, name, plan, "noisy", FEWER_TOKENS, **layout_of(name))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in (*EVERY_PLAN, *TELLING) else [pytest.mark.slow])
        for name in models.ARCHITECTURES
    ],
)
def test_references_vary(zoo: Zoo, name: str) -> None:
    """An output of one repeated token would hide almost any mistake."""
    num_tokens = models.NUM_TOKENS if name in EVERY_PLAN else FEWER_TOKENS
    tokens = [zoo.reference(name, prompt, num_tokens).tokens for prompt in models.prompts()]
    assert all(len(line) == num_tokens for line in tokens)
    assert sum(len(set(line)) for line in tokens) / len(tokens) > 8


# two plans with learned positions; all of them, and windows, in the slow tier
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(
            name, plan,
            id=f"{name}-{plan.name}",
            marks=[] if name == "gpt2" and i in (1, 2) else [pytest.mark.slow],
        )
        for name in ("gemma3", "gpt2")
        for i, plan in enumerate(PLANS[1:])
    ],
)  # fmt: skip
def test_a_draft_equal_to_the_target_is_always_accepted(
    zoo: Zoo, name: str, plan: SpecPlan
) -> None:
    check_full_acceptance(zoo, name, plan, **layout_of(name))


@pytest.mark.slow
@FULL_MATRIX
@pytest.mark.parametrize("name", models.DRAFT_NOISE)
def test_full_matrix(
    zoo: Zoo, outcomes: list[dict[str, Any]], name: str, draft: str, other: bool
) -> None:
    outcomes += check_all_plans(zoo, name, draft, **layout_of(name, other))


@pytest.mark.slow
@pytest.mark.parametrize("name", models.DRAFT_NOISE)
def test_each_prompt_alone(zoo: Zoo, name: str) -> None:
    engine = zoo.engine(name, "noisy", **layout_of(name))
    for plan in PLANS:
        for prompt in models.prompts():
            run_case(zoo, name, engine, plan.name, [prompt])
