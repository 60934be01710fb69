"""Rank 0 of a led engine, for tests that kill and stop ranks: `led_process.py ENGINE OPTIONS`.

It says on standard output, as JSON, who its ranks are and where it stands, and there waits for a
line, which may name what is wrong with its next orders. What it ends with is what is tested.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from specc.errors import SpeccError
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.ranks.orders import Kind
from specc.runtime.ranks.rank_options import RankOptions
from specc.runtime.service.service import Service
from specc.sampling.params import SamplingParams

PLAN = "tree-3-2-1"
PROMPT = [5, 6, 7, 8] * 4


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def paused(stage: str, count: int, engine: Engine, call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that waits for a line when it is called for this time."""
    calls = 0

    @functools.wraps(call)
    def run(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            wait(stage, engine)
        return call(*args)

    return run


def wait(stage: str, engine: Engine) -> None:
    say(at=stage)
    answer = sys.stdin.readline().strip()
    job = engine.target.leader._job
    if answer == "garbage":
        for follower in job.followers:
            follower.orders.send_bytes(b"GET / HTTP/1.1\r\n" * 8)
    elif answer == "gap":
        job.sent += 1
    elif answer == "wrong block":
        inputs = [torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)]
        inputs += [torch.tensor([0, 1], dtype=torch.int32)]
        inputs += [torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)]
        table = torch.full((1, engine.cache.shape.blocks_per_sequence), 1 << 20, dtype=torch.int32)
        inputs += [torch.ones(1, 1, dtype=torch.int64), table, torch.zeros(1, dtype=torch.int64)]
        job.order(Kind.PASS, tuple(inputs))


def main() -> None:
    options = json.loads(sys.argv[2])
    engine = Engine.load(
        sys.argv[1], ranks=RankOptions(**{"oversubscribes": True} | options["ranks"])
    )
    say(pids=[os.getpid(), *engine.target.leader.pids])
    stage, step = options.get("stage"), engine.steps[PLAN]
    if stage == "prefill":
        engine.target.program = paused(stage, 1, engine, engine.target.program)
    elif stage == "verify":
        # of several requests, a batch of trees is in the other stage by then
        count = 3 if options.get("num_requests", 1) == 1 else 7
        engine.target.program = paused(stage, count, engine, engine.target.program)
    elif stage == "draft":
        # of a cut engine, the step that draws runs
        for one in (step, *([engine.drawn.steps[PLAN]] if engine.drawn else [])):
            one._step.draft = paused(stage, 2, engine, one._step.draft)
    elif stage == "accept":
        step.before_accept = paused(stage, 2, engine, lambda values: None)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    if options.get("is_service"):
        serve(engine, params, stage, options.get("num_requests", 1))
    say(tokens=generate(engine, params))
    if stage == "idle":
        time.sleep(options.get("idle_s", 0))
        wait("idle", engine)
        say(tokens=generate(engine, params))
    # as a server without requests
    time.sleep(options.get("end_s", 30))


def generate(engine: Engine, params: SamplingParams) -> list[int]:
    (output,) = LLM(engine, plan=PLAN).generate([PROMPT], params)
    return list(output.outputs[0].token_ids)


def serve(engine: Engine, params: SamplingParams, stage: str | None, num_requests: int) -> None:
    """Open requests, whose ends are said; then a server that waits for others.

    Where the stage is `idle`, the request ends, and there is another one after the line.
    """
    service = Service(EngineCore(engine, PLAN))
    has_ended = threading.Event()

    def update(news: Any) -> None:
        if news.is_last:
            say(error=type(news.error).__name__, health=service.health.value)
            has_ended.set()

    def submit() -> None:
        try:
            service.submit(PROMPT, params, update)
        except SpeccError as error:
            say(error=type(error).__name__, health=service.health.value)

    for _ in range(num_requests):
        submit()
    if stage == "idle":
        has_ended.wait()
        wait("idle", engine)
        submit()
    time.sleep(30)


if __name__ == "__main__":
    main()
