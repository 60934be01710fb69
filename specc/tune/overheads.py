"""Seconds of iterations outside of their passes: the host's part, and what drafting adds."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

from specc.cost.draft_levels import draft_levels
from specc.drafters.drafter import Drafter
from specc.runtime.backends.step import Model
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, SpecPlan
from specc.tune.timed_pass import time_pass

# tokens of a sequence, and as many again that it generates
SHORT = 16
ROUNDS = 7


class Overheads:
    """Seconds of an iteration, and of a group that drafts, outside of their passes.

    What no pass takes is timed as such, and what drafting takes besides its passes beside passes of
    the same moment. As differences to a table's passes both would be lost: iterations of a short
    sequence find weights in the processor's caches that passes after long contexts do not.

    Args:
        engine: with nobody else at work during a slice.
        budget_s: seconds of slices of each plan after which no further sequence begins.
    """

    def __init__(self, engine: Engine, budget_s: float) -> None:
        drafting = [plan for plan in engine.plans.values() if plan.asked and plan.tile is None]
        plan = min(drafting, key=lambda plan: plan.num_nodes, default=None)
        self._off = self._own = Iterations(engine, OFF, budget_s=budget_s)
        if plan is not None and plan.max_depth + 2 * SHORT <= engine.position_limit:
            self._own = Iterations(engine, plan, budget_s=budget_s)

    @property
    def progress(self) -> tuple[int, int]:
        (done, total), (more, of) = self._off.progress, self._own.progress
        return (done, total) if self._own is self._off else (done + more, total + of)

    def advance(self) -> bool:
        return self._off.advance() or self._own.advance()

    def pause(self) -> None:
        self._off.pause()
        self._own.pause()

    def seconds(self) -> tuple[float, float]:
        off, own = self._off.median(), self._own.median()
        if self._own is self._off:
            return off.host_s, 0.0
        return off.host_s, max(0.0, own.host_s - off.host_s) + max(0.0, own.beyond_s)


class Iteration(NamedTuple):
    """Median seconds of iterations.

    Args:
        host_s: in none of the stages that have passes: the host's part, acceptance and commit.
        beyond_s: in the stage that drafts, beyond the passes of drafts; where a step is one graph,
            in all of it beyond all of its passes. 0 of off, whose stage is its pass.
    """

    host_s: float
    beyond_s: float


class Iterations:
    """Iterations of a short sequence, and passes like theirs after each of them.

    Args:
        engine: with nobody else at work during a slice.
        budget_s: seconds of slices after which no further sequence begins.
    """

    def __init__(self, engine: Engine, plan: SpecPlan, budget_s: float) -> None:
        self._engine, self._plan, self._budget_s = engine, plan, budget_s
        self._core = EngineCore(engine, plan.name, shares_prefixes=False)
        self._count = min(SHORT, (engine.max_seq_len - 2) // 2)
        self._params = SamplingParams(max_tokens=self._count, temperature=0.0, ignore_eos=True)
        self._request: Request | None = None
        self._found: list[Iteration] = []
        self._seconds = 0.0
        self._num_rounds, self._num_done = ROUNDS, 0

    @property
    def progress(self) -> tuple[int, int]:
        """Sequences in tokens: how many iterations a step that drafts takes nobody knows."""
        return self._num_done * self._count, self._num_rounds * self._count

    def advance(self) -> bool:
        """Run a slice; False where nothing is left to measure."""
        if self._num_done >= self._num_rounds:
            return False
        begin_s = time.perf_counter()
        if self._request is None:
            self._request = self._core.requests.make([0] * self._count, self._params)
            self._core.scheduler.add(self._request)
            self._core.advance()  # the prompt
        if not self._request.is_finished:
            # one in every slice: who is interrupted after each gets on, too
            self._found.append(self._iterate(self._request))
        self._seconds += time.perf_counter() - begin_s
        if self._request.is_finished:
            self._end()
        return True

    def pause(self) -> None:
        """Drop the sequence, and with it the blocks that it holds."""
        if self._request is not None:
            self._core.scheduler.abort(self._request)
            self._core.in_flight.settle()
            self._end()

    def _end(self) -> None:
        self._request = None
        self._num_done += 1
        if self._seconds > self._budget_s:
            self._num_rounds = self._num_done

    def median(self) -> Iteration:
        if not self._found:
            return Iteration(0.0, 0.0)
        return Iteration(*map(statistics.median, zip(*self._found, strict=True)))

    def _iterate(self, request: Request) -> Iteration:
        stats = self._core.scheduler.stats
        drafted, others = stats.draft_s, stats.verify_s + stats.whole_s
        begin = time.perf_counter()
        self._core.advance()
        whole_s = time.perf_counter() - begin
        draft_s = stats.draft_s - drafted
        inside_s = draft_s + stats.verify_s + stats.whole_s - others
        beyond_s = 0.0
        if self._plan.speculates and not request.is_finished:
            passes_s = _passes_s(self._engine, self._plan, request, with_target=not draft_s)
            beyond_s = (draft_s or inside_s) - passes_s
        return Iteration(max(0.0, whole_s - inside_s), beyond_s)


def _passes_s(engine: Engine, plan: SpecPlan, request: Request, *, with_target: bool) -> float:
    """Seconds of passes like those of a plan's next step, over the same rows."""
    cache = engine.cache
    table = cache.block_table([request.blocks]).to(cache.device)
    widths = [(_model_of(engine, draft), w) for draft, levels in draft_levels(plan) for w in levels]
    if with_target:
        widths.append((engine.target, plan.num_nodes))
    return sum(time_pass(engine, model, table, request.cache_len, w) for model, w in widths)


def _model_of(engine: Engine, draft: Drafter) -> Model:
    """The program of a draft: a model's, or one of the target's."""
    if draft.number is None:
        return engine.self_drafts.get(draft.name, engine.target)
    return engine.drafts[draft.number]
