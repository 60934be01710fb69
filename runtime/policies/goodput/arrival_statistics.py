"""What requests come: how many a second, with prompts and outputs of which lengths."""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from specc.runtime.policies.goodput.constants import TUNED

if TYPE_CHECKING:
    from specc.runtime.scheduling.batch import Batch, RunResult
    from specc.runtime.scheduling.request import Request


class Demand(NamedTuple):
    """Requests a second, and tokens of their prompts and outputs."""

    rate: float
    prompt: float
    output: float


class ArrivalStatistics:
    """Watches requests come and go.

    Args:
        most: requests that run together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # requests in the engine after the last iteration, those included that wait
        self.num_unfinished = 0
        # seconds of iterations since the last prompt
        self._idle_s = 0.0
        # arrival and prompt tokens of the latest requests
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=TUNED.arrivals)
        # output tokens of all requests and of ended ones, and how many have ended: fading
        self._emitted, self._finished, self._ended = 0.0, 0.0, 0.0
        self._running: list[Request] = []

    def observe(self, batch: Batch, result: RunResult) -> None:
        """Take an iteration, after its commit."""
        seconds = result.prefill_s + sum(sum(step.stage_s.values()) for step in result.steps)
        num_rows = sum(len(group.requests) for group in batch.groups)
        # where all slots are taken, that no prompt comes says nothing
        is_idle = not batch.prefill and num_rows < self._most
        self._idle_s = self._idle_s + seconds if is_idle else 0.0
        for span in batch.prefill:
            request = span.request
            # the first time that a prompt ends
            if span.end == request.num_prompt_tokens:
                self._arrivals.append((request.arrival_s, request.num_prompt_tokens))
        self.num_unfinished = batch.num_unfinished
        self._running = []
        for group, step in zip(batch.groups, result.steps, strict=True):
            self._emitted += sum(step.num_accepted) + len(step.num_accepted)
            for request in group.requests:
                if request.is_finished:
                    self._emitted -= TUNED.output_news * self._emitted
                    self._finished += (
                        len(request.output_token_ids) - TUNED.output_news * self._finished
                    )
                    self._ended += 1 - TUNED.output_news * self._ended
                else:
                    self._running.append(request)

    def now(self, token_s: float) -> Demand:
        """What comes, as far as it is known.

        Args:
            token_s: seconds in which one request alone gets a token.
        """
        output = self._output
        if len(self._arrivals) < 2:
            return Demand(TUNED.least_rate, 0.0, output)
        # by when they came, not by when there was room for them
        times = sorted(arrival for arrival, _ in self._arrivals)
        gaps = [after - before for before, after in itertools.pairwise(times)]
        # those that come within the time of one request say little about how often others do
        rate = len(gaps) / max(sum(gaps) + self._idle_s, output * token_s, TUNED.shortest_s)
        limit_s = max(TUNED.silence / rate, TUNED.longer_silence * max(gaps))
        rate *= min(1.0, limit_s / self._idle_s) if self._idle_s else 1.0
        rate *= 1 + TUNED.caution * _error(gaps)
        prompt = sum(tokens for _, tokens in self._arrivals) / len(self._arrivals)
        return Demand(max(rate, TUNED.least_rate), prompt, output)

    @property
    def _output(self) -> float:
        """Mean output tokens.

        Of ended requests alone, short ones count too often while the batch grows; of all tokens
        over ended requests, too many count. Both are right where as many come as go. Ended ones
        together with those that run and are longer already lie between them otherwise.
        """
        count = self._ended + TUNED.output_guesses
        each = (self._emitted + TUNED.output_guesses * TUNED.output_tokens) / count
        tokens = self._finished + TUNED.output_guesses * TUNED.output_tokens
        ended = tokens / count
        for length in sorted((len(s.output_token_ids) for s in self._running), reverse=True):
            if length * count <= tokens:
                break
            tokens, count = tokens + length, count + 1
        return sorted((each, ended, tokens / count))[1]


def _error(gaps: list[float]) -> float:
    """Standard error of the mean, as a share of it: large for few requests, and for bursts."""
    mean = sum(gaps) / len(gaps)
    if not mean:
        return 1.0
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    return math.sqrt(variance / len(gaps)) / mean
