"""Sampled outputs of hybrids follow the target's own distribution, whatever speculates.

As in test_head_distribution.py there are six tokens, so that transformers can say how probable each
continuation is. A state that is a token behind, ahead, or of another path moves all that follow.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.sampling.rows import Rule
from specc.speculation.plans import MERGE, SpecPlan
from tests import engines, hybrids, models
from tests.kernels.distribution import VOCAB, Outcome
from tests.lossless import Zoo
from tests.runtime.head_draws import PROMPT, Drawn, Exact, draw
from tests.runtime.head_rig import CHAIN, DYNAMIC, TREE, load, options

LOOKUP = SpecPlan.from_widths((1, 1, 1), ("lookup-1",))
SUFFIX = SpecPlan.from_widths((1, 1, 1), ("suffix",))
MERGED = SpecPlan.from_widths((2, 1), ("draft_0", "suffix"), MERGE)
PLANS = (CHAIN, TREE, DYNAMIC, LOOKUP, SUFFIX, MERGED)
DRAFTED = (CHAIN, TREE)
BATCH = 64
# of the slow tier, and of one case in the default tier
NUM_DRAWS, FEW = 6_400, 1_280
CASES = [
    pytest.param(name, plan, rule, id=f"{name}-{plan.name}-{rule.name.lower()}")
    for name in hybrids.COVERING
    for plan in PLANS
    for rule in plan.rules
]
NAME = hybrids.COVERING[0]


@pytest.fixture(scope="module")
def checkpoint(zoo: Zoo) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        return zoo.once(
            f"drawn-{name}", lambda path: models.save_tiny(name, path, vocab_size=VOCAB)
        )

    return make


@pytest.fixture(scope="module")
def draft(zoo: Zoo) -> Path:
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 1}
    return zoo.once("drawn-draft", lambda path: models.save_tiny("llama", path, 3, **sizes))


def transformers_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine_of(zoo: Zoo, checkpoint: Callable[[str], Path], draft: Path) -> Callable[..., Engine]:
    def make(name: str, plans: tuple[SpecPlan, ...] = PLANS) -> Engine:
        config: CompileConfig = options(
            plans=plans, max_batch_size=BATCH, max_seq_len=24, prefill_chunk=BATCH * len(PROMPT),
            backend="cpu",
        )  # fmt: skip
        target = checkpoint(name)
        return load(
            zoo.once(
                f"drawn-engine-{name}-{len(plans)}",
                lambda path: engines.build(target, draft, path, config),
            )
        )

    return make


@pytest.fixture(scope="module")
def exact_of(checkpoint: Callable[[str], Path], draft: Path) -> Callable[[str], Exact]:
    known: dict[str, Exact] = {}

    def make(name: str) -> Exact:
        if name not in known:
            drafter = transformers_model(draft)

            @torch.no_grad()
            def logits(tokens: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
                return drafter(torch.tensor([[*tokens, *path]])).logits[0, -1]

            known[name] = Exact(transformers_model(checkpoint(name)), logits)
        return known[name]

    return make


def lose_states(engine: Engine) -> None:
    """Of all requests, in every step with a tree, before its path is accepted."""
    states = engine.cache.states
    assert states is not None

    def lose(_: object) -> None:
        for slab in states.states:
            slab.zero_()

    engine.steps[TREE.name].before_accept = lose


def check(engine: Engine, exact: Exact, plan: SpecPlan, rule: Rule, num: int, case: str) -> Outcome:
    """Outputs, and of trees that a model drafts how often each depth is accepted."""
    drawn: Drawn = draw(engine, plan, rule, num, zlib.crc32(case.encode()) << 20)
    outcome = exact.outcome(drawn)
    assert outcome.num_draws == num
    assert outcome.is_lossless, outcome
    assert outcome.accepted_per_step > 0.1, "hardly anything was speculated"
    if plan in DRAFTED:
        found = exact.acceptances(drawn, rule, plan.widths)
        assert found
        for one in found:
            assert one.chi_square < one.bound, one
    return outcome


def test_a_tree_and_states_that_are_lost(
    engine_of: Callable[..., Engine], exact_of: Callable[[str], Exact]
) -> None:
    """What is lost is seen; else that the tree is lossless would say nothing of states."""
    engine, exact = engine_of(NAME, (TREE,)), exact_of(NAME)
    check(engine, exact, TREE, Rule.MSS, FEW, "few")
    lose_states(engine)
    assert not exact.outcome(draw(engine, TREE, Rule.COUPLED, FEW, 1 << 40)).is_lossless


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan", "rule"), CASES)
def test_every_case(
    engine_of: Callable[..., Engine],
    exact_of: Callable[[str], Exact],
    name: str,
    plan: SpecPlan,
    rule: Rule,
) -> None:
    case = f"{name}-{plan.name}-{rule.name}"
    check(engine_of(name), exact_of(name), plan, rule, NUM_DRAWS, case)
