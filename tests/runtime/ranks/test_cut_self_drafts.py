"""Cut targets that draft with second programs, and with blocks that all ranks choose together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specc.artifact.directory import read_manifest
from specc.config import CompileConfig
from specc.runtime.engine import Engine
from specc.runtime.execution.block_votes import PendingVotes
from specc.runtime.llm import LLM
from specc.runtime.scheduling.batch import Vote
from specc.sampling.params import SamplingParams
from specc.speculation.plans import MERGE, DynamicTree, SpecPlan
from tests import engines, models
from tests.lossless import Zoo
from tests.runtime.ranks.conftest import OPTIONS
from tests.runtime.ranks.test_device_ranks import Launch
from tests.runtime.ranks.test_led_engine import COUPLED, GREEDY, MSS

BLOCKS = "self_w16_s0_b16"


@dataclass(frozen=True)
class Case:
    """A target, its plans, and what its draft model sees of its own rows, if there is one.

    `beside` names a case of the same target in whose engine the plans are, too.
    """

    model: str
    plans: tuple[SpecPlan, ...]
    draft_kv: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=lambda: {"num_hidden_layers": 3})
    beside: str = ""


CASES = {
    "layers": Case(
        "llama",
        (
            SpecPlan.from_widths((1, 1, 1), ("self_l0to1",)),
            SpecPlan.from_widths((3, 2, 1), ("self_x0",)),
            SpecPlan.from_dynamic(DynamicTree(6, 3, 3), "self_l1"),
            SpecPlan.from_widths((1, 1), ("self_l0to1_w16_s4",)),
            SpecPlan.from_widths((2, 1), ("self_x1", "self_w16_s4", "lookup-2"), MERGE),
            SpecPlan.from_widths((1, 1, 1)),
        ),
        ("window=16,sink=4",),
    ),
    # on the engines of the case before, as votes are compared on them, too
    "blocks": Case(
        "llama",
        (
            SpecPlan.from_widths((1, 1, 1), (BLOCKS,)),
            SpecPlan.from_widths((3, 2, 1), (BLOCKS,)),
            SpecPlan.from_widths((2, 1), (BLOCKS, "lookup-2"), MERGE),
            replace(SpecPlan.from_widths((3, 1, 1), (BLOCKS,)), name="tiles-blocks", tile=2),
        ),
        beside="layers",
    ),
    # the second layer sees all rows, the others 16
    "windows": Case(
        "gemma3",
        (
            SpecPlan.from_widths((1, 1, 1), ("self_w16_s4",)),
            SpecPlan.from_widths((3, 2, 1), ("self_w32_s0",)),
            SpecPlan.from_dynamic(DynamicTree(6, 3, 3), "self_w16_s0"),
        ),
    ),
    # tables of tokens and of positions are cut by rows, of which each rank has a first one
    "tables": Case("gpt2", (SpecPlan.from_widths((1, 1, 1), ("self_l0to1",)),)),
}
# greedy rows and coupled ones are drawn on all ranks, the others on rank 0
KINDS: dict[str, dict[str, Any]] = {"greedy": GREEDY, "mss": MSS, "coupled": COUPLED}


def path_of(zoo: Zoo, name: str, backend: str, num_ranks: int) -> Path:
    name = CASES[name].beside or name
    case = CASES[name]
    plans = [plan for key, own in CASES.items() if name in (key, own.beside) for plan in own.plans]

    def make(path: Path) -> Path:
        target = zoo.checkpoint(case.model, **case.changes)
        drafts = [zoo.checkpoint("llama", draft="noisy")] if case.draft_kv else []
        config = CompileConfig(
            plans=tuple(plans),
            max_batch_size=4,
            max_seq_len=models.MAX_SEQ_LEN,
            prefill_chunk=24,
            block_size=8,
            backend=backend,
            probe=False,
            draft_kv=case.draft_kv,
            tensor_parallel_size=num_ranks,
            draft_tensor_parallel_size=num_ranks if drafts else 1,
        )
        return engines.build(target, drafts, path, config)

    return zoo.once(f"cut-self-{name}-{backend}-{num_ranks}", make)


class Pairs:
    """The whole engine of a case and the cut one; a process is in one group."""

    def __init__(self, zoo: Zoo, backend: str) -> None:
        self._zoo, self._backend = zoo, backend
        self._open: tuple[str, Engine, Engine] | None = None

    def __call__(self, name: str) -> tuple[Engine, Engine]:
        name = CASES[name].beside or name
        if self._open is None or self._open[0] != name:
            self.close()
            whole = Engine.load(path_of(self._zoo, name, self._backend, 1))
            cut = Engine.load(path_of(self._zoo, name, self._backend, 2), ranks=OPTIONS)
            self._open = name, whole, cut
        return self._open[1:]

    def close(self) -> None:
        if self._open is not None:
            self._open[2].close()
            self._open = None


@pytest.fixture(scope="module", params=["eager", pytest.param("cpu", marks=pytest.mark.slow)])
def pairs(zoo: Zoo, request: pytest.FixtureRequest) -> Iterator[Pairs]:
    made = Pairs(zoo, request.param)
    yield made
    made.close()


def texts() -> list[list[int]]:
    """Prompts of which some outgrow windows and choices."""
    dice = torch.Generator().manual_seed(7)
    return [torch.randint(0, models.VOCAB, (n,), generator=dice).tolist() for n in (70, 9, 41, 56)]


def serve(
    engine: Engine, plan: str, options: dict[str, Any], tokens: int = 24
) -> tuple[list[list[int]], int]:
    """Tokens, and how many of them were accepted: what only spoils drafts spoils no token."""
    llm = LLM(engine, plan=plan)
    given = [
        SamplingParams(seed=i, max_tokens=tokens, ignore_eos=True, **{"temperature": 0, **options})
        for i in range(4)
    ]
    outputs = llm.generate(texts(), given)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    return found, llm.get_metrics().num_accepted_tokens


# layers, and blocks that all ranks choose
USUAL = {
    "layers-selfl0to1-chain-3-greedy",
    "blocks-selfw16s0b16-chain-3-greedy",
}


def params() -> list[Any]:
    """Each plan with one kind of rows, in turn; most are slow."""
    kinds = list(KINDS.items())
    made = []
    for name, case in CASES.items():
        for place, plan in enumerate(case.plans):
            kind, options = kinds[place % len(kinds)]
            if (plan.tile or not plan.is_static) and "rule" in options:
                options = {**options, "rule": "delta"}
            label = f"{name}-{plan.name}-{kind}"
            marks = [] if label in USUAL else [pytest.mark.slow]
            made.append(pytest.param(name, plan.name, options, id=label, marks=marks))
    return made


@pytest.mark.parametrize(("name", "plan", "options"), params())
def test_two_ranks_draft_what_one_does(
    pairs: Pairs, name: str, plan: str, options: dict[str, Any]
) -> None:
    whole, cut = pairs(name)
    wanted = serve(whole, plan, options)
    assert serve(cut, plan, options) == wanted
    assert wanted[1] > 0


@pytest.mark.parametrize(
    ("place", "options"),
    [
        pytest.param(0, GREEDY, id="chain-greedy"),
        pytest.param(0, MSS, id="chain-mss", marks=pytest.mark.slow),
        pytest.param(3, GREEDY, id="tiles-greedy", marks=pytest.mark.slow),
        pytest.param(3, MSS, id="tiles-mss", marks=pytest.mark.slow),
    ],
)
def test_votes_are_those_of_all_heads(
    pairs: Pairs, place: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts and of steps: an attention of each voter and head, and where it goes."""
    plan = CASES["blocks"].plans[place]
    if plan.tile and "rule" in options:
        options = {**options, "rule": "delta"}
    given: list[Vote] = []

    read = PendingVotes.result

    def result(pending: PendingVotes) -> list[Vote]:
        found = read(pending)
        given.extend(found)
        return found

    monkeypatch.setattr(PendingVotes, "result", result)
    votes = []
    for engine in pairs("blocks"):
        serve(engine, plan.name, options, 48)
        votes.append([(v.num_voters, v.length, v.mass) for v in given])
        given.clear()
    whole, cut = votes
    # four prompts, and steps of those that go on for longer than the window
    assert len(whole) > 4
    assert [v[:2] for v in cut] == [v[:2] for v in whole]
    for (count, _, mass), (_, _, other) in zip(whole, cut, strict=True):
        assert torch.allclose(other, mass, atol=1e-3)
        assert mass.sum() > 0.9 * count


