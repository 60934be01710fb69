"""Greedy output with every shape and combination of drafts equals `transformers.generate`.

The same harness as test_lossless.py. The default tier runs one architecture compiled, with all
plans, and on eager graphs, whose operators are the slow oracles, architectures of each kind with
some of them; the slow tier takes all, compiles all and leaves its figures in
build/lossless_drafts.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specc.runtime.llm import LLM
from specc.runtime.policies.base import Policy
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import drafts, models
from tests.drafts import PLAN_IDS, PLANS
from tests.lossless import Zoo, check_join_and_leave, collect_figures, run_case
from tests.tiers import every, only

COMPILED = (
    "qwen3",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3-tied", "opt")),
)
# what differs in the passes that a tree asks for: norms of heads, windows, both kinds of positions,
# experts; test_lossless.py has static trees of every architecture
KINDS = ("qwen3", "gemma3", "gpt2", "phi", "mixtral")
# every plan with one of them; every plan and every architecture, with two or more, in the slow tier
EAGER = [
    pytest.param(
        name, plan,
        marks=[] if name in KINDS and j % len(KINDS) == KINDS.index(name) else [pytest.mark.slow],
    )
    for i, name in enumerate(models.ARCHITECTURES)
    for j, plan in enumerate(PLAN_IDS)
    if (i + j) % 7 == 0 or (name in KINDS and j % len(KINDS) == KINDS.index(name))
]  # fmt: skip


# every plan with a tile of one node, of some, or of more than it has; the others in the slow tier
TILED = [
    pytest.param(plan, tile, marks=[pytest.mark.slow] if (i + j) % 3 else [])
    for i, plan in enumerate(PLAN_IDS)
    for j, tile in enumerate((1, 3, 99))
]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """Figures of the slow cases; written when the last of them has run."""
    yield from collect_figures(request.config.rootpath / "build" / "lossless_drafts.json")


# of the oracles; two blocks, and a window
FEWER_TOKENS = 32


def check(
    zoo: Zoo, name: str, plan: SpecPlan, backend: str, num_tokens: int = models.NUM_TOKENS
) -> list[dict[str, Any]]:
    """All prompts in one batch, then one of them alone."""
    engine = drafts.engine(zoo, name, backend)
    prompts = models.prompts()
    alone = prompts[PLANS.index(plan) % len(prompts)]
    rows = []
    for batch in (prompts, [alone]):
        outcome = run_case(zoo, name, engine, plan.name, batch, num_tokens)
        case = {"model": name, "plan": plan.name, "batch": len(batch), "backend": backend}
        rows.append(case | outcome.to_json())
        assert outcome.stats.num_spec_steps > 0
        if "draft_0" in plan.drafts and len(batch) > 1:
            # some proposals are accepted and some are not, else a wrong step could hide
            assert 1.05 < outcome.stats.mean_acceptance_length < plan.max_depth + 0.98
    return rows


# dynamic trees of the default tier are compiled, below
@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), only(["qwen3", "gpt2"], every(4, EAGER, 2)), ids=str)
def test_greedy_equals_generate(zoo: Zoo, name: str, plan: str) -> None:
    check(zoo, name, PLANS[PLAN_IDS.index(plan)], "eager", FEWER_TOKENS)


@pytest.mark.parametrize("plan", every(2, PLANS), ids=PLAN_IDS)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_greedy_equals_generate(zoo: Zoo, name: str, plan: SpecPlan) -> None:
    check(zoo, name, plan, "cpu")


@pytest.mark.parametrize(("plan", "tile"), every(8, TILED), ids=str)
def test_compiled_greedy_in_tiles(zoo: Zoo, plan: str, tile: int) -> None:
    with drafts.in_tiles(drafts.engine(zoo, "qwen3", "cpu"), tile):
        check(zoo, "qwen3", PLANS[PLAN_IDS.index(plan)], "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dynamic-10-3-3", "merge-0+1-tree-2-1-1"])
def test_greedy_in_tiles(zoo: Zoo, plan: str) -> None:
    """A sliding window, and operators that are oracles."""
    with drafts.in_tiles(drafts.engine(zoo, "gemma3", "eager"), 3):
        check(zoo, "gemma3", PLANS[PLAN_IDS.index(plan)], "eager", FEWER_TOKENS)


# greedy; filtered; penalized; all of it
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.3},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.1, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 0.7, "min_p": 0.01, "top_k": 20, "frequency_penalty": 0.2},
    {"temperature": 1.0, "rule": "delta"},
)


@pytest.mark.parametrize(("plan", "tile"), every(4, TILED[::2], 1), ids=str)
def test_seeded_tokens_are_those_without_tiles_and_without_drafts(
    zoo: Zoo, plan: str, tile: int
) -> None:
    engine = drafts.engine(zoo, "qwen3", "cpu")
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=20 + i, **{"temperature": 0, **options})
        for i, options in enumerate(_OPTIONS)
    ]

    def tokens(name: str) -> list[list[int]]:
        llm = LLM(engine, plan=name)
        outputs = llm.generate([list(prompt) for prompt in models.prompts()], params)
        assert name == "off" or llm.get_metrics().num_accepted_tokens > 0
        return [output.outputs[0].token_ids for output in outputs]

    wanted = tokens("off")
    assert tokens(plan) == wanted
    with drafts.in_tiles(engine, tile):
        assert tokens(plan) == wanted


@pytest.mark.parametrize("plan", every(3, PLAN_IDS[::3]))
def test_requests_join_and_leave_while_others_run(zoo: Zoo, plan: str) -> None:
    """The batch grows and shrinks between steps; a plain request runs among speculative ones."""
    engine = drafts.engine(zoo, "qwen3", "cpu")
    check_join_and_leave(zoo, "qwen3", engine, plan, plain=1)


def test_plans_of_all_kinds_follow_each_other(zoo: Zoo) -> None:
    """Every draft lags behind by another number of tokens whenever its turn comes."""
    engine = drafts.engine(zoo, "qwen3", "cpu")

    class Turns(Policy):
        count = 0

        def choose(self, num_running: int, stats: object) -> str:
            self.count += 1
            return ["off", *PLAN_IDS][(self.count * 5) % (len(PLAN_IDS) + 1)]

    llm = LLM(engine, policy=Turns())
    params = SamplingParams(temperature=0, max_tokens=models.NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([list(prompt) for prompt in models.prompts()], params)
    for prompt, output in zip(models.prompts(), outputs, strict=True):
        wanted = zoo.reference("qwen3", prompt, models.NUM_TOKENS).tokens
        assert output.outputs[0].token_ids == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", models.DRAFT_NOISE)
def test_full_matrix(zoo: Zoo, outcomes: list[dict[str, Any]], name: str) -> None:
    for plan in PLANS:
        outcomes += check(zoo, name, plan, "cpu")
