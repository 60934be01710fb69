"""Engines for TensorRT from end to end, on the recorder: whole generations, captured and replayed.

The engines' ONNX files run on onnxruntime in float32, at the addresses, in the shapes and in the
order that the runtime gives to TensorRT; the plans are recorded, not built. Output is that of
transformers, token for token. A draft that equals the target shows what touches drafts alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specc.runtime.backends.capture_limits import CaptureLimits
from specc.runtime.backends.captured.step_buffers import StepBuffers
from specc.runtime.backends.eager.program import ModelProgram
from specc.runtime.backends.padded import model as padded_model
from specc.runtime.backends.padded.model import WholeBatch
from specc.runtime.backends.tensorrt.program import TensorRTProgram
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.runner import Runner
from specc.sampling.params import SamplingParams
from specc.speculation.plans import MERGE, OFF, VOTE, DynamicTree, SpecPlan
from specc.speculation.tree import TokenTree
from tests import drafts, models
from tests.lossless import (
    BATCH_SIZES,
    Zoo,
    check_join_and_leave,
    full_acceptance,
    layout_of,
    run_case,
)
from tests.near_ties import require_near_tie
from tests.runtime.backends.tensorrt.recorded_engines import (
    compile_recorded,
    load_poisoned,
    on_recorder,
)
from tests.runtime.backends.tensorrt.recorder import (
    DynamicShapesKernelSpecializationStrategy as Kernels,
)
from tests.runtime.backends.tensorrt.recorder import Recorder
from tests.runtime.test_draft_catch_up import Script
from tests.tiers import every

pytestmark = pytest.mark.filterwarnings(
    "error::specc.runtime.backends.captured.captures.CaptureWarning"
)

NAME, NUM_TOKENS, CHUNK = "mistral", 24, 7
# between nodes 1 and 3, and 4 and 6, which have children, lies a leaf
GAPS = TokenTree((-1, 0, 0, 0, 1, 3, 3, 4, 6, 6, 9))
TWO = ("draft_0", "draft_1")
# draft_1 is the target itself
CHAIN, TREE = SpecPlan.from_widths((1,) * 4), SpecPlan.from_widths((3, 2, 1))
EQUAL = SpecPlan.from_widths((1,) * 4, ("draft_1",)), SpecPlan.from_widths((2, 2, 1), ("draft_1",))
PLANS = (
    CHAIN,
    TREE,
    SpecPlan.from_tree(GAPS),
    SpecPlan.from_dynamic(DynamicTree(8, 2, 3)),
    SpecPlan.from_widths((2, 1, 1), TWO, MERGE),
    SpecPlan.from_widths((1, 1, 1), (*TWO, "lookup-2"), VOTE),
    SpecPlan.from_widths((1,) * 5, ("suffix",)),
    *EQUAL,
)
PLAN_IDS = [OFF.name, *(plan.name for plan in PLANS)]


@pytest.fixture(scope="module")
def path(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with windows, a draft that is often right, and one that always is."""
    return compile_recorded(
        zoo.checkpoint(NAME),
        [zoo.checkpoint(NAME, draft="noisy"), zoo.checkpoint(NAME)],
        tmp_path_factory.mktemp("tensorrt") / "engine",
        plans=PLANS,
        max_batch_size=max(BATCH_SIZES),
        max_seq_len=models.MAX_SEQ_LEN,
        prefill_chunk=CHUNK,
    )


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """Nothing goes wrong without a word, and TensorRT refuses nothing."""
    with on_recorder() as made:
        yield made
    assert (made.mistakes, made.refusals, made.num_dropped) == ([], [], 0)


def generate(llm: LLM, params: Any = None) -> list[list[int]]:
    params = params or SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [o.outputs[0].token_ids for o in llm.generate(models.prompts(), params)]


@pytest.mark.default("tree-3-2-1")
@pytest.mark.parametrize("plan", every(5, PLAN_IDS, 2))
def test_greedy_equals_generate(zoo: Zoo, path: Path, recorder: Recorder, plan: str) -> None:
    """All prompts together, of which four are longer than a chunk, then one of them alone."""
    engine = load_poisoned(path)
    assert {type(model._program) for model in (engine.target, *engine.drafts)} == {TensorRTProgram}
    for prompts in (models.prompts(), models.prompts()[3:4]):
        outcome = run_case(zoo, NAME, engine, plan, prompts, NUM_TOKENS)
    # most passes are replays: no Python of a program has run for them
    assert len(recorder.runs) > 1.5 * len(recorder.enqueued)
    if plan != OFF.name and "suffix" not in engine.plans[plan].drafts:
        assert outcome.stats.num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("plan", every(2, EQUAL), ids=lambda plan: plan.name)
