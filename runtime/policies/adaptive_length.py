"""How far to speculate, learned from the steps themselves.

Minions' adaptive speculation length: minimize t_step(batch, s) / tokens(s) over windows of rounds:
measure the lengths in a warm-up, go where the cost falls, step back where it rises and pay for it,
ignore the rounds right after a change, try others again from time to time.
Source: Minions, arXiv:2402.15678 §4; the estimates and the budget of tries are specc's own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from specc.errors import ConfigError
from specc.runtime.policies.depth_acceptance import DepthAcceptance


@dataclass(frozen=True)
class AdaptiveConstants:
    """Constants of the policy adaptive.

    Args:
        window: rounds of a measurement.
        settle: rounds that are ignored after a change of the length.
        trial_share: of the time, that tries may lose.
        longest_wait: rounds at home after which the next try begins in any case.
        memory: rounds after which a measurement counts for half.
        few_rounds: of a try, before it can be given up.
        doubt: standard errors within which a length may be better than it looks.
        surprise: standard errors beyond which windows say that the load has changed.
        least_change: of tokens, as a share, that matters.
        least_change_of_seconds: likewise.
    Raises:
        ConfigError: a number outside its range.
    """

    window: int = 16
    settle: int = 2
    trial_share: float = 0.02
    longest_wait: int = 512
    memory: int = 512
    few_rounds: int = 4
    doubt: float = 2.0
    surprise: float = 4.0
    least_change: float = 0.1
    least_change_of_seconds: float = 0.25

    def __post_init__(self) -> None:
        if not 1 <= self.window <= min(self.longest_wait, self.memory) or self.settle < 0:
            raise ConfigError(
                f"window {self.window}, settle {self.settle}, longest_wait {self.longest_wait},"
                f" memory {self.memory}",
                "a window of 1 round or more, no longer than the wait and the memory; settle >= 0",
                "keep the defaults",
            )
        if not 0 < self.trial_share < 1:
            raise ConfigError(
                f"trial_share {self.trial_share}", "between 0 and 1", "for example 0.02"
            )


TUNED = AdaptiveConstants()


class _Seconds:
    """Seconds of a length's rounds."""

    def __init__(self) -> None:
        self.count = 0.0
        self.last_round = 0
        self._sum = 0.0
        self._sum_of_squares = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self._sum += seconds
        self._sum_of_squares += seconds * seconds

    def merge(self, other: _Seconds, fade: float) -> None:
        self.count = fade * self.count + other.count
        self._sum = fade * self._sum + other._sum
        self._sum_of_squares = fade * self._sum_of_squares + other._sum_of_squares

    @property
    def mean(self) -> float:
        return self._sum / self.count

    @property
    def error(self) -> float:
        """Relative standard error of the mean; a few rounds alike are no proof of steadiness."""
        variance = max(0.0, self.count * self._sum_of_squares / self._sum**2 - 1)
        return math.sqrt((self.count * variance + 0.04) / (self.count + 4) / self.count)


