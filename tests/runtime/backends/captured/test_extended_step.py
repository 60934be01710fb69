"""Masks, biases and log probabilities inside of captured graphs: what eager engines say of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.errors import EngineError
from specc.runtime.backends.captured import mask_rules
from specc.runtime.backends.captured.captured_step import CapturedStep
from specc.runtime.backends.captured.pending_replay import HalfReplay
from specc.runtime.backends.captured.step_masks import MaskRow, NodeMasks, StepMasks
from specc.runtime.constraints import draft_masks
from specc.runtime.constraints.draft_masks import DraftMasks
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.outputs.logprobs import score_tokens
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from specc.speculation.plans import MERGE, DynamicTree, SpecPlan
from tests.runtime.backends.captured.captured_engine import captured_engine, eager_engine
from tests.runtime.backends.captured.simulated_device import (
    LateDevice,
    ReplayedEvent,
    SimulatedDevice,
    Tape,
)
from tests.tiers import every

DATA_PLANS = (
    SpecPlan.from_dynamic(DynamicTree(5, 3, 2)),
    SpecPlan.from_widths((1, 1), ("draft_0", "lookup-2"), MERGE),
    SpecPlan.from_widths((1, 1, 1), ("lookup-2",)),
    SpecPlan.from_widths((1, 1, 1), ("suffix",)),
)
PLANS = ("off", "tree-2-1", "chain-3", *(plan.name for plan in DATA_PLANS))
# those whose trees are like another's
SLOW = ("chain-3", *(plan.name for plan in DATA_PLANS[1:3]))
PLAN_PARAMS = [
    pytest.param(plan, marks=pytest.mark.slow) if plan in SLOW else plan for plan in PLANS
]
ON_HOST = DATA_PLANS[-1].name
# passes of drafts in a step, whose logits grammars mask
NUM_PASSES = {"tree-2-1": 2, "chain-3": 3, DATA_PLANS[0].name: 2, DATA_PLANS[1].name: 2}
# each kind of masks, with a plan in turn
MASKED = {("grammars", "tree-2-1"), ("biases", "off"), ("controls", DATA_PLANS[0].name)}
PROMPTS = ["hello", "abab" * 4, "{", "a longer one"]
LIST = StructuredOutputsParams(regex="(ab){2,5}c(ab){3}")
WORD = StructuredOutputsParams(choice=["yes", "yesterday", "no", "nothing else"])


def params_of(**options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 14} | options))


FREE = params_of(ignore_eos=True)
CASES: dict[str, list[SamplingParams]] = {
    "scored": [params_of(logprobs=3), FREE, params_of(logprobs=0), params_of(logprobs=20)],
    "grammars": [params_of(structured_outputs=LIST), params_of(structured_outputs=WORD), FREE],
    "biases": [params_of(logit_bias={66: 3.0, 70: -5.0}), FREE, params_of(bad_words=["a"])],
    "controls": [
        params_of(min_tokens=9, stop_token_ids=[*range(60, 120)]),
        params_of(bad_words=["ab", "ca", "abc"], logit_bias={97: 2.0, 98: 2.0, 99: 2.0}),
        params_of(allowed_token_ids=[*range(64, 90)]),
    ],
    "all": [
        params_of(structured_outputs=LIST, logprobs=2, logit_bias={97: 4.0}),
        params_of(bad_words=["ab", "c"], logprobs=5, temperature=1.1, seed=4),
        params_of(structured_outputs=WORD, temperature=0.7, top_p=0.9, seed=5),
        params_of(logprobs=1, temperature=0.9, seed=6),
    ],
}

# every case with two plans at least, on the host and on the device, and every plan with two cases
CASES_OF_PLANS = [
    pytest.param(
        case,
        plan,
        marks=[pytest.mark.slow] if plan in SLOW or (case != "all" and (i + j) % 2) else [],
    )
    for i, case in enumerate(CASES)
    for j, plan in enumerate(plan for plan in PLANS if plan not in SLOW)
] + [pytest.param(case, plan, marks=pytest.mark.slow) for case in CASES for plan in SLOW]


@dataclass
class Rig:
    engine: Engine
    eager: Engine
    device: SimulatedDevice
    # plan, and how many graphs were replayed, of every step; how many masks came late
    steps: list[tuple[str, int]] = field(default_factory=list)
    num_halves: int = 0

    def run(self, engine: Engine, plan: str, params: list[SamplingParams]) -> list[Any]:
        self.steps.clear()
        self.num_halves = 0
        outputs = LLM(engine, plan).generate(PROMPTS[: len(params)], params)
        return [output.outputs[0] for output in outputs]


def make_rig(path: Path, device: SimulatedDevice, patch: pytest.MonkeyPatch) -> Rig:
    rig = Rig(captured_engine(path, device, DATA_PLANS), eager_engine(path, DATA_PLANS), device)
    queue = CapturedStep._queue

    def counted(step: CapturedStep, *args: Any, **options: Any) -> Any:
        rig.steps.append((step.plan.name, 0))
        result = queue(step, *args, **options)
        rig.num_halves += isinstance(result, HalfReplay)
        return result

    kind = type(device.make_tape())
    replay, capture = kind.replay, CapturedStep.capture
    is_capturing = False

    def captured(step: CapturedStep, *args: Any) -> float:
        nonlocal is_capturing
        is_capturing = True
        try:
            return capture(step, *args)
        finally:
            is_capturing = False

    def replayed(tape: Tape) -> None:
        if not is_capturing:
            # the rest of a step comes before any other one
            name, count = rig.steps[-1]
            rig.steps[-1] = name, count + 1
        replay(tape)

    patch.setattr(kind, "replay", replayed)
    patch.setattr(CapturedStep, "capture", captured)
    patch.setattr(CapturedStep, "_queue", counted)
    return rig


@pytest.fixture(scope="module")
def rig(tiny_engine: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield make_rig(tiny_engine, SimulatedDevice(), patch)


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    for own, other in zip(found, wanted, strict=True):
        assert own.token_ids == other.token_ids
        assert own.finish_reason == other.finish_reason
        assert (own.logprobs is None) == (other.logprobs is None)
        for mine, its in zip(own.logprobs or (), other.logprobs or (), strict=True):
            assert list(mine) == list(its)
            assert {t: e.rank for t, e in mine.items()} == {t: e.rank for t, e in its.items()}
            values = {token: entry.logprob for token, entry in its.items()}
            assert {t: e.logprob for t, e in mine.items()} == pytest.approx(values, abs=1e-5)


@pytest.mark.default("all-off")
@pytest.mark.parametrize(("case", "plan"), every(4, CASES_OF_PLANS))
def test_outputs_are_those_of_an_eager_engine(rig, case, plan) -> None:
    wanted = rig.run(rig.eager, plan, CASES[case])
    assert_same(rig.run(rig.engine, plan, CASES[case]), wanted)
    # one graph a step, but where masks follow from tokens that the host does not know yet; and one
    # for each pass of a draft that obeys a grammar
    is_late = case in ("grammars", "controls", "all") and plan != ON_HOST
    most = 1 + is_late + (NUM_PASSES.get(plan, 0) if case in ("grammars", "all") else 0)
    seen = {count for name, count in rig.steps if name == plan}
    assert max(seen) == most
    assert min(seen) == 1 or is_late
    assert {count for _, count in rig.steps} <= {1, 2, most}
    assert (rig.num_halves > 0) == is_late


@pytest.mark.slow
def test_kinds_are_captured_when_they_are_asked_for(tiny_engine, monkeypatch) -> None:
    """Nothing of them before, and once for each batch size after."""
    rig = make_rig(tiny_engine, SimulatedDevice(), monkeypatch)
    free = [FREE] * 3
    rig.run(rig.engine, "chain-3", free)
    captured = len(rig.device.tapes)
    kinds = {key[1] for key in rig.engine.steps["chain-3"]._captured}
    assert kinds == {False}
    for _ in range(2):
        rig.run(rig.engine, "chain-3", [params_of(logprobs=2, ignore_eos=True), *free[1:]])
        more = len(rig.device.tapes)
        assert more > captured
    rig.run(rig.engine, "chain-3", [params_of(logprobs=2, ignore_eos=True), *free[1:]])
    assert len(rig.device.tapes) == more


@pytest.mark.default("True")
@pytest.mark.parametrize("masks_drafts", [True, False])
def test_the_device_computes_while_the_host_makes_masks(
    tiny_engine, monkeypatch, masks_drafts
) -> None:
    """When the host walks a tree, its tokens are there, and their pass is queued and not done."""
    rig = make_rig(tiny_engine, LateDevice(), monkeypatch)
    device: Any = rig.device
    waiting: list[int] = []

    def watch(module: Any) -> None:
        walk = module.tree_masks

        def watched(*args: Any) -> Any:
            waiting.append(device.num_waiting)
            return walk(*args)

        monkeypatch.setattr(module, "tree_masks", watched)

    wanted = rig.run(rig.eager, "tree-2-1", CASES["all"])
    if masks_drafts:
        watch(draft_masks)
    else:
        monkeypatch.setattr(DraftMasks, "of", lambda *args: None)
    watch(mask_rules)
    assert_same(rig.run(rig.engine, "tree-2-1", CASES["all"]), wanted)
    steps = [count for name, count in rig.steps if name == "tree-2-1"]
    assert steps.count(4 if masks_drafts else 2) > 3
    # the rest of the graph that reads these tokens
    assert waiting
    assert set(waiting) == {1}
    # passes before a mark and after it: two levels of a draft with one layer, then the target's
    # two; in one graph where nobody's grammar is left
    seen = set()
    for tape in (tape for tape in device.tapes if tape.marks):
        ((place, _),) = tape.marks
        passes = ["tree_attention" in name for name in tape.operators]
        seen.add((sum(passes[:place]), sum(passes[place:])))
    assert seen == {(2, 2)} | ({(0, 1), (0, 2)} if masks_drafts else set())
    assert_same(rig.run(rig.engine, "off", CASES["all"]), rig.run(rig.eager, "off", CASES["all"]))


def test_a_draft_that_has_not_come_is_no_draft(tiny_engine, monkeypatch) -> None:
    """An event that is still that of the replay before: an error, and no masks of its tokens."""
    rig = make_rig(tiny_engine, LateDevice(), monkeypatch)
    llm, calls = LLM(rig.engine, "chain-3"), itertools.count()
    synchronize = ReplayedEvent.synchronize
    monkeypatch.setattr(
        ReplayedEvent, "synchronize", lambda event: next(calls) > 2 or synchronize(event)
    )
    with pytest.raises(EngineError, match="plan chain-3 that is not there"):
        llm.generate(PROMPTS[:1], [params_of(structured_outputs=LIST)])
    assert next(calls) == 4


@pytest.mark.slow
@pytest.mark.parametrize("plan", every(4, PLAN_PARAMS, 1))
def test_scored_steps_are_queued_ahead(tiny_engine, monkeypatch, plan) -> None:
    """Log probabilities do not make the device wait for the host."""
    rig = make_rig(tiny_engine, LateDevice(), monkeypatch)
    ahead = []
    submit_next = CapturedStep.submit_next

    def counted(step: CapturedStep, *args: Any) -> Any:
        ahead.append(step.plan.name)
        return submit_next(step, *args)

    monkeypatch.setattr(CapturedStep, "submit_next", counted)
    params = [params_of(logprobs=k, max_tokens=20, ignore_eos=True) for k in (0, 2, 5)]
    assert_same(rig.run(rig.engine, plan, params), rig.run(rig.eager, plan, params))
    # the index of a suffix grows with the results
    assert len(ahead) > 3 or plan == DATA_PLANS[-1].name


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        pytest.param(
            case,
            plan,
            marks=[] if (case, plan) in MASKED else [pytest.mark.slow],
        )
        for case in ("grammars", "biases", "controls")
        for plan in PLANS
        if plan != ON_HOST
    ],
)
def test_masked_steps_are_queued_ahead(tiny_engine, monkeypatch, case, plan) -> None:
    """Nearly every step is verified, or queued as a whole, before the one before it is read."""
    rig = make_rig(tiny_engine, LateDevice(), monkeypatch)
    device: Any = rig.device
    # of each step that is queued: pieces of work before it that nobody has waited for
    waiting: list[int] = []

    def watch(name: str) -> None:
        original = getattr(CapturedStep, name)

        def watched(step: CapturedStep, *args: Any, **options: Any) -> Any:
            waiting.append(device.num_waiting)
            return original(step, *args, **options)

        monkeypatch.setattr(CapturedStep, name, watched)

    wanted = rig.run(rig.eager, plan, CASES[case])
    watch("submit")
    watch("submit_next")
    assert_same(rig.run(rig.engine, plan, CASES[case]), wanted)
    assert sum(map(bool, waiting)) > 0.5 * len(waiting), waiting
    assert (rig.num_halves > 0) == (case != "biases")


def masked(logits: Tensor, masks: NodeMasks, size: int) -> Tensor:
    """One row after the other, one token after the other."""
    found = logits.clone()
    for row in range(len(logits)):
        b = row // size
        is_own = b < len(masks.is_controlled) and masks.is_controlled[b]
        values = logits[row].float()
        if is_own and masks.biases[b] is not None:
            values = values + masks.biases[b]
        mask, forbidden = masks.rows.get(row, MaskRow(None))
        for token in range(logits.shape[1]):
            if (mask is not None and not mask[token // 8] >> token % 8 & 1) or token in forbidden:
                values[token] = -torch.inf
        if is_own and bool((values == -torch.inf).all()):
            values = torch.zeros_like(values)
        if row in masks.rows or is_own:
            found[row] = values.to(logits.dtype)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_biases", [True, False])
def test_masks_by_hand(dtype, has_biases) -> None:
    """Rows that share a mask, rows without one, sequences that the batch has not got, and again."""
    dice, generator = random.Random(1), torch.Generator().manual_seed(1)
    batch, size, vocab_size = 3, 70, 37
    masks = StepMasks(SimulatedDevice(), batch, size, has_biases)
    with torch.inference_mode():
        masks.apply(torch.zeros(batch * size, vocab_size, dtype=dtype))
        for count in (3, 1, 2, 0):
            some = [MaskRow(dice.randbytes(8)) for _ in range(3)]
            some += [MaskRow(None, (3, 36)), MaskRow(bytes(8)), MaskRow(b"\x0f\xf0\0\0\0", (2,))]
            rows = {row: dice.choice(some) for row in range(count * size) if dice.random() < 0.7}
            row = torch.randn(vocab_size, generator=generator)
            row[5:] = -torch.inf
            owners = [has_biases and b != 1 for b in range(count)]
            biases = [row if has_biases and b == 0 else None for b in range(count)]
            given = NodeMasks(rows, owners, biases)
            logits = torch.randn(batch * size, vocab_size, generator=generator).to(dtype)
            wanted = masked(logits, given, size)
            masks.fill(given)
            masks.apply(logits)
            assert torch.equal(logits, wanted)


@pytest.mark.parametrize("count", [0, 1, 4, 9, 20])
def test_the_best_tokens_are_those_of_a_stable_sort(count) -> None:
    """Many are equally likely, and some impossible; ids ascend among equals."""
    generator = torch.Generator().manual_seed(count)
    for vocab_size, values in ((9, 3), (50, 2), (50, 6), (300, 1000)):
        logits = torch.randint(0, values, (40, vocab_size), generator=generator) / 4
        logits[:, 2:5] = -torch.inf
        tokens = torch.randint(0, vocab_size, (40,), generator=generator)
        found = score_tokens(logits, tokens, count)
        logprobs = logits.log_softmax(dim=-1)
        best = logprobs.sort(dim=1, descending=True, stable=True)
        most = min(count, vocab_size)
        own = logprobs.gather(1, tokens[:, None])
        assert torch.equal(found[:, 0], own[:, 0].double())
        assert torch.equal(found[:, 1], ((logprobs > own).sum(1) + 1).double())
        assert torch.equal(found[:, 2 : 2 + most], best.values[:, :most].double())
        assert torch.equal(found[:, 2 + most :], best.indices[:, :most].double())