def test_a_draft_equal_to_the_target_is_always_accepted(
    zoo: Zoo, path: Path, recorder: Recorder, plan: SpecPlan
) -> None:
    """What a draft's passes write, attend to and commit shows in nothing but its acceptance."""
    engine = load_poisoned(path)
    outcome = run_case(zoo, NAME, engine, plan.name, models.prompts(), NUM_TOKENS)
    wanted = full_acceptance(plan, NUM_TOKENS)
    found = {key: vars(outcome.stats)[key] for key in wanted}
    assert found == {key: len(models.prompts()) * count for key, count in wanted.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        pytest.param((EQUAL[0].name, OFF.name), id="one-step-behind", marks=pytest.mark.slow),
        pytest.param((EQUAL[1].name, *[OFF.name] * 10, EQUAL[0].name), id="a-chunk-behind"),
    ],
)
def test_drafts_catch_up(zoo: Zoo, path: Path, recorder: Recorder, script: tuple[str, ...]) -> None:
    llm = LLM(load_poisoned(path), policy=Script(*script))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for prompt, output in zip(
        models.prompts(), llm.generate(models.prompts(), params), strict=True
    ):
        assert output.outputs[0].token_ids == zoo.reference(NAME, prompt, 40).tokens
        stats = output.metrics
        assert stats.num_spec_steps > 0
        num_cut = stats.num_spec_steps - stats.accepted_at_depth[2]
        assert num_cut <= (stats.num_trimmed_tokens > 0)


@pytest.mark.slow
@pytest.mark.parametrize("plan", every(3, [CHAIN.name, TREE.name, PLANS[4].name], 1))
def test_requests_join_and_leave_while_others_run(
    zoo: Zoo, path: Path, recorder: Recorder, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch grows and shrinks, leaves holes, and runs two plans in one iteration."""
    engine = load_poisoned(path, max_num_seqs=3)
    places, plans, runs = [], [], []
    copy, inputs_of, cut = StepBuffers.copy_from, Runner.inputs, padded_model._runs

    def copy_from(buffers: Any, inputs: Any, bucket: int, given: Any = None) -> None:
        places.append(list(given))
        copy(buffers, inputs, bucket, given)

    def run(*args: Any) -> list[Any]:
        runs.append(len(found := list(cut(*args))))
        return found

    monkeypatch.setattr(StepBuffers, "copy_from", copy_from)
    monkeypatch.setattr(padded_model, "_runs", run)
    monkeypatch.setattr(Runner, "inputs", lambda r, g: plans.append(g.plan.name) or inputs_of(r, g))
    check_join_and_leave(zoo, NAME, engine, plan, plain=1)
    assert max(runs) > 1, "passes between steps met holes"
    assert any(min(rows) > 0 for rows in places), "padding before the first row"
    assert any(max(rows) >= len(rows) > 1 for rows in places), "padding between rows"
    both = {frozenset(pair) for pair in itertools.pairwise(plans)}
    assert frozenset((plan, OFF.name)) in both, "two plans in an iteration"


def test_the_order_of_a_batch_does_not_matter(
    zoo: Zoo, path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes later may get a row before the others'."""
    places, copy = [], StepBuffers.copy_from

    def copy_from(buffers: Any, inputs: Any, bucket: int, given: Any = None) -> None:
        places.append(list(given))
        copy(buffers, inputs, bucket, given)

    monkeypatch.setattr(StepBuffers, "copy_from", copy_from)
    llm = LLM(load_poisoned(path, max_num_seqs=2), plan=TREE.name)
    prompts, lengths = models.prompts(), (6, 30, 40, 9, 12)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    for prompt, n, output in zip(prompts, lengths, llm.generate(prompts, params), strict=True):
        assert output.outputs[0].token_ids == zoo.reference(NAME, prompt, 64).tokens[:n]
    assert [1, 0] in places


@pytest.mark.slow
@pytest.mark.parametrize("plan", [OFF.name, TREE.name])
def test_all_rules_and_logprobs_are_those_of_plain_graphs(
    path: Path, recorder: Recorder, plan: str
) -> None:
    """In rows with holes: logprobs are read off a step's logits, of its own sequences."""
    lengths = (4, 30, 9, 12, 20)
    params = [
        SamplingParams(
            max_tokens=lengths[i],
            ignore_eos=True,
            seed=i,
            temperature=0.8,
            rule=(None, "delta", "mss", "swor", None)[i],
            repetition_penalty=1.0 + 0.1 * (i % 2),
            logprobs=(2, None)[i % 2],
        )
        for i in range(5)
    ]
    eager = load_poisoned(path, backend="eager")
    found, wanted = (
        [output.outputs[0] for output in LLM(engine, plan=plan).generate(models.prompts(), params)]
        for engine in (load_poisoned(path, max_num_seqs=3), eager)
    )
    assert {type(model) for model in eager.drafts} == {ModelProgram}
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert (mine.logprobs is None) == (theirs.logprobs is None)
        for one, other in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
            assert one.keys() == other.keys()
            for token in one:
                assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)


