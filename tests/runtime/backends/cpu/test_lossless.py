"""Greedy output of compiled code equals `transformers.generate`, token for token.

The same harness as test_lossless.py, with the backend cpu. Compiling a pair takes half a minute of
a core, so the default tier takes two architectures that differ in what compiled code sees: norms of
heads; sliding windows and a tied head; and of a third the bits alone: biases and learned positions.
The slow tier takes all, and leaves its figures in build/lossless_compiled.json.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from specc.runtime.backends.cpu.program import CpuProgram
from specc.runtime.backends.cpu.step import CpuStep
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.outputs.request_output import CompletionOutput
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import models
from tests.lossless import (
    FULL_MATRIX,
    PLAN_IDS,
    PLANS,
    Zoo,
    check_all_plans,
    check_bfloat16,
    check_full_acceptance,
    check_join_and_leave,
    check_matrix,
    collect_figures,
    layout_of,
    run_case,
)
from tests.runtime.live_rig import EveryNode, ScriptedNodes
from tests.tiers import every, only

NAMES = ("qwen3", "gemma3-tied", "opt")
# and those whose projections are written in another way, and experts: in rows, and of a checkpoint
# that has them transposed, with biases and without
OTHERS = ("gpt2", "mixtral", "gpt_oss", "llama4_text")
BY_NAME = pytest.mark.parametrize("name", only(("qwen3", "gemma3-tied"), NAMES))
CPU = {"backend": "cpu"}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """Figures of the slow cases; written when the last of them has run."""
    yield from collect_figures(request.config.rootpath / "build" / "lossless_compiled.json")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@BY_NAME
def test_the_engine_runs_compiled_code(zoo: Zoo, name: str) -> None:
    """Else the tests below would say nothing."""
    engine = zoo.engine(name, "noisy", **layout_of(name), **CPU)
    assert engine.backend == "cpu"
    assert {type(model) for model in (engine.target, *engine.drafts)} == {CpuProgram}
    assert {type(step) for step in engine.steps.values()} == {CpuStep}
    assert engine.steps.keys() == set(PLAN_IDS)


@pytest.mark.parametrize("plan", PLANS, ids=PLAN_IDS)
@BY_NAME
def test_greedy_equals_generate(zoo: Zoo, name: str, plan: SpecPlan) -> None:
    outcome, _ = check_matrix(zoo, name, plan, "noisy", **layout_of(name), **CPU)
    if plan.tree.max_depth > 1:
        # some proposals are accepted and some are not, else a wrong step could hide
        assert 1.2 <= outcome.stats.mean_acceptance_length < len(plan.widths) + 0.9
        assert outcome.stats.accepted_at_depth[1] > 0


@pytest.mark.default(
    "gemma3-tied-chain-1",
    "gemma3-tied-chain-4",
    "gemma3-tied-tree-2-2-1",
    "gemma3-tied-tree-3-2-1-1",
)
@pytest.mark.parametrize("plan", PLANS[1:], ids=PLAN_IDS[1:])
@BY_NAME
def test_a_draft_equal_to_the_target_is_always_accepted(
    zoo: Zoo, name: str, plan: SpecPlan
) -> None:
    check_full_acceptance(zoo, name, plan, **layout_of(name, other=True), **CPU)


@BY_NAME
def test_each_prompt_alone(zoo: Zoo, name: str) -> None:
    engine = zoo.engine(name, "noisy", **layout_of(name), **CPU)
    for prompt in models.prompts():
        run_case(zoo, name, engine, "tree-3-2-1-1", [prompt])


@pytest.mark.parametrize("plan", every(2, PLAN_IDS))
def test_requests_join_and_leave_while_others_run(zoo: Zoo, plan: str) -> None:
    """The batch grows and shrinks between steps; a plain request runs among speculative ones."""
    engine = zoo.engine("qwen3", "noisy", **layout_of("qwen3"), max_num_seqs=3, **CPU)
    check_join_and_leave(zoo, "qwen3", engine, plan, plain=1)


# the default tier has passes of that width on two threads (test_compiled_program.py), and whole
# outputs of narrow ones below
@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", NAMES)
def test_two_threads(zoo: Zoo, name: str) -> None:
    """A chunk of 64 tokens of each of five prompts is wider than what runs on one thread."""
    engine = zoo.engine(name, "noisy", block_size=16, prefill_chunk=512, **CPU)
    for plan in ("off", "chain-4", "tree-3-2-1-1"):
        run_case(zoo, name, engine, plan, models.prompts())
    assert engine.target.num_threads == 2


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_bfloat16(zoo: Zoo, name: str) -> None:
    check_bfloat16(zoo, name, zoo.engine(name, "noisy", dtype="bfloat16", **CPU))


@pytest.mark.slow
@FULL_MATRIX
@pytest.mark.parametrize("name", models.DRAFT_NOISE)
def test_full_matrix(
    zoo: Zoo, outcomes: list[dict[str, Any]], name: str, draft: str, other: bool
) -> None:
    outcomes += check_all_plans(zoo, name, draft, **layout_of(name, other), **CPU)


@pytest.mark.parametrize("rule", [None, "coupled", "mss", "swor"])
def test_trees_with_dead_nodes(zoo: Zoo, rule: str | None) -> None:
    """Of any number in a batch; and of one number they are the plan of the smaller tree."""
    engine = zoo.engine("qwen3", "noisy", **layout_of("qwen3"), **CPU)
    _, single, chain, tree, _ = PLANS
    prompts = [list(prompt) for prompt in models.prompts()]
    hot = {} if rule is None else {"temperature": 0.8, "rule": rule}
    params = [
        SamplingParams(max_tokens=32, ignore_eos=True, seed=i, **{"temperature": 0, **hot})
        for i in range(len(prompts))
    ]

    def tokens(**options: Any) -> list[list[int]]:
        found = LLM(engine, **options).generate(prompts, params)
        return [output.outputs[0].token_ids for output in found]

    assert tokens(policy=EveryNode(chain, 2)) == tokens(plan=single.name)
    if rule not in ("mss", "swor"):
        plain = tokens(plan="off")
        for plan in (chain, tree):
            policy = ScriptedNodes(plan)
            assert tokens(policy=policy) == plain
            assert any(len(set(live)) > 1 for live in policy.asked)


SCORED = SamplingParams(max_tokens=70, temperature=0, logprobs=4)


@pytest.fixture(scope="module")
def alone(zoo: Zoo) -> Callable[[str], list[CompletionOutput]]:
    """What plain decoding makes of each prompt by itself, on one thread; once for all plans."""

    @functools.cache
    def decode(name: str) -> list[CompletionOutput]:
        engine = zoo.engine(name, "noisy", **layout_of(name), **CPU)
        plain = LLM(engine, plan="off")
        with threads_of(engine, 1):
            return [plain.generate([prompt], SCORED)[0].outputs[0] for prompt in models.prompts()]

    return decode


@contextlib.contextmanager
def threads_of(engine: Engine, num_threads: int) -> Iterator[None]:
    """Programs have as many threads as torch had when they were made, unless they are told."""
    programs = [engine.target, *engine.drafts]
    before = [program.num_threads for program in programs]
    for program in programs:
        program.set_num_threads(num_threads)
    try:
        yield
    finally:
        for program, number in zip(programs, before, strict=True):
            program.set_num_threads(number)


@pytest.mark.default("gemma3-tied-tree-3-2-1-1")
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *only(
            ("qwen3", "gemma3-tied"),
            [pytest.param(n, p, id=f"{n}-{p.name}") for n in NAMES for p in PLANS[1:]],
        ),
        # whose projections take rows of any plan alike: the widest one shows it
        *only(
            [f"gpt2-{PLANS[-1].name}"],
            [pytest.param(n, p, id=f"{n}-{p.name}") for n in OTHERS for p in PLANS[1:]],
        ),
    ],
)
def test_log_probabilities_have_the_bits_of_plain_decoding(
    zoo: Zoo, alone: Callable[[str], list[CompletionOutput]], name: str, plan: SpecPlan
) -> None:
    """A tree in a batch sums as plain decoding of one request does, not only to rounding.

    One on one thread, the other on two.
    """
    wanted = alone(name)
    engine = zoo.engine(name, "noisy", **layout_of(name), **CPU)
    with threads_of(engine, 2):
        outputs = LLM(engine, plan=plan.name).generate(models.prompts(), SCORED)
        assert engine.target.num_threads == 2
    for one, other in zip(wanted, (output.outputs[0] for output in outputs), strict=True):
        assert len(one.logprobs) == 70
        assert one.logprobs == other.logprobs
