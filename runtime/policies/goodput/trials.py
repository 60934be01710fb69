"""The trial that the policy goodput runs, if any: how long, and when repeated text starts one."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from specc.runtime.policies.goodput.constants import TUNED
from specc.runtime.policies.goodput.probe import Probe, Probes
from specc.runtime.policies.repeated_text import repeats

if TYPE_CHECKING:
    from specc.runtime.scheduling.batch import Batch, RunResult
    from specc.runtime.scheduling.request import Request


class Trials:
    """At most one `Probe` at a time, of one iteration, or of more as long as it gains."""

    def __init__(self) -> None:
        # request → index of the plan that it tries in the next iteration
        self.plans: Mapping[str, int] = {}
        # whether the next decision may try what is likely to be accepted by text that repeats
        self.hopes = False
        # the last trial, until its seconds are known
        self._probe: Probe | None = None
        # the last iteration has gained, or could not be queued ahead
        self._goes_on = self._is_asked_again = False
        self._next_hope = 0

    def start(self, probe: Probe | None) -> None:
        """Run a trial in the next iteration, or none."""
        self._probe, self.plans, self.hopes = probe, dict(probe.plans) if probe else {}, False

    def ask_again(self) -> None:
        """The trial could not be queued ahead, so that it is not over."""
        self._is_asked_again = True

    def end(self) -> bool:
        """Whether a trial is over: it is one iteration long unless that has gained."""
        is_over = bool(self.plans) and not (self._is_asked_again or self._goes_on)
        if is_over:
            self.plans = {}
        self._is_asked_again = self._goes_on = False
        return is_over

    def may_hope(self, requests: list[Request], probes: Probes, num_iterations: int) -> bool:
        """Whether plain text begins to repeat itself, and there is time for a trial."""
        if num_iterations < self._next_hope or not probes.is_full:
            return False
        if 2 * sum(repeats(request.token_ids) for request in requests) <= len(requests):
            return False
        self._next_hope, self.hopes = num_iterations + TUNED.longest_hold, True
        return True

    def pay(self, ran: AbstractSet[int], batch: Batch, result: RunResult, probes: Probes) -> bool:
        """Charge an iteration with these plans; returns whether a trial has gained and goes on."""
        trial = self._probe
        if trial is None or ran.isdisjoint(trial.plans.values()):
            return False
        self._probe = None
        # prompts, and what is queued before results come, have no seconds of their own
        if not result.wall_s or batch.prefill:
            return False
        tokens = trial.tokens_in(batch, result)
        gained_s = trial.gained_s - probes.took(trial, result.wall_s, tokens)
        if gained_s <= 0 or not self.plans or any(s.is_finished for s in batch.requests):
            return False
        self._probe, self._goes_on = trial._replace(charged=0.0, gained_s=gained_s), True
        return True