def test_steps_are_replayed_without_a_word_of_python(
    zoo: Zoo, path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All graphs are captured while the engine loads; no step enqueues anything after that."""
    engine = load_poisoned(path, CaptureLimits(sizes=(2, 5), max_seconds=1e9))
    assert len(recorder.device.tapes) == len(PLAN_IDS) * 2
    assert all(step.is_captured(size) for step in engine.steps.values() for size in (2, 5))

    def forbidden(*args: Any) -> None:
        raise AssertionError("a program of a step ran")

    monkeypatch.setattr(WholeBatch, "forward", forbidden)
    recorder.forget()
    for plan in (OFF.name, TREE.name):
        run_case(zoo, NAME, engine, plan, models.prompts(), NUM_TOKENS)
    # prompts in chunks are all that was enqueued, and in no capture
    assert {made.context._kernels for made in recorder.enqueued} == {Kernels.LAZY}
    assert all(nodes <= CHUNK for _, nodes, _ in (made.sizes for made in recorder.enqueued))
    assert len(recorder.runs) > 2 * len(recorder.enqueued)
    assert len(recorder.device.tapes) == len(PLAN_IDS) * 2


@pytest.mark.default("tree-3-2-1-wanted2")
@pytest.mark.parametrize(
    ("plan", "wanted"),
    every(
        2,
        [
            (OFF.name, [("target", 1, 1)]),
            # the first level is fed a token more than the root, as the step before may have left
            (CHAIN.name, [("draft-0", 2, 1), *[("draft-0", 1, 1)] * 3, ("target", 5, 5)]),
            (
                TREE.name,
                [("draft-0", 2, 1), ("draft-0", 3, 3), ("draft-0", 6, 6), ("target", 16, 16)],
            ),
            # a chain of each draft, whose cache lacks what the vote took of another
            (
                PLANS[5].name,
                [
                    *[("draft-0", 4, 1), ("draft-0", 1, 1), ("draft-0", 1, 1)],
                    *[("draft-1", 4, 1), ("draft-1", 1, 1), ("draft-1", 1, 1)],
                    ("target", 4, 4),
                ],
            ),
            (EQUAL[0].name, [("draft-1", 2, 1), *[("draft-1", 1, 1)] * 3, ("target", 5, 5)]),
            (PLANS[6].name, [("target", 6, 6)]),
        ],
    ),
)
def test_order_of_a_step(
    path: Path, recorder: Recorder, plan: str, wanted: list[tuple[str, int, int]]
) -> None:
    """Each level of the draft, then the target: nodes, and rows of logits, of a sequence."""
    batch = 2
    step = Engine.load(path, capture=CaptureLimits.lazy()).steps[plan]
    step.capture(batch)
    enqueued = [(made.model, *made.sizes) for made in recorder.enqueued]
    one = [(model, batch, nodes, rows * batch) for model, nodes, rows in wanted]
    # twice outside of the capture, and inside of it
    assert enqueued == one * 3
    recorder.forget()
    recorder.device.tapes[-1].replay()
    assert [(made.model, *made.sizes) for made in recorder.runs] == one
    assert not recorder.enqueued


@pytest.mark.slow
def test_contexts_are_as_many_as_shapes(path: Path, recorder: Recorder) -> None:
    """One of each shape of a step, whatever plan it is of; one of each profile for prompts."""
    engine = load_poisoned(path)
    for plan in (OFF.name, CHAIN.name, TREE.name, EQUAL[0].name):
        generate(LLM(engine, plan=plan))
    shapes: dict[Any, set[Any]] = {}
    for made in recorder.enqueued:
        shapes.setdefault(made.context, set()).add((made.model, made.profile, made.sizes))
    in_steps = [found for context, found in shapes.items() if context._kernels is Kernels.EAGER]
    assert all(len(found) == 1 for found in in_steps)
    assert len(in_steps) == len(set().union(*in_steps)), "a shape has one context"
    between = [found for context, found in shapes.items() if context._kernels is Kernels.LAZY]
    used = [{shape[:2] for shape in found} for found in between]
    assert all(len(found) == 1 for found in used)
    assert len(used) == len(set().union(*used)), "a profile has one context"
    assert len(used) <= 2 * 3 < sum(map(len, between)), "prompts have more shapes than profiles"
    assert len(recorder.contexts) == len(shapes)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*models.DRAFT_NOISE])
def test_every_architecture_in_every_kind_of_plan(zoo: Zoo, tmp_path: Path, name: str) -> None:
    layout = layout_of(name)
    made = compile_recorded(
        zoo.checkpoint(name),
        [zoo.checkpoint(name, draft=draft) for draft in drafts.DRAFTS],
        tmp_path / "engine",
        plans=drafts.PLANS,
        max_batch_size=max(BATCH_SIZES),
        max_seq_len=models.MAX_SEQ_LEN,
        prefill_chunk=layout["prefill_chunk"],
    )
    with on_recorder() as recorder:
        engine = load_poisoned(made)
        for plan in (OFF.name, *drafts.PLAN_IDS):
            run_case(zoo, name, engine, plan, models.prompts(), NUM_TOKENS, require_near_tie)
    assert (recorder.mistakes, recorder.refusals, recorder.num_dropped) == ([], [], 0)
