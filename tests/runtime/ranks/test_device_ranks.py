"""Ranks whose steps are captured, as processes with simulated devices, generate what one does."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.sampling.structured import StructuredOutputsParams
from tests import models
from tests.lossless import Zoo
from tests.runtime.ranks.test_led_engine import PLAN_IDS
from tests.runtime.ranks.test_sharded_engine import path_of

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("device_process.py")
NUM_TOKENS = 16
# as JSON: the ranks are other processes
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
    "mss": {"temperature": 0.9, "rule": "mss"},
    "grammar": {"structured_outputs": {"regex": "([a-e]{2}[0-9]){5,9}"}},
    "logprobs": {"logprobs": 3},
}
ALL = [(plan, kind) for plan in PLAN_IDS for kind in ("greedy", "coupled")]
ALL += [(plan, kind) for plan in ("off", "tree-3-2-1") for kind in ("mss", "grammar", "logprobs")]
CASES = [pytest.param(*case, id="-".join(case)) for case in ALL]


class Launch:
    """Ranks in processes of their own, as torchrun starts them; ended with the block.

    Args:
        options: see `device_process.py`.
        num_local: ranks of each host; None: all are on one.
    """

    def __init__(
        self, engine: Path, num_ranks: int, options: dict[str, Any], num_local: int | None = None
    ) -> None:
        num_local = num_local or num_ranks
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_local),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-P", str(SCRIPT), str(engine), json.dumps(options)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank % num_local)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def said(self, seconds: float = 200.0) -> list[dict[str, Any]]:
        """What rank 0 says, when all have ended."""
        found = [process.communicate(timeout=seconds) for process in self.processes]
        self.codes = [process.returncode for process in self.processes]
        self.errors = [errors for _, errors in found]
        assert all(not text for text, _ in found[1:]), "the others say nothing"
        said = [json.loads(line) for line in found[0][0].splitlines()]
        assert {"done": True} in said, "\n".join(self.errors)
        return said[:-1]


def job(plan: str, kind: str, count: int = 3, **more: Any) -> dict[str, Any]:
    options = dict(KINDS[kind])
    if plan.startswith(("dynamic", "tiles")) and "rule" in options:
        options["rule"] = "delta"
    given = {"max_tokens": NUM_TOKENS, "ignore_eos": kind != "grammar", **options, **more}
    params = [{"seed": 100 + i, **given} for i in range(count)]
    prompts = [list(prompt) for prompt in models.prompts()[:count]]
    return {"plan": plan, "params": params, "prompts": prompts}


def alone(engine: Engine, job_: dict[str, Any]) -> list[list[int]]:
    """What an engine of plain graphs in this process generates."""
    params = []
    for given in job_["params"]:
        if (structured := given.get("structured_outputs")) is not None:
            given = {**given, "structured_outputs": StructuredOutputsParams(**structured)}
        params.append(SamplingParams(**{"temperature": 0, **given}))
    outputs = LLM(engine, plan=job_["plan"]).generate(job_["prompts"], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def whole(zoo: Zoo) -> Engine:
    return Engine.load(path_of(zoo, "llama", "eager", 1))


@pytest.fixture(scope="module")
def said(zoo: Zoo, request: pytest.FixtureRequest) -> dict[tuple[str, str], dict[str, Any]]:
    """What two ranks of a cut engine say of each case that runs, all of them in one launch."""
    names = {item.name for item in request.session.items}
    chosen = [case for case in ALL if f"{CAPTURED}[{'-'.join(case)}]" in names]
    jobs = [job(plan, kind) for plan, kind in chosen]
    with Launch(path_of(zoo, "llama", "cuda", 2), 2, {"jobs": jobs, "capture": [4]}) as launch:
        found = launch.said()
        assert launch.codes == [0, 0], launch.errors
    return dict(zip(chosen, found, strict=True))


CAPTURED = "test_captured_ranks_generate_what_one_does"


# the default tier has captured ranks with drafts of their own: test_draft_ranks.py
@pytest.mark.slow
@pytest.mark.parametrize(("plan", "kind"), CASES)
def test_captured_ranks_generate_what_one_does(said, whole: Engine, plan: str, kind: str) -> None:
    found = said[plan, kind]
    wanted = alone(whole, job(plan, kind))
    assert found["tokens"] == wanted
    assert len({tuple(tokens) for tokens in wanted}) > 1
    if kind in ("greedy", "coupled"):
        # while the engine loaded: two graphs of each plan, one of them for batches without filters,
        # and none of operators one by one
        assert found["captured"] == [2 * len(PLAN_IDS)] * 2
        assert found["warnings"] == 0


@pytest.mark.slow
def test_copies_keep_the_same_rows(zoo: Zoo, whole: Engine) -> None:
    """Ranks that each compute all of every pass: what they have in the end is the same to the bit.

    Graphs are captured when they are first needed, of one request and of two.
    """
    jobs = [job(plan, "greedy", 2) for plan in ("tree-3-2-1", "dynamic-10-3-3", "chain-3")]
    options = {"jobs": jobs, "capture": [1, 2], "max_seconds": -1}
    with Launch(path_of(zoo, "llama", "cuda", 1), 2, options) as launch:
        said_ = launch.said()
    for job_, found in zip(jobs, said_, strict=True):
        assert found["tokens"] == alone(whole, job_)
        mine, other = found["sums"]
        assert mine == other, job_["plan"]
        assert found["captured"][1] > found["captured"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        # nobody here has started it: its exit code is its launcher's
        ("dies", r"rank 1 \(pid"),
        ("fails", r"rank 1 .*failed: RuntimeError: an illegal"),
    ],
)
def test_a_rank_that_is_lost_between_replays_is_named(zoo: Zoo, fault: str, told: str) -> None:
    jobs = [job("tree-3-2-1", "greedy")]
    # graphs are captured when they are first needed
    options = {"jobs": jobs, "capture": [4], "max_seconds": -1, "fault": fault}
    with Launch(path_of(zoo, "llama", "cuda", 2), 2, options) as launch:
        (found,) = launch.said()
        assert launch.codes[0] == 0, launch.errors
    assert "tokens" not in found
    assert re.search(told, found["error"]), found
    assert launch.codes[1] == (7 if fault == "dies" else 1)