@pytest.mark.slow
def test_second_programs_are_cut_as_the_target_is(zoo: Zoo) -> None:
    manifest = read_manifest(path_of(zoo, "layers", "eager", 2))
    own = [entry.name for entry in manifest.self_drafts]
    assert own == ["self_l0to1", "self_x0", "self_l1", "self_l0to1_w16_s4", "self_x1"]
    assert manifest.led_programs == ("target", "draft_0", *own)
    # for other cuts
    assert {entry.whole_file for entry in manifest.self_drafts} <= set(manifest.files)


@pytest.mark.slow
def test_captured_ranks_draft_what_one_does(zoo: Zoo) -> None:
    """In graphs that all ranks replay, on simulated devices; votes of all ranks are in them."""
    for name, places in (("layers", (0, 4)), ("blocks", (0,))):
        plans = [CASES[name].plans[place].name for place in places]
        given = {"max_tokens": 24, "ignore_eos": True}
        jobs = [{"plan": x, "params": [given] * 4, "prompts": texts()} for x in plans]
        with Launch(path_of(zoo, name, "cuda", 2), 2, {"jobs": jobs, "capture": [4]}) as launch:
            said = launch.said()
            assert launch.codes == [0, 0], launch.errors
        whole = Engine.load(path_of(zoo, name, "eager", 1))
        for plan, found in zip(plans, said, strict=True):
            assert (found["tokens"], found["accepted"]) == serve(whole, plan, GREEDY), plan
            assert found["warnings"] == 0
