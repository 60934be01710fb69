"""Drafts that are spread over ranks: each drafts on its own, and rank 0 merges."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from specc.artifact.directory import read_manifest
from specc.config import CompileConfig
from specc.errors import ConfigError, FaultError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.ranks.answers import values_message, values_of
from specc.runtime.ranks.draft_parts import asked_of, leave_parts, parts_of
from specc.runtime.ranks.led_model import LoneDraft
from specc.runtime.ranks.orders import Kind, Message, encode
from specc.sampling.params import SamplingParams
from specc.speculation.plans import MERGE, VOTE, DynamicTree, SpecPlan
from tests import engines, models
from tests.lossless import Zoo
from tests.runtime.ranks.conftest import OPTIONS
from tests.runtime.ranks.test_cut_drafts import Pair, cases, check_said
from tests.runtime.ranks.test_device_ranks import Launch, job
from tests.runtime.ranks.test_led_engine import generate
from tests.runtime.ranks.test_orders import received

BOTH, VIEW = ("draft_0", "draft_1"), "self_w16_s4"
PLANS = (
    SpecPlan.from_widths((2, 1), BOTH, MERGE),
    SpecPlan.from_widths((1, 1, 1), ("draft_1",)),
    SpecPlan.from_widths((3, 2, 1), ("draft_1",)),
    SpecPlan.from_dynamic(DynamicTree(10, 3, 3), "draft_1"),
    SpecPlan.from_widths((1, 1, 1), BOTH, VOTE),
    SpecPlan.from_widths((2, 1), ("draft_1", "lookup-2"), MERGE),
    # one that another rank has, and one that all have
    SpecPlan.from_widths((2, 1), ("draft_1", VIEW), MERGE),
    replace(SpecPlan.from_widths((3, 1, 1), ("draft_1",)), name="tiles-lone", tile=2),
    SpecPlan.from_widths((1, 1)),
)
# captured on simulated devices: two drafts at once, logits that cross, and one that all ranks have
CAPTURED = (PLANS[0], PLANS[3], PLANS[4], PLANS[6])


def path_of(
    zoo: Zoo,
    backend: str,
    num_ranks: int,
    plans: tuple[SpecPlan, ...] = PLANS,
    dtype: str | None = None,
) -> Path:
    # a device's kernels round halves elsewhere than what they are compared with
    own = dtype or ("bfloat16" if plans is PLANS else "float32")

    def make(path: Path) -> Path:
        config = CompileConfig(
            plans=plans,
            max_batch_size=4,
            max_seq_len=models.MAX_SEQ_LEN,
            prefill_chunk=24,
            backend=backend,
            probe=False,
            tensor_parallel_size=num_ranks,
            draft_ranks=num_ranks,
            draft_dtype=("float32", own),
        )
        drafts = [zoo.checkpoint("llama", draft=name) for name in ("noisy", "target")]
        return engines.build(zoo.checkpoint("llama"), drafts, path, config)

    return zoo.once(f"draft-ranks-{backend}-{num_ranks}-{len(plans)}-{own}", make)


# before the tests that keep a pair of engines: a process has one that is cut
@pytest.mark.slow
def test_a_draft_beside_one_that_obeys_a_grammar_is_taken_in_a_later_graph(
    zoo: Zoo, request: pytest.FixtureRequest
) -> None:
    """Rank 0 drafts in pieces, and what rank 1 has drafted for the first is there for the others.

    Before and after, other plans and requests without grammars replay graphs of the same memory.
    """
    names = [CAPTURED[0].name, CAPTURED[2].name]
    jobs = [job(name, kind) for kind in ("grammar", "greedy", "grammar") for name in names]
    options = {"jobs": jobs, "capture": [4], "max_seconds": -1}
    with Launch(path_of(zoo, "cuda", 2, CAPTURED), 2, options) as launch:
        said = launch.said()
        assert launch.codes == [0, 0], launch.errors
    cut = Engine.load(path_of(zoo, "eager", 2, CAPTURED), ranks=OPTIONS)
    request.addfinalizer(cut.close)
    check_said(cut, jobs, said, None)


@pytest.fixture(scope="module", params=["eager", pytest.param("cpu", marks=pytest.mark.slow)])
def pair(zoo: Zoo, request: pytest.FixtureRequest) -> Iterator[Pair]:
    one, two = (path_of(zoo, request.param, num_ranks) for num_ranks in (1, 2))
    # mapped files are counted, and huge pages would take their place where Linux gives them
    mmap = True if request.param == "cpu" else None
    made = Pair(Engine.load(one), Engine.load(two, ranks=OPTIONS, mmap=mmap))
    yield made
    made.cut.close()


def is_usual(plan: SpecPlan) -> bool:
    return plan.combine != VOTE and VIEW not in plan.model_names


@pytest.mark.default(
    "eager-merge-0+1-tree-2-1-mss",
    "eager-draft1-tree-3-2-1-coupled",
    "eager-merge-1+selfw16s4-tree-2-1-coupled",
)
@pytest.mark.parametrize(("plan", "options"), cases(PLANS, is_usual))
def test_ranks_draft_what_one_does(pair: Pair, plan: str, options: dict[str, Any]) -> None:
    pair.check(plan, options)


def test_captured_ranks_draft_what_one_does(zoo: Zoo) -> None:
    """In graphs that all ranks replay, on simulated devices: parts of other ranks are in them.

    What they propose is the same, too, or fewer tokens would be accepted.
    """
    names = [plan.name for plan in CAPTURED]
    kinds = (
        *zip(names, ("greedy", "coupled", "greedy", "coupled"), strict=True),
        (names[0], "mss"),
    )
    jobs = [job(name, kind) for name, kind in kinds]
    with Launch(path_of(zoo, "cuda", 2, CAPTURED), 2, {"jobs": jobs, "capture": [4]}) as launch:
        said = launch.said()
        assert launch.codes == [0, 0], launch.errors
    # with filters and without
    whole = Engine.load(path_of(zoo, "eager", 1, CAPTURED))
    check_said(whole, jobs, said, 2 * (len(CAPTURED) + 1))


@pytest.mark.slow
def test_a_captured_bfloat16_draft_is_the_same_to_the_bit_elsewhere(
    zoo: Zoo, tmp_path: Path
) -> None:
    """Its passes read integers, which all ranks have alike: no rounding excuses a difference.

    All rows of its caches are compared, and how much is accepted, with the same kernels on one
    rank. Other kernels (`eager`) round elsewhere: with the first plan two tokens tie exactly there,
    and one more is accepted.
    """
    # one whose accepted rows move: merged plans feed them anew
    plans = CAPTURED[1:2]
    jobs = [job(plan.name, "greedy") for plan in plans]
    said = {}
    for num_ranks in (1, 2):
        path = path_of(zoo, "cuda", num_ranks, plans, "bfloat16")
        # graphs are captured when they are first needed: these alone
        options = {"jobs": jobs, "capture": [4], "max_seconds": -1}
        options["rows"] = str(tmp_path / f"rows-{num_ranks}")
        with Launch(path, num_ranks, options) as launch:
            said[num_ranks] = launch.said()
            assert launch.codes == [0] * num_ranks, launch.errors
    for number, (one, two) in enumerate(zip(said[1], said[2], strict=True)):
        assert "error" not in one, one
        assert two["tokens"] == one["tokens"]
        assert two["accepted"] == one["accepted"] > 0
        whole, cut = (torch.load(tmp_path / f"rows-{n}-{number}") for n in (1, 2))
        assert list(cut) == ["draft_1"]
        for mine, other in zip(cut["draft_1"], whole["draft_1"], strict=True):
            assert mine.dtype == torch.bfloat16
            assert mine.count_nonzero() > 0
            assert torch.equal(mine, other)


@pytest.mark.slow
def test_a_draft_rank_that_is_lost_between_replays_is_named(zoo: Zoo) -> None:
    options = {
        "jobs": [job(CAPTURED[0].name, "greedy")],
        "capture": [4],
        "max_seconds": -1,
        "fault": "dies",
    }
    with Launch(path_of(zoo, "cuda", 2, CAPTURED), 2, options) as launch:
        (found,) = launch.said()
        assert launch.codes == [0, 7], launch.errors
    assert "tokens" not in found
    assert re.search(r"rank 1 \(pid", found["error"]), found


def test_each_draft_is_on_one_rank(zoo: Zoo, pair: Pair) -> None:
    manifest = read_manifest(path_of(zoo, "eager", 2))
    assert manifest.draft_homes == {"draft_1": 1}
    assert manifest.ordered_programs == ("target", "draft_1")
    own = manifest.memory_plan
    assert manifest.memory_of([0]) == own["target"].total + own["draft_0"].total
    assert manifest.memory_of([1]) == own["target"].total + own["draft_1"].total
    assert isinstance(pair.cut.drafts[1], LoneDraft)
    # rank 0 has neither its weights nor its caches
    assert len(pair.cut.mapped_weights) == 2
    assert set(pair.cut.cache.slabs) == {"target", "draft_0"}


def test_a_draft_elsewhere_says_its_logits(pair: Pair) -> None:
    """A pass with logits is waited for: what measures drafts asks for them."""
    table = torch.arange(8, dtype=torch.int32)[None]
    inputs = (
        torch.arange(5),
        torch.arange(5),
        torch.tensor([0, 5], dtype=torch.int32),
        torch.arange(5, dtype=torch.int32),
        torch.tensor([0], dtype=torch.int32),
        None,
        table,
        torch.tensor([1, 4]),
    )
    with torch.inference_mode():
        wanted, found = (engine.drafts[1](*inputs) for engine in (pair.whole, pair.cut))
    assert found.dtype == wanted.dtype == torch.bfloat16
    assert torch.equal(found, wanted)
    assert len(pair.cut.drafts[1](*inputs[:7], torch.zeros(0, dtype=torch.int64))) == 0


def test_an_answer_that_nobody_took_is_not_taken_for_another(pair: Pair) -> None:
    leader = pair.cut.target.leader
    plan = PLANS[1].name
    llm = LLM(pair.cut, plan=plan)
    given = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)]
    wanted = generate(llm, given)
    # a step that was broken off after its order
    table = torch.arange(8, dtype=torch.int32)[None]
    zero = torch.tensor([0], dtype=torch.int32)
    one = torch.zeros(1, dtype=torch.int64)
    order = (one, one, torch.tensor([0, 1], dtype=torch.int32), zero, zero, None, table, one)
    leader.ask(Kind.PASS, order, pair.cut.drafts[1].number)
    assert generate(llm, given) == wanted


def test_values_arrive_as_they_were() -> None:
    values = [torch.arange(6).view(2, 3), torch.randn(3).bfloat16(), 7, torch.randn(2).half()]
    message = values_message(values, 5)
    found = values_of(received(encode(message)))
    assert found[2] == 7
    for mine, other in zip(found, values, strict=True):
        if isinstance(other, torch.Tensor):
            assert mine.dtype == other.dtype
            assert torch.equal(mine, other)
    for tensors in ((), (torch.tensor([9]), torch.tensor([1])), (torch.tensor([0, 0]), None)):
        with pytest.raises(FaultError):
            values_of(Message(Kind.DRAFTED, tensors))


class _Named(torch.nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_parts_are_what_follows_from_the_drafts_of_one_rank() -> None:
    """Three ranks: what needs two of them is rank 0's, and what all ranks run comes last."""
    root = torch.nn.Module()
    for name, factor in (("draft_0", 2), ("draft_1", 3), ("draft_2", 5), ("target", 7)):
        root.add_module(name, _Named(factor))
    graph = fx.Graph()
    x, y = graph.placeholder("cache_len"), graph.placeholder("y")
    history = graph.placeholder("history")
    add = torch.add
    shared = graph.call_function(add, (x, y))
    view = graph.call_module("target", (x,))
    one = graph.call_module("draft_1", (shared,))
    one = graph.call_function(add, (graph.call_module("draft_1", (one,)), y))
    two = graph.call_module("draft_2", (y,))
    zero = graph.call_module("draft_0", (x,))
    # follows from one draft alone, and from what rank 0 alone has
    looked_up = graph.call_function(add, (one, history))
    both = graph.call_function(add, (graph.call_function(add, (one, two)), looked_up))
    graph.output({"all": graph.call_function(add, (both, zero)), "one": one, "view": view})
    stage = fx.GraphModule(root, graph)
    inputs = (torch.tensor(11), torch.tensor(13), torch.tensor(17))
    wanted = stage(*inputs)

    parts = parts_of(stage, {"draft_1": 1, "draft_2": 2}, ["y"])
    assert [part.rank for part in parts] == [1, 2]
    assert [sorted(part.inputs) for part in parts] == [["cache_len", "y"], ["y"]]
    assert asked_of(parts, ["y"]) == ["cache_len"]
    said: list[str] = []

    def ask(*given: torch.Tensor) -> int:
        said.append("ask")
        named = dict(zip(asked_of(parts, []), given, strict=True))
        ask.found = [  # type: ignore[attr-defined]
            value for part in parts for value in part.graph(*(named[n] for n in part.inputs))
        ]
        return 4

    def take(number: int) -> list[torch.Tensor]:
        assert number == 4
        said.append("take")
        return ask.found  # type: ignore[attr-defined]

    for name in ("draft_0", "target"):
        getattr(root, name).register_forward_hook(lambda *_, name=name: said.append(name))
        getattr(stage, name).register_forward_hook(lambda *_, name=name: said.append(name))
    leave_parts(stage, parts, asked_of(parts, []), {"target"}, ask, take)
    stage.graph.lint()
    found = stage(*inputs)
    assert found == wanted
    assert list(dict.fromkeys(said)) == ["ask", "draft_0", "take", "target"]
    called = {node.target for node in stage.graph.find_nodes(op="call_module", target="draft_1")}
    assert not called


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"draft_ranks": 3}, "--draft-ranks 3 and --tensor-parallel-size 2"),
        (
            {"draft_ranks": 2, "draft_tensor_parallel_size": 2},
            "--draft-ranks 2 and --draft-tensor-parallel-size 2",
        ),
    ],
)
def test_ranks_that_cannot_draft(options: dict[str, int], found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CompileConfig(tensor_parallel_size=2, **options)
    assert caught.value.found == found


@pytest.mark.slow
def test_a_rank_for_each_draft() -> None:
    with pytest.raises(ConfigError) as caught:
        CompileConfig(tensor_parallel_size=2, draft_ranks=2).check_draft_ranks(1)
    assert caught.value.found == "--draft-ranks 2, and 1 draft models"
