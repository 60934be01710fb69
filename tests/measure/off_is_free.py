"""What an engine costs beside plain decoding where nobody has chosen a plan.

For each plan of an engine: tokens a second of the policy that chooses between it and off, over
those of off, counted from the 64th token of a request on. Both run in turns in one process, in an
order that changes from round to round, and what is printed is the median of the rounds, so that
what else the machine does touches both. `fixed` beside it is the plan in every step: what is
avoided.

    python tests/measure/off_is_free.py ENGINE --prompts prompts.jsonl --json out.json
    python tests/measure/off_is_free.py ENGINE --prompts prompts.jsonl --batch 8 --served
"""

from __future__ import annotations

import functools
import json
import os
import queue
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from specc.cli.prompts import plain_prompts
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.kept_latency import with_kept_latency
from specc.runtime.llm import LLM
from specc.runtime.policies.named import make_policy
from specc.runtime.service.service import Service
from specc.runtime.service.update import Update
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF
from specc.system.machine import describe_machine
from specc.tune.latency import measure_latency

# tokens of a request after which speed counts
SETTLED = 64


class Contender:
    """Requests that run together, by one way to choose plans.

    Args:
        plan: in every step; None is the policy.
        choice: plans that the policy chooses among, off beside them.
        served: by the service of a server, not by `LLM`.
    """

    def __init__(
        self, engine: Engine, plan: str | None, choice: Sequence[str] = (), served: bool = False
    ) -> None:
        self._engine, self._plan, self._choice, self._served = engine, plan, choice, served

    def tokens_per_s(self, prompts: Sequence[Any], num_tokens: int) -> tuple[float, float]:
        """Of all requests together after their 64th token, and the share of steps that drafted."""
        policy = None
        if self._plan is None:
            plans = {name: self._engine.plans[name] for name in (OFF.name, *self._choice)}
            core = EngineCore(self._engine, OFF.name)
            policy = make_policy(
                "goodput" if self._served else "measured", plans, core.scheduler.host_drafts,
                with_kept_latency(self._engine), shares_pass=self._engine.runner_type.shares_pass,
                max_num_seqs=len(prompts), plan=self._choice[0],
            )  # fmt: skip
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        run = self._serve if self._served else self._stream
        return run(policy, prompts, params)

    def _stream(
        self, policy: Any, prompts: Sequence[Any], params: SamplingParams
    ) -> tuple[float, float]:
        llm = LLM(self._engine, plan=None if policy else self._plan, policy=policy)
        times: dict[int, list[float]] = {}
        for event in llm.stream(list(prompts), params):
            times.setdefault(event.index, []).append(time.perf_counter())
        stats = llm.get_metrics()
        return _rate(list(times.values())), stats.num_spec_steps / max(1, stats.num_steps)

    def _serve(
        self, policy: Any, prompts: Sequence[Any], params: SamplingParams
    ) -> tuple[float, float]:
        core = EngineCore(self._engine, None if policy else self._plan, policy, multi_step_s=0.02)
        service, ended = Service(core), queue.SimpleQueue[int]()
        times: list[list[float]] = [[] for _ in prompts]

        def note(number: int, update: Update) -> None:
            times[number] += [time.perf_counter()] * len(update.token_ids)
            if update.is_last:
                ended.put(number)

        for number, prompt in enumerate(prompts):
            service.submit(prompt, params, functools.partial(note, number))
        for _ in prompts:
            ended.get()
        stats = core.scheduler.stats
        service.close()
        return _rate(times), stats.num_spec_steps / max(1, stats.num_steps)


def _rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens a second while all requests are past their 64th token and none has ended."""
    begin = max(own[SETTLED] for own in times)
    end = min(own[-1] for own in times)
    return sum(begin < at <= end for own in times for at in own) / (end - begin)


def measure(
    ways: dict[str, Contender], prompts: Sequence[Any], num_tokens: int, rounds: int
) -> dict[str, Any]:
    """Medians over rounds of what each way does, relative to off in the same round."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    drafted: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(-1, rounds):
        order = names[number % len(names) :] + names[: number % len(names)]
        seen = {name: ways[name].tokens_per_s(prompts, num_tokens) for name in order}
        for name, (rate, share) in seen.items() if number >= 0 else ():
            found[name].append(rate / seen[OFF.name][0])
            drafted[name].append(share)
            if name == OFF.name:
                found[name][-1] = rate
    return {
        name: {"ratio": statistics.median(found[name]), "drafted": statistics.median(drafted[name])}
        for name in names
    }


def main(
    engine: Path,
    prompts: Annotated[Path, typer.Option(help="JSON lines.")],
    plans: Annotated[list[str] | None, typer.Option("--plan")] = None,
    batch: int = 1,
    tokens: int = 256,
    rounds: int = 5,
    served: bool = False,
    fixed: Annotated[bool, typer.Option(help="The plan in every step, too.")] = True,
    cpu_seconds: Annotated[
        bool, typer.Option(help="This process's seconds in place of the clock's, of one thread.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    if cpu_seconds:
        # of policies, too: where others use the machine, the clock's say little
        time.perf_counter = time.process_time
    loaded = Engine.load(engine, num_threads=1 if cpu_seconds else None)
    if served and "latency" not in with_kept_latency(loaded):
        # as `specc serve` does before it listens
        table = measure_latency(loaded).to_json()
        loaded.profile = {**loaded.profile, "latency": table}
    texts = plain_prompts(prompts)
    report: dict[str, Any] = {"machine": describe_machine(), "batch": batch, "cases": []}
    report |= {"tokens": tokens, "rounds": rounds, "served": served, "cpu_seconds": cpu_seconds}
    names = plans or [name for name, plan in loaded.plans.items() if plan.speculates]
    for name in names:
        for first in range(0, len(texts) - batch + 1, batch):
            ways = {OFF.name: Contender(loaded, OFF.name, served=served)}
            ways["chosen"] = Contender(loaded, None, [name], served)
            if fixed:
                ways["fixed"] = Contender(loaded, name, served=served)
            case = measure(ways, texts[first : first + batch], tokens, rounds)
            about = {"plan": name, "prompt": str(texts[first])[:40], "load": os.getloadavg()[0]}
            case = about | case
            report["cases"].append(case)
            print(json.dumps(case), flush=True)
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
