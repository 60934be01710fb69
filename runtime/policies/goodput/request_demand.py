"""What requests come: how many a second, with prompts and outputs of which lengths."""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from specc.runtime.runner import RunResult
    from specc.runtime.scheduling.batch import Batch
    from specc.runtime.scheduling.sequence import Sequence as Request

# requests that tell how often others come, and how long prompts are
_ARRIVALS = 512
# a silence says something where so many should have come, and where it is so many times longer than
# the longest before
_SILENCE, _LONGER = 8.0, 1.5
# seconds in which all of them come at least
_SHORTEST_S = 1e-6
# requests a second where none come: sizes then tell how long one alone takes
_LEAST = 1e-3
# standard errors by which requests may come more often than they seem to
_CAUTION = 0.25
# output tokens of an unknown load, and for how many ended requests that guess counts
_OUTPUT, _GUESSES = 128.0, 2.0
# weight of the newest request in the length of outputs
_NEWS = 1 / 64


class Demand(NamedTuple):
    """Requests a second, and tokens of their prompts and outputs."""

    rate: float
    prompt: float
    output: float


class RequestDemand:
    """Watches requests come and go.

    Args:
        most: sequences that run together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # requests in the engine after the last iteration, those included that wait
        self.num_unfinished = 0
        # seconds of iterations since the last prompt
        self._idle_s = 0.0
        # arrival and prompt tokens of the latest requests
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=_ARRIVALS)
        # output tokens of all requests and of ended ones, and how many have ended: fading
        self._emitted, self._finished, self._ended = 0.0, 0.0, 0.0
        self._running: list[Request] = []

    def observe(self, batch: Batch, result: RunResult) -> None:
        """Take an iteration, after its commit."""
        seconds = result.prefill_s + sum(sum(step.stage_s.values()) for step in result.steps)
        num_rows = sum(len(group.sequences) for group in batch.groups)
        # where all places are taken, that no prompt comes says nothing
        is_idle = not batch.prefill and num_rows < self._most
        self._idle_s = self._idle_s + seconds if is_idle else 0.0
        for span in batch.prefill:
            sequence = span.sequence
            # the first time that a prompt ends
            if span.end == sequence.num_prompt_tokens:
                self._arrivals.append((sequence.arrival_s, sequence.num_prompt_tokens))
        self.num_unfinished = batch.num_unfinished
        self._running = []
        for group, step in zip(batch.groups, result.steps, strict=True):
            self._emitted += sum(step.num_accepted) + len(step.num_accepted)
            for sequence in group.sequences:
                if sequence.is_finished:
                    self._emitted -= _NEWS * self._emitted
                    self._finished += len(sequence.output_token_ids) - _NEWS * self._finished
                    self._ended += 1 - _NEWS * self._ended
                else:
                    self._running.append(sequence)

    def now(self, token_s: float) -> Demand:
        """What comes, as far as it is known.

        Args:
            token_s: seconds in which one request alone gets a token.
        """
        output = self._output
        if len(self._arrivals) < 2:
            return Demand(_LEAST, 0.0, output)
        # by when they came, not by when there was room for them
        times = sorted(arrival for arrival, _ in self._arrivals)
        gaps = [after - before for before, after in itertools.pairwise(times)]
        # those that come within the time of one request say little about how often others do
        rate = len(gaps) / max(sum(gaps) + self._idle_s, output * token_s, _SHORTEST_S)
        limit_s = max(_SILENCE / rate, _LONGER * max(gaps))
        rate *= min(1.0, limit_s / self._idle_s) if self._idle_s else 1.0
        rate *= 1 + _CAUTION * _error(gaps)
        prompt = sum(tokens for _, tokens in self._arrivals) / len(self._arrivals)
        return Demand(max(rate, _LEAST), prompt, output)

    @property
    def _output(self) -> float:
        """Mean output tokens.

        Of ended requests alone, short ones count too often while the batch grows; of all tokens
        over ended requests, too many count. Both are right where as many come as go. Ended ones
        together with those that run and are longer already lie between them otherwise.
        """
        count = self._ended + _GUESSES
        each = (self._emitted + _GUESSES * _OUTPUT) / count
        tokens = self._finished + _GUESSES * _OUTPUT
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