class AdaptiveLength:
    """A state machine that looks for the length with the fewest seconds a token.

    It stays at the best length it knows (home) and tries others. In the warm-up every length is
    tried once. Afterwards a try is due where its length may be better, given how little is known
    of it by now, and where home has earned it: tries may lose `trial_share` of the time. A try
    that is worse beyond doubt ends early. A window whose tokens or seconds contradict what was
    known means that the load has changed: that is forgotten, and learned anew.

    Args:
        lengths: to choose from, each above the one before; 0 may stand for off.
        start: the first one; None is the middle.
    Raises:
        ConfigError: no length, lengths out of order, or a start that is none of them.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        start: int | None = None,
        constants: AdaptiveConstants = TUNED,
    ) -> None:
        lengths = tuple(lengths)
        is_rising = all(a < b for a, b in itertools.pairwise(lengths))
        if not lengths or not is_rising or lengths[0] < 0:
            raise ConfigError(f"lengths {lengths}", "one or more, rising, from 0", "sort them")
        if start is not None and start not in lengths:
            raise ConfigError(f"start {start}", f"one of {lengths}", "choose one of the lengths")
        self._lengths = lengths
        self._tuned = constants
        self._home = self._now = len(lengths) // 2 if start is None else lengths.index(start)
        self._seconds = [_Seconds() for _ in lengths]
        self._acceptance = DepthAcceptance(lengths[-1])
        self._round = 0
        self._faded_round = 0
        # how far windows have contradicted what was known, in standard errors
        self._better = self._worse = 0.0
        # seconds that tries have lost and home has not earned; rounds at home since the last try
        self._debt = 0.0
        self._waited = 0
        self._start_visit(constants.settle)

    @property
    def current(self) -> int:
        """Length of the next round."""
        return self._lengths[self._now]

    @property
    def home(self) -> int:
        """The best length known; `current` differs from it during a try."""
        return self._lengths[self._home]

    def observe(self, seconds: float, num_tokens: int | Sequence[int]) -> None:
        """Take the outcome of one round at `current`.

        Args:
            seconds: of the round's step, above 0.
            num_tokens: that the sequence got, or each of them: 1 … current + 1.
        """
        tokens = [num_tokens] if isinstance(num_tokens, int) else num_tokens
        assert seconds > 0, "a round takes time"
        assert tokens, "some sequence took part"
        assert all(1 <= n <= self.current + 1 for n in tokens), tokens
        self._round += 1
        if self._now == self._home:
            least = -self._tuned.trial_share * self._tuned.longest_wait * seconds
            self._debt = max(self._debt - self._tuned.trial_share * seconds, least)
            self._waited += 1
        self._visit.append((seconds, sum(tokens) / len(tokens)))
        if len(self._visit) <= self._skip:
            return
        self._new_seconds.add(seconds)
        self._new_acceptance.add(self.current, tokens)
        self._num_seen += len(tokens)
        self._tokens_seen += sum(tokens)
        if self._new_seconds.count >= self._tuned.window or self._is_hopeless():
            self._end_window()

    def _start_visit(self, skip: int) -> None:
        self._skip = skip
        self._visit: list[tuple[float, float]] = []
        self._new_seconds = _Seconds()
        self._new_acceptance = DepthAcceptance(self._lengths[-1])
        self._num_seen = self._tokens_seen = 0

    def _is_hopeless(self) -> bool:
        """A try that is worse than home beyond doubt."""
        seen = self._new_seconds
        if self._now == self._home or seen.count < self._tuned.few_rounds:
            return False
        known = self._acceptance
        tokens = max(known.mean_tokens(self.current), self._tokens_seen / self._num_seen)
        spread = math.sqrt(known.variance(self.current) / self._num_seen)
        return seen.mean * math.exp(-self._tuned.doubt * seen.error) > self._cost(self._home) * (
            tokens + self._tuned.doubt * spread
        )

    def _end_window(self) -> None:
        self._learn_acceptance()
        self._learn_seconds()
        if self._now != self._home:
            lost = sum(s - n * self._cost(self._home) for s, n in self._visit)
            self._debt += max(0.0, lost)
        known = [i for i, seconds in enumerate(self._seconds) if seconds.count]
        self._home = min(known, key=self._cost)
        tried = self._next_try()
        if tried is None:
            self._go(self._home)
        else:
            self._waited = 0
            self._go(tried)

    def _learn_acceptance(self) -> None:
        """Add the window to what is known; forget that first if windows go on to contradict it."""
        known, mean = self._acceptance, self._tokens_seen / self._num_seen
        expected = known.mean_tokens(self.current)
        error = math.hypot(
            known.error(self.current), math.sqrt(known.variance(self.current) / self._num_seen)
        )
        is_large = abs(mean - expected) > self._tuned.least_change * expected
        surprise = (mean - expected) / error if is_large else 0.0
        # cumulative sums (Page, 1954): one window is a surprise, or several are a smaller one
        self._better = max(0.0, self._better + surprise - 1)
        self._worse = max(0.0, self._worse - surprise - 1)
        if max(self._better, self._worse) > self._tuned.surprise:
            self._acceptance = DepthAcceptance(self._lengths[-1])
            self._better = self._worse = self._debt = 0.0
        fade = 0.5 ** ((self._round - self._faded_round) / self._tuned.memory)
        self._faded_round = self._round
        self._acceptance.merge(self._new_acceptance, fade)

    def _learn_seconds(self) -> None:
        known, new = self._seconds[self._now], self._new_seconds
        if known.count:
            change = abs(math.log(new.mean / known.mean))
            error = math.hypot(known.error, new.error)
            if change > max(self._tuned.least_change_of_seconds, self._tuned.surprise * error):
                home = self._seconds[self._home]
                self._seconds = [_Seconds() for _ in self._lengths]
                if self._now != self._home:
                    # measured right before the try
                    self._seconds[self._home] = home
                known = self._seconds[self._now]
                self._debt = 0.0
        known.merge(new, 0.5 ** ((self._round - known.last_round) / self._tuned.memory))
        known.last_round = self._round

    def _cost(self, index: int) -> float:
        return self._seconds[index].mean / self._acceptance.mean_tokens(self._lengths[index])

    def _hope(self, index: int) -> float:
        """The least cost that would not surprise; it falls while a length is not tried."""
        length, seconds = self._lengths[index], self._seconds[index]
        tokens = self._acceptance.mean_tokens(length)
        error = math.hypot(seconds.error, self._acceptance.error(length) / tokens)
        return seconds.mean / tokens * math.exp(-self._tuned.doubt * error)

    def _next_try(self) -> int | None:
        """What to try now; None is nothing: stay at home."""
        others = [i for i in range(len(self._lengths)) if i != self._home]
        untried = [i for i in others if not self._seconds[i].count]
        if untried:
            # the nearest, the longer of two
            return min(untried, key=lambda i: (abs(i - self._home), -i))
        if not others:
            return None
        best = min(others, key=self._hope)
        is_due = self._debt <= 0 and self._waited >= self._tuned.window
        is_due = is_due and self._hope(best) < self._cost(self._home)
        return best if is_due or self._waited >= self._tuned.longest_wait else None

    def _go(self, index: int) -> None:
        self._start_visit(0 if index == self._now else self._tuned.settle)
        self._now = index
