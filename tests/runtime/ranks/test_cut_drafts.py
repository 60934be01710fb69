"""Drafts that all ranks run: draft models that are cut, and a cut target that drafts itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from specc.artifact.directory import read_manifest
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import MERGE, VOTE, DynamicTree, SpecPlan
from tests import engines, models
from tests.lossless import Zoo
from tests.runtime.ranks.conftest import OPTIONS
from tests.runtime.ranks.device_process import params_of
from tests.runtime.ranks.test_device_ranks import Launch
from tests.runtime.ranks.test_led_engine import COUPLED, GREEDY, LOGPROBS, MSS, generate, params

VIEW = "self_w16_s4"
PLANS = (
    SpecPlan.from_widths((1, 1, 1)),
    SpecPlan.from_widths((3, 2, 1)),
    SpecPlan.from_dynamic(DynamicTree(10, 3, 3)),
    SpecPlan.from_widths((2, 1), ("draft_0", "lookup-2"), MERGE),
    SpecPlan.from_widths((1, 1, 1), (VIEW,)),
    SpecPlan.from_widths((2, 2, 1), (VIEW,)),
    SpecPlan.from_dynamic(DynamicTree(8, 3, 3), VIEW),
    SpecPlan.from_widths((2, 1), ("draft_0", VIEW), MERGE),
    SpecPlan.from_widths((1, 1), ("draft_0", VIEW), VOTE),
    replace(SpecPlan.from_widths((3, 1, 1), (VIEW,)), name="tiles-view", tile=2),
)
# a cache in which not all of the longest requests have room: a process is in one group of ranks
FEW: dict[str, Any] = {"kv_cache_tokens": 160}
# captured on simulated devices: one of a draft that is cut, one of a view, and one of both
CAPTURED = PLANS[2::3]
# greedy rows and coupled ones are drawn on all ranks, the others on rank 0
KINDS: dict[str, dict[str, Any]] = {
    "mss": MSS,
    "greedy": GREEDY,
    "coupled": COUPLED,
    "logprobs": LOGPROBS,
}


def path_of(zoo: Zoo, backend: str, num_ranks: int, plans: tuple[SpecPlan, ...] = PLANS) -> Path:
    """A compiled engine, whole, or target and draft cut."""

    def make(path: Path) -> Path:
        config = CompileConfig(
            plans=plans,
            max_batch_size=4,
            max_seq_len=models.MAX_SEQ_LEN,
            prefill_chunk=24,
            backend=backend,
            probe=False,
            tensor_parallel_size=num_ranks,
            draft_tensor_parallel_size=num_ranks,
        )
        target, draft = zoo.checkpoint("llama"), zoo.checkpoint("llama", draft="noisy")
        return engines.build(target, draft, path, config)

    return zoo.once(f"cut-drafts-{backend}-{num_ranks}-{len(plans)}", make)


@dataclass
class Pair:
    """The whole engine and the cut one, open until the module ends."""

    whole: Engine
    cut: Engine

    def check(self, plan: str, options: dict[str, Any]) -> None:
        """The same tokens, of which drafts have proposed as many.

        A rank that keeps other rows than the rest, or none, spoils what drafts propose, and no
        token: so the numbers of accepted ones are compared, too.
        """
        is_lossy = "dynamic" in plan or plan.startswith(("tiles", "vote"))
        given = {**options, "rule": "delta"} if is_lossy and "rule" in options else options
        found, accepted = [], []
        for engine in (self.whole, self.cut):
            llm = LLM(engine, plan=plan)
            found.append([tokens for tokens, _ in generate(llm, params(4, **given))])
            accepted.append(llm.get_metrics().num_accepted_tokens)
        assert found[1] == found[0]
        assert accepted[1] == accepted[0] > 0


@pytest.fixture(scope="module", params=["eager", pytest.param("cpu", marks=pytest.mark.slow)])
def pair(zoo: Zoo, request: pytest.FixtureRequest) -> Iterator[Pair]:
    one, two = (path_of(zoo, request.param, num_ranks) for num_ranks in (1, 2))
    made = Pair(Engine.load(one, **FEW), Engine.load(two, ranks=OPTIONS, **FEW))
    yield made
    made.cut.close()


def cases(plans: Iterable[SpecPlan], is_usual: Callable[[SpecPlan], bool]) -> list[Any]:
    """Each plan with one kind of rows, in turn; with the others in the slow tier."""
    made = []
    for i, plan in enumerate(plans):
        for j, (name, options) in enumerate(KINDS.items()):
            if plan.tile and options in (LOGPROBS, MSS):
                continue
            marks = [] if i % len(KINDS) == j and is_usual(plan) else [pytest.mark.slow]
            made.append(pytest.param(plan.name, options, id=f"{plan.name}-{name}", marks=marks))
    return made


def check_said(
    engine: Engine, jobs: list[dict[str, Any]], said: list[dict[str, Any]], captured: int | None
) -> None:
    """What captured ranks say they did is what an engine does; so many graphs each of the ranks."""
    for job, found in zip(jobs, said, strict=True):
        llm = LLM(engine, plan=job["plan"])
        outputs = llm.generate(job["prompts"], [params_of(dict(one)) for one in job["params"]])
        assert "error" not in found, found
        assert found["tokens"] == [list(output.outputs[0].token_ids) for output in outputs]
        # as many of them, or they are not what was drafted
        assert found["accepted"] == llm.get_metrics().num_accepted_tokens > 0, job["plan"]
        assert captured is None or found["captured"] == [captured] * 2
        assert found["warnings"] == 0


@pytest.mark.default(
    "eager-chain-3-mss",
    "eager-tree-3-2-1-greedy",
    "eager-dynamic-10-3-3-coupled",
    "eager-selfw16s4-chain-3-mss",
)
@pytest.mark.parametrize(("plan", "options"), cases(PLANS, PLANS[:6].__contains__))
def test_two_ranks_draft_what_one_does(pair: Pair, plan: str, options: dict[str, Any]) -> None:
    pair.check(plan, options)


def test_each_rank_has_its_part_of_the_draft(zoo: Zoo, pair: Pair) -> None:
    manifest = read_manifest(path_of(zoo, "eager", 2))
    whole = read_manifest(path_of(zoo, "eager", 1)).memory_plan["draft_0"]
    assert manifest.led_models == ("target", "draft_0")
    assert manifest.models[1].rank_file(1) in manifest.rank_files
    own = manifest.memory_plan["draft_0"]
    assert 0.5 <= own.weights / whole.weights < 0.53
    assert own.cache * 2 == whole.cache
    # all of it is in the ranks' files, and none in one for all
    assert manifest.models[1].weights_file not in manifest.files


@pytest.mark.slow
def test_requests_that_give_way_and_plans_that_share_a_pass(pair: Pair) -> None:
    given = [
        SamplingParams(
            temperature=0, max_tokens=36 + 4 * i, ignore_eos=True, speculative=i % 3 != 2
        )
        for i in range(4)
    ]
    found = []
    for engine in (pair.whole, pair.cut):
        llm = LLM(engine, plan="merge-0+selfw16s4-tree-2-1")
        found.append(generate(llm, given))
        assert llm.get_metrics().num_preemptions > 0
    assert found[1] == found[0]


@pytest.mark.slow
def test_captured_ranks_draft_what_one_does(zoo: Zoo) -> None:
    """In graphs that all ranks replay, on simulated devices: drafts are in them, too."""
    jobs = [
        {
            "plan": plan.name,
            "params": [{"max_tokens": 16, "ignore_eos": True}] * 3,
            "prompts": [list(prompt) for prompt in models.prompts()[:3]],
        }
        for plan in CAPTURED
    ]
    options = {"jobs": jobs, "capture": [4]}
    with Launch(path_of(zoo, "cuda", 2, CAPTURED), 2, options) as launch:
        said = launch.said()
        assert launch.codes == [0, 0], launch.errors
    # with filters and without
    check_said(Engine.load(path_of(zoo, "eager", 1)), jobs, said, 2 * (len(CAPTURED) + 1))


@pytest.mark.default("sizes0-add --tensor-parallel-size 2")
@pytest.mark.parametrize(
    ("sizes", "do"),
    [((1, 2), "add --tensor-parallel-size 2"), ((4, 2), "pass --draft-tensor-parallel-size 4")],
)
def test_other_numbers_of_ranks_are_refused(sizes: tuple[int, int], do: str) -> None:
    target, drafts = sizes
    with pytest.raises(ConfigError) as caught:
        CompileConfig(tensor_parallel_size=target, draft_tensor_parallel_size=drafts)
    assert caught.value.do == do
