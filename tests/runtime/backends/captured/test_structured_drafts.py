"""Drafts that obey grammars on captured engines: as many tokens a step as eager ones have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.captured.step_scores import StepKind
from specc.runtime.constraints.draft_masks import DraftMasks
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from specc.speculation.plans import MERGE, VOTE, DynamicTree, SpecPlan
from specc.speculation.tree import TokenTree
from tests.runtime.backends.captured.captured_engine import captured_engine, eager_engine
from tests.runtime.backends.captured.simulated_device import SimulatedDevice
from tests.tiers import only

VIEW = "self_w16_s4"
MORE = (
    SpecPlan.from_tree(TokenTree((-1, 0, 0, 2, 3))),
    SpecPlan.from_dynamic(DynamicTree(5, 3, 2)),
    SpecPlan.from_widths((2, 1), (VIEW,)),
    SpecPlan.from_widths((1, 1), ("draft_0", VIEW), MERGE),
    SpecPlan.from_widths((1, 1, 1), (VIEW, "draft_0"), VOTE),
)
OWN = (SpecPlan.from_widths((1, 1, 1)), SpecPlan.from_widths((2, 1)))
BY_NAME = {plan.name: plan for plan in (*OWN, *MORE)}
PLANS = list(BY_NAME)
RECORD = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["class", "function"]},
        "names": {"type": "array", "maxItems": 2, "items": {"type": "string", "maxLength": 3}},
    },
    "required": ["id", "kind", "names"],
    "additionalProperties": False,
}
GIVEN = [
    StructuredOutputsParams(json=RECORD, disable_any_whitespace=True),
    None,
    StructuredOutputsParams(regex="([a-c][d-f][g-i]){4,12}"),
    StructuredOutputsParams(choice=["yes", "no", "neither of both"]),
]
# of a prompt longer than what a view sees, too
PROMPTS = ["hello", "abab", "{.." * 17, "q"]
COUNTERS = (
    "num_output_tokens", "num_steps", "num_spec_steps", "num_draft_tokens", "num_accepted_tokens",
    "num_trimmed_tokens", "accepted_at_depth",
)  # fmt: skip


class Rig:
    def __init__(self, path: Path) -> None:
        self.captured = captured_engine(path, SimulatedDevice(), MORE)
        self.eager = eager_engine(path, MORE)

    def run(self, engine: Engine, plan: str, **options: Any) -> tuple[list[Any], dict[str, Any]]:
        """Outputs and counters of four requests, one of which nothing constrains."""
        params = [
            SamplingParams(
                max_tokens=60 if one else 30,
                structured_outputs=one,
                ignore_eos=one is None,
                seed=b,
                **{"temperature": 0, **options},
            )
            for b, one in enumerate(GIVEN)
        ]
        llm = LLM(engine, plan)
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
        counters = llm.get_metrics()
        found = [(output.token_ids, output.finish_reason) for output in outputs]
        return found, {name: getattr(counters, name) for name in COUNTERS}


@pytest.fixture(scope="module")
def rig(tiny_engine: Path) -> Rig:
    return Rig(tiny_engine)


@contextlib.contextmanager
def unmasked() -> Iterator[None]:
    """Drafts that know nothing of grammars."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftMasks, "of", lambda *args: None)
        yield


HOW = [
    pytest.param({"temperature": 0.0}, id="greedy"),
    pytest.param({"temperature": 1.2}, id="coupled"),
    pytest.param({"temperature": 1.2, "rule": "delta"}, id="delta"),
    pytest.param({"temperature": 1.2, "rule": "mss"}, id="mss"),
    pytest.param({"temperature": 0.9, "rule": "swor", "top_p": 0.9}, id="swor"),
]
CASES = [
    pytest.param(plan, *how.values, id=f"{plan}-{how.id}")
    for plan in PLANS
    for how in HOW
    if how.id in ("greedy", *(rule.name.lower() for rule in BY_NAME[plan].rules))
]
FAST = ("chain-3-coupled", f"{MORE[0].name}-mss", f"{MORE[1].name}-greedy")


@pytest.mark.default("chain-3-coupled")
@pytest.mark.parametrize(("plan", "options"), only(FAST, CASES))
def test_tokens_a_step_are_those_of_an_eager_engine(rig, plan, options) -> None:
    """Token for token, and step for step; and coupled ones are those of plain decoding."""
    found, counters = rig.run(rig.captured, plan, **options)
    wanted, others = rig.run(rig.eager, plan, **options)
    assert found == wanted
    assert counters == others
    assert {reason for _, reason in found} == {"stop", "length"}
    if "rule" not in options:
        assert found == rig.run(rig.captured, "off", **options)[0]


@pytest.mark.slow
def test_drafts_that_obey_have_more_tokens_a_step(rig) -> None:
    """Outputs stay."""
    found, counters = rig.run(rig.captured, "tree-2-1")
    with unmasked():
        plain, others = rig.run(rig.captured, "tree-2-1")
    assert found == plain
    assert counters["num_accepted_tokens"] > 1.5 * others["num_accepted_tokens"]


def test_what_alone_may_follow_is_proposed(rig) -> None:
    """Models of random weights agree on a text that leaves no choice."""
    text = "nothing else but this one"
    params = SamplingParams(
        temperature=0, max_tokens=30, structured_outputs=StructuredOutputsParams(choice=[text])
    )
    llm = LLM(rig.captured, "chain-3")
    (output,) = llm.generate("hello", params)
    assert output.outputs[0].text == text
    # the prompt yields the first; each step four, until EOS
    num_tokens = len(output.outputs[0].token_ids)
    assert llm.get_metrics().num_spec_steps == -(-(num_tokens - 1) // 4)


@pytest.mark.slow
def test_batches_without_grammars_stay_one_graph(rig, monkeypatch) -> None:
    """Before one with a grammar, and after it; and a grammar masks none of the others' drafts."""
    step = rig.captured.steps["chain-3"]
    kinds: list[StepKind | None] = []
    queue = CapturedStep._queue

    def watched(own: CapturedStep, *args: Any, **options: Any) -> Any:
        kinds.append(own.kind)
        return queue(own, *args, **options)

    monkeypatch.setattr(CapturedStep, "_queue", watched)
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    given = SamplingParams(temperature=0, max_tokens=60, structured_outputs=GIVEN[0])
    found = []
    for params in ([free, free], [free, given], [free, free]):
        kinds.clear()
        llm = LLM(rig.captured, "chain-3")
        found.append([x.outputs[0].token_ids for x in llm.generate(PROMPTS[:2], params)])
        masked = [kind for kind in kinds if kind is not None]
        assert bool(masked) == (given in params)
        assert all(kind.masks_drafts for kind in masked)
    assert found[0] == found[2]
    assert found[0][0] == found[1][0]
    graphs = {key: len(own or ()) for key, own in step._captured.items()}
    assert {count for (_, kind), count in graphs.items() if kind is False} == {1}
    assert {count for (_, kind), count in graphs.items() if kind} == {5}
