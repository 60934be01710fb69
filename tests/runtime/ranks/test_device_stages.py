"""A target in stages on simulated devices: it generates what one device does, with its rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from specc.artifact.directory import read_manifest
from specc.runtime.engine import Engine
from tests.lossless import Zoo
from tests.runtime.ranks.test_device_ranks import ALL, Launch, alone, job
from tests.runtime.ranks.test_sharded_engine import path_of
from tests.runtime.ranks.test_stages import staged_path

ALIKE = "test_captured_stages_generate_what_one_device_does"
# requests that join others, and give way to them: a cache in which not all have room
FEW = {"kv_cache_tokens": 160}
JOINS = ("tree-3-2-1", "joins")
# what is drawn on captured ranks, dynamic trees too, is in test_draft_ranks
CASES = [
    pytest.param(*case, id="-".join(case), marks=[] if case == JOINS else [pytest.mark.slow])
    for case in [JOINS, *ALL]
]


def job_of(plan: str, kind: str) -> dict[str, Any]:
    if kind == "joins":
        return job(plan, "greedy", 5, max_tokens=40)
    return job(plan, kind)


@pytest.fixture(scope="module")
def whole(zoo: Zoo) -> Engine:
    return Engine.load(path_of(zoo, "llama", "eager", 1))


@dataclass
class Said:
    """What two stages say, and what one device says.

    Args:
        of: plan and kind → what comes of such requests.
    """

    of: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]]
    beside: list[str]


@pytest.fixture(scope="module")
def said(zoo: Zoo, request: pytest.FixtureRequest) -> Said:
    """Of each case that runs, in a launch each."""
    names = {item.name for item in request.session.items}
    chosen = [case for case in (JOINS, *ALL) if f"{ALIKE}[{'-'.join(case)}]" in names]
    path = staged_path(zoo, 1, 2, "cuda")
    layers = [list(stage.layers) for stage in read_manifest(path).stages]
    options = {"jobs": [job_of(*case) for case in chosen], "capture": [4], "layers": layers}
    # graphs are captured when they are first needed
    options |= {"max_seconds": -1, **FEW}
    # an error ends a launch
    last = {**job("off", "greedy"), "micro_batches": 2}
    options["jobs"] = [*options["jobs"], last]
    found, beside = [], []
    for engine, count in ((path, 2), (path_of(zoo, "llama", "cuda", 1), 1)):
        with Launch(engine, count, options) as launch:
            found.append(launch.said())
            assert launch.codes == [0] * count, launch.errors
            beside.append(found[-1].pop().get("error", ""))
    return Said(dict(zip(chosen, zip(*found, strict=True), strict=True)), beside)


@pytest.mark.parametrize(("plan", "kind"), CASES)
def test_captured_stages_generate_what_one_device_does(
    said: Said, whole: Engine, plan: str, kind: str
) -> None:
    found, other = said.of[plan, kind]
    wanted = alone(whole, job_of(plan, kind))
    assert found["tokens"] == wanted
    assert len({tuple(tokens) for tokens in wanted}) > 1
    assert (found["preempted"] > 0) == (kind == "joins")
    # passes are as wide as those of one device: each stage has the rows of its layers, to the bit
    assert found["sums"] == other["sums"]
    assert len({*found["sums"]}) == 2
    assert found["captured"] == other["captured"]
    assert found["warnings"] == other["warnings"] == 0


def test_batches_beside_each_other_are_refused(said: Said) -> None:
    """One graph is a step's whole way through the stages."""
    assert "--micro-batches 2, and stages whose steps are captured" in said.beside[0]
    assert "an engine without stages" in said.beside[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"), [("gemma3", (1, 3)), ("llama", (2, 2))], ids=["pp-3", "tp-2-pp-2"]
)
def test_more_ranks(zoo: Zoo, name: str, shape: tuple[int, int]) -> None:
    """A stage in the middle takes and gives; sums and logits that are cut are those of a stage.

    Ranks of a stage are on a host, and each stage is on another one.
    """
    jobs = [job("tree-3-2-1", kind, 2) for kind in ("greedy", "coupled")]
    jobs[1]["micro_batches"] = 1
    options = {"jobs": jobs, "capture": [2], "max_seconds": -1}
    count = shape[0] * shape[1]
    with Launch(staged_path(zoo, *shape, "cuda", name), count, options, shape[0]) as launch:
        found = launch.said()
        assert launch.codes == [0] * count, launch.errors
    whole = Engine.load(path_of(zoo, name, "eager", 1))
    for job_, one in zip(jobs, found, strict=True):
        assert one["tokens"] == alone(whole, job_)
        assert one["warnings"] == 0
        assert len({*one["sums"]}) == count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told", "code"),
    [
        ("dies", r"rank 1 \(pid", 7),
        ("fails", r"rank 1 .*failed: RuntimeError: an illegal", 1),
    ],
)
def test_a_stage_that_is_lost_is_named(zoo: Zoo, fault: str, told: str, code: int) -> None:
    """Rank 0 waits for the last stage within a graph."""
    options = {"jobs": [job("tree-3-2-1", "greedy")], "capture": [4], "max_seconds": -1}
    with Launch(staged_path(zoo, 1, 2, "cuda"), 2, {**options, "fault": fault}) as launch:
        (found,) = launch.said()
        assert launch.codes[0] == 0, launch.errors
    assert "tokens" not in found
    assert re.search(told, found["error"]), found
    assert found["seconds"] < 12
    assert launch.codes[1] == code
