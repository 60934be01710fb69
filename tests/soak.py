"""Requests without end over one service: cancelled, late, refused, hit by faults, or served."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specc.errors import FaultError, OverloadError, RequestError
from specc.runtime.service.service import Service, Ticket, Update
from specc.sampling.params import SamplingParams
from tests.interleavings import NearTies, Solo, draw_params

# parts of all requests
CANCELLED, LATE, INVALID = 0.1, 0.03, 0.02


class InjectedError(RuntimeError):
    """What breaks an iteration on purpose."""


@dataclass
class SoakFigures:
    """What became of the requests.

    Args:
        ends: requests by finish reason, `fault` (an error), `refused` and `overload`.
        num_faults: iterations that were broken.
        rss_bytes: resident memory, at times spread over the run.
    """

    seconds: float = 0.0
    num_requests: int = 0
    num_tokens: int = 0
    num_compared: int = 0
    num_ties: int = 0
    num_faults: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    rss_bytes: list[int] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """Resident memory of the last quarter over that of the second one."""
        count = len(self.rss_bytes) // 4
        early, late = self.rss_bytes[count : 2 * count], self.rss_bytes[-count:]
        return sum(late) / len(late) / (sum(early) / len(early))

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "ends": dict(sorted(self.ends.items())), "growth": self.growth}


class _Client:
    """One request: its updates, and whether they are what they have to be."""

    def __init__(self, prompt: list[int], params: SamplingParams) -> None:
        self.prompt, self.params = prompt, params
        self.updates: list[Update] = []
        self.ended = threading.Event()
        self.ticket: Ticket | None = None

    def receive(self, update: Update) -> None:
        assert not self.ended.is_set(), "an update after the last one"
        self.updates.append(update)
        if update.is_last:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [token for update in self.updates for token in update.token_ids]

    @property
    def end(self) -> str:
        last = self.updates[-1]
        return "fault" if last.error is not None else str(last.finish_reason)


def run_soak(
    service: Service,
    solo: Solo,
    judge: NearTies,
    prompts: Sequence[Sequence[int]],
    *,
    num_requests: int,
    seconds: float,
    faults: float = 0.005,
    max_tokens: int = 32,
    seed: int = 0,
) -> SoakFigures:
    """Keep a service busy for so many requests and seconds at least.

    Args:
        service: with nobody else at work; its engine is broken now and then.
        judge: of outputs that differ from those of solo runs.
        num_requests: to hand in at least.
        seconds: to go on for at least.
        faults: share of iterations that fail.
        max_tokens: of a request at most.
        seed: of the dice.
    """
    dice = random.Random(seed)
    # few kinds, so that each has its solo run once
    kinds = [
        (list(prompt), draw_params(dice, max_tokens, service.engine.vocab_size))
        for prompt in prompts
        for _ in range(6)
    ]
    wanted = [solo.tokens(*kind) for kind in kinds]
    figures = SoakFigures()
    _break_now_and_then(service, faults, figures)
    open_ones: list[tuple[int, _Client]] = []
    begin_s = time.monotonic()
    next_look_s = 0.0
    while figures.num_requests < num_requests or time.monotonic() - begin_s < seconds:
        if (now_s := time.monotonic() - begin_s) >= next_look_s:
            figures.rss_bytes.append(_rss())
            next_look_s = now_s + seconds / 40
        if service.num_open > 40:
            time.sleep(0.002)
        else:
            open_ones += _hand_in(service, dice, kinds, figures)
        open_ones = _settle(open_ones, wanted, figures, judge)
        if open_ones and dice.random() < CANCELLED / 4:
            _, client = dice.choice(open_ones)
            if client.ticket is not None:
                service.cancel(client.ticket)
    for _, client in open_ones:
        assert client.ended.wait(60), "a request was lost"
    assert not _settle(open_ones, wanted, figures, judge)
    figures.seconds = time.monotonic() - begin_s
    state = service.state()
    figures.num_preemptions = state.stats.num_preemptions
    figures.num_cached_tokens = state.stats.num_cached_tokens
    return figures


def _hand_in(
    service: Service,
    dice: random.Random,
    kinds: list[tuple[list[int], SamplingParams]],
    figures: SoakFigures,
) -> list[tuple[int, _Client]]:
    figures.num_requests += 1
    index = dice.randrange(len(kinds))
    client = _Client(*kinds[index])
    chance = dice.random()
    timeout_s = dice.random() * 0.02 if chance < LATE else None
    prompt: Any = [*client.prompt, -1] if chance > 1 - INVALID else client.prompt
    try:
        client.ticket = service.submit(
            prompt,
            client.params,
            client.receive,
            priority=dice.randrange(-1, 2),
            timeout_s=timeout_s,
        )
    except RequestError:
        assert chance > 1 - INVALID
        figures.ends["refused"] += 1
        return []
    except OverloadError:
        figures.ends["overload"] += 1
        return []
    return [(index, client)]


def _settle(
    clients: list[tuple[int, _Client]],
    wanted: list[list[int]],
    figures: SoakFigures,
    judge: NearTies,
) -> list[tuple[int, _Client]]:
    """Look at those that have ended; returns the others."""
    others = []
    for index, client in clients:
        # once: it may end at any time, and is either counted or looked at again
        if not client.ended.is_set():
            others.append((index, client))
            continue
        figures.ends[client.end] += 1
        figures.num_tokens += len(client.tokens)
        if client.end == "fault":
            assert isinstance(client.updates[-1].error, FaultError)
        # whatever ended it, its tokens are its own
        solo = wanted[index][: len(client.tokens)]
        whole = client.end in ("stop", "length")
        assert not whole or len(client.tokens) == len(wanted[index]) or client.tokens != solo
        if client.tokens != solo:
            assert client.ticket is not None
            pairs = enumerate(zip(client.tokens, solo, strict=False))
            position = next(i for i, (a, b) in pairs if a != b)
            judge(client.ticket._request, wanted[index], position)
            figures.num_ties += 1
        figures.num_compared += whole
    return others


def _break_now_and_then(service: Service, share: float, figures: SoakFigures) -> None:
    """Let iterations fail in the middle: before the device, after it, or between two commits."""
    dice = random.Random(1)
    runner, scheduler = service.core.runner, service.core.scheduler
    run, publish = runner.run, scheduler._blocks.publish

    def broken_run(batch: Any) -> Any:
        chance = dice.random()
        if chance < share / 3:
            figures.num_faults += 1
            raise InjectedError("before the passes")
        result = run(batch)
        if chance < 2 * share / 3:
            figures.num_faults += 1
            raise InjectedError("after the passes")
        return result

    def broken_publish(request: Any) -> None:
        # the first thing after tokens and lengths, for each request
        if dice.random() < share / 3 / len(scheduler.running):
            figures.num_faults += 1
            raise InjectedError("after the tokens")
        publish(request)

    runner.run = broken_run  # type: ignore[method-assign]
    scheduler._blocks.publish = broken_publish  # type: ignore[method-assign]


def _rss() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def assert_sound(service: Service, figures: SoakFigures) -> None:
    """Nothing is lost: every request has ended once, every block is free."""
    assert sum(figures.ends.values()) == figures.num_requests
    assert service.num_open == 0
    assert service.drain(10)
    pool = service.engine.cache.allocator
    deadline = time.monotonic() + 10
    while pool.num_free < pool.num_blocks and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pool.num_free == pool.num_blocks
    assert not service.core.scheduler.has_work
    assert set(figures.ends) >= {"length", "abort", "refused", "timeout", "fault"}
