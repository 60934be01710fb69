"""Measure what leading costs: orders a step, and time of rank 0 outside of passes.

    OMP_NUM_THREADS=1 python examples/measure_orders.py ENGINE --json orders.json

The engine is one that is cut for ranks (`specc compile -tp 2`). Its plans take turns, greedy, a
request at a time, round by round. Each does so three times: `drawn` is as engines run, with tokens
that all ranks draw and COMMITs that go with the next order; `gathered` with logits at rank 0, as
where somebody reads them; `apart` with every order sent by itself. `order_us` is what rank 0 takes
to write orders and to send them; `passes_us` is from an order to the logits, or tokens, of all
ranks. Before that, messages alone: a PASS of a tree of 5 nodes, from tensors to bytes, and from a
socket to tensors that have been compared with what they have to be.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.ranks.channel import Channel
from specc.runtime.ranks.order_checks import pass_inputs
from specc.runtime.ranks.orders import Kind, Message, encode
from specc.sampling.params import SamplingParams
from specc.system.machine import describe_machine

PROMPT = "def read_lines(path):"
BLOCK = 200


def message_us() -> dict[str, float]:
    """Microseconds to write a PASS, and to read and check one: the best of ten blocks' medians."""
    nodes = 5
    i32 = torch.int32
    message = Message(
        Kind.PASS,
        (
            torch.arange(nodes), torch.arange(nodes), torch.tensor([0, nodes], dtype=i32),
            torch.arange(nodes, dtype=i32), torch.tensor([7], dtype=i32),
            torch.ones(nodes, 1, dtype=torch.int64), torch.zeros(1, 66, dtype=i32),
            torch.arange(nodes),
        ),
    )  # fmt: skip
    ends = [Channel(end) for end in socket.socketpair()]

    def read() -> None:
        found = ends[1].receive()
        assert found is not None
        pass_inputs(found)

    found: dict[str, list[float]] = {"write": [], "read": []}
    for number in range(10 * BLOCK):
        begin_s = time.perf_counter()
        data = encode(message._replace(sequence=number))
        written_s = time.perf_counter()
        ends[0].send_bytes(data)
        sent_s = time.perf_counter()
        read()
        found["write"].append(1e6 * (written_s - begin_s))
        found["read"].append(1e6 * (time.perf_counter() - sent_s))
    return {name: round(_best(values), 1) for name, values in found.items()}


def _best(values: list[float]) -> float:
    blocks = [values[i : i + BLOCK] for i in range(0, len(values), BLOCK)]
    return min(map(statistics.median, blocks))


class Clock:
    """Counts orders and the time that they take, and that of passes of all ranks."""

    def __init__(self, leader: Any) -> None:
        job = leader._job
        # whether what can go with the next order does
        self.holds = True
        self.seconds = {"order": 0.0, "passes": 0.0}
        self.orders = self.sent = 0
        job.order = self._timed("order", job.order)
        leader.run_pass = self._timed("passes", leader.run_pass)
        leader.run_draw = self._timed("passes", leader.run_draw)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begin_s = time.perf_counter()
            if not self.holds:
                options.pop("holds", None)
            try:
                return call(*args, **options)
            finally:
                self.seconds[name] += time.perf_counter() - begin_s
                self.orders += name == "order"
                self.sent += name == "order" and not options.get("holds")

        return timed

    def reset(self) -> None:
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.orders = self.sent = 0


def measure(engine: Engine, clock: Clock, plan: str, tokens: int) -> dict[str, float]:
    """One request; times in µs, of a step."""
    llm = LLM(engine, plan=plan)
    before = llm.get_metrics()
    clock.reset()
    begin_s = time.perf_counter()
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    took_s = time.perf_counter() - begin_s
    now = llm.get_metrics()
    steps = now.num_step_passes - before.num_step_passes
    return {
        "tokens_per_s": tokens / took_s,
        "steps": steps,
        "orders": clock.orders / steps,
        "messages": clock.sent / steps,
        "step_us": 1e6 * took_s / steps,
        "order_us": 1e6 * clock.seconds["order"] / steps,
        "passes_us": 1e6 * clock.seconds["passes"] / steps,
        "draft_us": 1e6 * (now.draft_s - before.draft_s) / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    messages = message_us()
    print("a message, µs:", messages)
    engine = Engine.load(args.engine)
    clock = Clock(engine.target.leader)
    gathered = dataclasses.replace(engine, drawn=None)
    kinds = {"drawn": engine, "gathered": gathered, "apart": engine}
    cases = [(plan, kind) for plan in engine.plans for kind in kinds]
    found: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(args.rounds + 1):  # the first one warms up
        # in the other order every second round
        for plan, kind in cases if number % 2 else cases[::-1]:
            clock.holds = kind != "apart"
            one = measure(kinds[kind], clock, plan, args.tokens)
            if number:
                found[plan, kind].append(one)
    engine.close()
    plans: dict[str, dict[str, Any]] = {}
    for (plan, kind), rounds in found.items():
        medians = {
            name: round(statistics.median(one[name] for one in rounds), 2) for name in rounds[0]
        }
        medians["tokens_per_s_of_rounds"] = [round(one["tokens_per_s"], 1) for one in rounds]
        plans.setdefault(plan, {})[kind] = medians
        print(f"{plan:24} {kind:9}", json.dumps(medians))
    if args.json:
        about = {
            "date": datetime.date.today().isoformat(),
            "machine": describe_machine(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "messages_us": messages,
            "plans": plans,
        }
        args.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
