"""A policy that runs one plan where it decodes faster than off, as measured here."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specc.errors import ConfigError
from specc.runtime.policies.base import Policy
from specc.runtime.policies.repeated_text import repeats
from specc.speculation.plans import OFF

if TYPE_CHECKING:
    from specc.runtime.drafters.host_drafts import HostDrafts
    from specc.runtime.scheduling.batch import Batch, RunResult
    from specc.runtime.scheduling.request import Request
    from specc.speculation.metrics import SpecStats
    from specc.speculation.plans import SpecPlan


@dataclass(frozen=True)
class MeasuredConstants:
    """Constants of the policy measured.

    Args:
        first: steps of the plan in the beginning.
        trial: steps of whatever is tried, off or the plan.
        seconds: newest steps whose median is what a step takes.
        tokens: newest steps of the plan whose mean is what a step yields.
        share: of the time, that the plan may cost where it loses.
        saved: steps of off for whose time that, and what the plan gains, is saved up at most;
        debt: and for whose time the plan may have lost more than that before it is given up, and a
            trial may lose before it ends.
        missed: of a step of off, that a draft model takes for each token that it has missed.
        suffix: tokens that a lookup has found again, from which on it is worth a trial;
        looks: and steps after which it is looked whether text repeats itself, for any other plan.
        again: steps of the plan after which off is timed again: rows of the cache become more.
    Raises:
        ConfigError: a number outside its range.
    """

    first: int = 4
    trial: int = 8
    seconds: int = 9
    tokens: int = 24
    share: float = 0.01
    saved: float = 16.0
    debt: float = 3.0
    missed: float = 0.02
    suffix: int = 4
    looks: int = 8
    again: int = 512

    def __post_init__(self) -> None:
        counts = (self.first, self.trial, self.seconds, self.tokens, self.again, self.looks)
        if min(counts) < 1 or not 0 < self.share < 1 or self.saved <= 0:
            raise ConfigError(
                f"{self}", "1 step or more of each, a share between 0 and 1", "keep the defaults"
            )


TUNED = MeasuredConstants()


class MeasuredPolicy(Policy):
    """Chooses between a plan and off, by the seconds and the tokens of their steps.

    The plan begins; then off is timed. From then on whichever yields more tokens a second runs.
    Where that is off, the plan is tried now and then, and whatever it costs beyond what off would
    have taken for its tokens is paid from 1 % of the time, trials and steps after a lucky one
    alike. So in the long run decoding is at most that much slower than plain decoding, whatever
    the plan does. One state a batch size, rounded up to a power of two, of which a new one starts
    from what the last one had found. Of a lookup it is known before a step what was found: a long
    suffix is reason for a trial, as long as those before have not cost more than their share. Text
    that repeats itself is reason for one of any plan.

    Args:
        host: whose index is asked, where the plan looks up; None asks nobody.
    """

    # a trial is as many steps as run in a row where nobody looks at their results: what the host
    # does between two steps then counts for the plan as it does for off
    needs_results = False

    def __init__(
        self,
        plan: SpecPlan,
        host: HostDrafts | None = None,
        constants: MeasuredConstants = TUNED,
    ) -> None:
        self._plan, self._constants = plan.name, constants
        self._depth, self._host = plan.max_depth, host
        self._lookup = None if plan.asked or len(plan.drafters) != 1 else plan.drafters[0]
        if self._lookup is not None:
            # one that compares fewer tokens finds them in prose, too
            self._lookup = self._lookup.comparing(constants.suffix)
        if not plan.draft_lens:
            # self-drafts have the target's rows, and lookups none
            self._constants = replace(constants, missed=0.0)
        self._states: dict[int, _State] = {}
        self._last = self._state_of(1)
        self._num_asked = 0
        # walls include what the host does; where nobody measures them, stages have to do
        self._has_walls = False

    def choose(self, num_running: int, stats: SpecStats) -> str:
        if num_running:
            self._last = self._state_of(num_running)
        return self._plan if self._last.drafts else OFF.name

    def choose_each(self, requests: list[Request], stats: SpecStats) -> list[str] | None:
        """The plan for all, where what was chosen is off and lookups have found something."""
        host, lookup, state = self._host, self._lookup, self._last
        if not requests or not state.may_hope:
            return None
        if host is not None and lookup is not None:
            least = self._constants.suffix
            found = [host.propose(s, self._depth, lookup)[1] >= least for s in requests]
        else:
            self._num_asked += 1
            if self._num_asked % self._constants.looks or not state.could_pay(self._depth + 1):
                return None
            found = [repeats(request.token_ids) for request in requests]
        # a step of a batch costs as much, however many of its requests gain
        if sum(found) * 2 <= len(found):
            return None
        state.hope()
        return [self._plan] * len(requests)

    def observe_batch(self, batch: Batch, result: RunResult) -> None:
        """Take the outcome of an iteration that was one step and nothing else."""
        self._has_walls |= result.wall_s > 0
        if len(batch.groups) != 1 or batch.prefill:
            return
        (group,), (step,) = batch.groups, result.steps
        count, name = len(group.requests), group.plan.name
        seconds = result.wall_s or (0.0 if self._has_walls else sum(step.stage_s.values()))
        state = self._states.get(_bucket(count))
        if state is not None and name in (self._plan, OFF.name) and seconds > 0:
            tokens = 1 + sum(step.num_accepted) / count
            # that drafts catch up is paid for, and says nothing about other steps
            state.observe(name != OFF.name, seconds, tokens, group.catches_up)

    def _state_of(self, num_running: int) -> _State:
        bucket = _bucket(num_running)
        if bucket not in self._states:
            self._states[bucket] = _State(self._constants, self._last if self._states else None)
        return self._states[bucket]


class _State:
    """What is known for one batch size, and what runs.

    Args:
        like: of another size, whose choice and acceptance it starts from.
    """

    def __init__(self, constants: MeasuredConstants, like: _State | None) -> None:
        self._constants = constants
        # seconds of steps, by whether they draft; tokens of steps that do
        self._seconds = {x: deque[float](maxlen=constants.seconds) for x in (False, True)}
        self._tokens: deque[float] = deque(like._tokens if like else (), maxlen=constants.tokens)
        # of the plan's seconds to those of off, where one of them was not measured here
        self._ratio = like._share_of_seconds() if like else None
        self._home: bool = like._home if like else True
        self.drafts = self._home
        # steps that are left of what is tried; 0 where nothing is
        self.left = constants.first if like is None else 0
        self._since = self._missed = 0
        self._saved_s = self._trial_s = self._lost_s = 0.0
        # tokens of a step when the plan was given up
        self._yield = 1.0

    def observe(self, drafts: bool, seconds: float, tokens: float, is_behind: bool) -> None:
        """Take a step, and decide what the next ones are."""
        if drafts:
            self._tokens.append(tokens)
        if not is_behind:
            self._seconds[drafts].append(seconds)
        off_s, plan_s = self._step_s(False), self._step_s(True)
        if off_s:
            most_s = self._constants.saved * off_s
            lost_s = seconds - tokens * off_s if drafts else 0.0
            self._saved_s = min(self._saved_s + self._constants.share * seconds - lost_s, most_s)
            if drafts and self.left:
                self._trial_s += max(0.0, lost_s)
                self._lost_s += lost_s
                if self._lost_s > self._constants.debt * off_s:
                    self.left = min(self.left, 1)
        self._missed = 0 if drafts else self._missed + 1
        if drafts is self.drafts and self.left:
            self.left -= 1
        if self.left:
            return
        if self.drafts and self._tokens:
            self._yield = statistics.fmean(self._tokens)
        if off_s is None or plan_s is None:
            # whichever was not timed yet
            self._try(off_s is not None)
            return
        if self._home or self.drafts or self._yield * off_s >= plan_s:
            self._home = (self._yield + self._doubt()) * off_s >= plan_s
        if self.drafts and self._saved_s < -self._constants.debt * off_s:
            self._home = False
        self.drafts = self._home
        self._since += 1
        if self._home and self._since >= self._constants.again:
            self._try(False)
        elif not self._home and self._saved_s >= self._expected_loss(off_s, plan_s):
            # what it yielded a while ago is not what it yields now
            self.hope()

    @property
    def may_hope(self) -> bool:
        """Whether off runs, nothing is tried, and a trial may begin that was not saved up for."""
        off_s = self._step_s(False)
        is_idle = not self.drafts and not self.left and off_s is not None
        return is_idle and self._saved_s > -self._constants.debt * (off_s or 0.0)

    def could_pay(self, tokens: int) -> bool:
        """Whether a trial is saved up for, and steps of so many tokens would be faster than off."""
        off_s, plan_s = self._step_s(False), self._step_s(True)
        return bool(off_s and plan_s and self._saved_s > 0 and tokens * off_s > plan_s)

    def hope(self) -> None:
        """Try the plan: something says that it is better than it was."""
        self._tokens.clear()
        self._try(True)

    def _try(self, drafts: bool) -> None:
        self.drafts, self.left = drafts, self._constants.trial
        self._since = 0
        if drafts:
            self._trial_s = self._lost_s = 0.0

    def _expected_loss(self, off_s: float, plan_s: float) -> float:
        """Seconds that a trial may cost: what the last one did, which may have ended early."""
        step_s = max(0.0, plan_s - self._yield * off_s)
        read_s = self._constants.missed * self._missed * off_s
        least = max(self._trial_s, step_s) if self._trial_s else self._constants.trial * step_s
        # it is tried in the end, whatever it may cost
        return min(least + read_s, self._constants.saved * off_s / 2)

    def _doubt(self) -> float:
        """Standard error of the mean of few steps' tokens: they are not given up too early."""
        count = len(self._tokens)
        if not 2 <= count < self._constants.tokens:
            return 0.0
        return statistics.stdev(self._tokens) / math.sqrt(count)

    def _step_s(self, drafts: bool) -> float | None:
        if len(self._seconds[drafts]) >= min(3, self._constants.trial):
            return statistics.median(self._seconds[drafts])
        other, ratio = self._seconds[not drafts], self._ratio
        if ratio is None or len(other) < min(3, self._constants.trial):
            return None
        return statistics.median(other) * (ratio if drafts else 1 / ratio)

    def _share_of_seconds(self) -> float | None:
        off_s, plan_s = self._step_s(False), self._step_s(True)
        return plan_s / off_s if off_s and plan_s else None


def _bucket(num_running: int) -> int:
    return 1 << (num_running - 1).bit_length()
