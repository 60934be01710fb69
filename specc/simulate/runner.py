"""Stands in for the runner: seconds from a latency table, acceptance by dice."""

from __future__ import annotations

from collections.abc import Mapping

from specc.cost.best_tree import likely_tree
from specc.cost.latency_table import LatencyTable, PassPart, StepShape, verify_part
from specc.errors import ConfigError
from specc.runtime.backends.step_io import StepResult
from specc.runtime.scheduling.batch import Batch, RunResult, Span, StepGroup
from specc.runtime.scheduling.request import Request
from specc.simulate.load import Load, uniform
from specc.speculation.live_nodes import captured_rows
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import TokenTree

_NOISE = 99
# how often an iteration is held up, and by which factor
_HELD_UP, _HELD_UP_BY = 0.01, 4.0


class SimulatedRunner:
    """Runs batches in no time.

    Dynamic trees have the shape that is best for the acceptance of the load's first request.

    Args:
        truth: seconds.
        prefill_chunk: tokens of a causal pass at most.
        shares_pass: prompts and steps of all plans go through the target together.
        noise: see `simulate`.
    Raises:
        ConfigError: a plan of several drafts, or of one without acceptance or seconds.
    """

    def __init__(
        self,
        load: Load,
        truth: LatencyTable,
        plans: Mapping[str, SpecPlan],
        prefill_chunk: int,
        shares_pass: bool,
        noise: float = 0.0,
    ) -> None:
        # of the last iteration
        self.last_s = 0.0
        self._load, self._truth = load, truth
        self._chunk, self._shares_pass, self._noise = prefill_chunk, shares_pass, noise
        self._number = 0
        self._children = {
            plan.name: _children(_tree(plan, load, truth))
            for plan in plans.values()
            if plan.speculates
        }

    def run(self, batch: Batch) -> RunResult:
        """What `Runner.run` returns; `last_s` has the seconds."""
        factor = self._factor()
        truth = self._truth
        parts = [_part_of(span) for span in batch.prefill]
        num_prompt_tokens = sum(part.tokens for part in parts)
        prefill_s = 0.0
        for draft, seconds in truth.drafts.items():
            number = int(draft.removeprefix("draft_"))
            mine = [_part_of(span) for span in batch.prefill if number in span.drafts]
            prefill_s += seconds(mine) * factor
        if not self._shares_pass:
            prefill_s += truth.target(parts) * factor
        drafted_s, verified = [], []
        for group in batch.groups:
            lengths = [request.cache_len for request in group.requests]
            shape = StepShape.of(group.plan, lengths, group.num_nodes)
            drafted_s.append((truth.draft_s(shape) + self._catch_up_s(group)) * factor)
            verified.append(_verified(group, shape, self._shares_pass))
        steps_parts = [part for own in verified for part in own]
        pass_s = truth.target([*parts, *steps_parts]) * factor if self._shares_pass else 0.0
        # the parts of a shared pass are told apart by their tokens, as the real runner does
        a_token_s = pass_s / max(1, num_prompt_tokens + sum(part.tokens for part in steps_parts))
        prefill_s += a_token_s * num_prompt_tokens
        steps = []
        for group, draft_s, own in zip(batch.groups, drafted_s, verified, strict=True):
            alone_s = 0.0 if self._shares_pass else truth.target(own) * factor
            verify_s = alone_s + a_token_s * sum(part.tokens for part in own)
            steps.append(self._step(group, {"draft": draft_s, "verify": verify_s}))
        self.last_s = truth.iteration_s * factor + prefill_s
        self.last_s += sum(sum(step.stage_s.values()) for step in steps)
        firsts: list[int | None] = [0 if span.is_last else None for span in batch.prefill]
        return RunResult(firsts, prefill_s, steps, pass_s=pass_s)

    def _factor(self) -> float:
        if not self._noise:
            return 1.0
        self._number += 1
        low, high = (uniform(self._load.seed, _NOISE, self._number, i) for i in range(2))
        return (1 + self._noise * (2 * low - 1)) * (_HELD_UP_BY if high < _HELD_UP else 1.0)

    def _step(self, group: StepGroup, stage_s: dict[str, float]) -> StepResult:
        live = group.live or [group.plan.num_nodes] * len(group.requests)
        accepted = [
            self._accepted(request, group.plan, count)
            for request, count in zip(group.requests, live, strict=True)
        ]
        before = [request.cache_len for request in group.requests]
        after = [rows + count + 1 for rows, count in zip(before, accepted, strict=True)]
        depth = group.plan.max_depth
        # a draft reads the nodes of all levels but the last
        fed = [rows + min(n + 1, depth) for rows, n in zip(before, accepted, strict=True)]
        return StepResult(
            accepted,
            [[0] * (count + 1) for count in accepted],
            after,
            {draft: list(fed) for draft in group.plan.draft_lens},
            stage_s,
        )

    def _accepted(self, request: Request, plan: SpecPlan, live: int) -> int:
        """How deep the walk goes among the first `live` nodes."""
        if not plan.speculates:
            return 0
        children, node, depth = self._children[plan.name], 0, 0
        while children[node]:
            position = request.cache_len + 1 + depth
            rank = self._load.rank(request.index, plan.drafts[0], depth, position)
            if rank is None or rank >= len(children[node]) or children[node][rank] >= live:
                break
            node = children[node][rank]
            depth += 1
        return depth

    def _catch_up_s(self, group: StepGroup) -> float:
        """As `Runner` does: drafts read what their first level does not reach back to."""
        seconds = 0.0
        for number, _ in group.plan.draft_lens.items():
            room, parts = self._chunk, []
            for request in group.requests:
                start = request.draft_lens[number]
                if start >= request.cache_len + 1 - group.plan.catch_up:
                    continue
                while start < request.cache_len:
                    end = min(request.cache_len, start + room)
                    parts.append(PassPart(1, end - start, (start + end) / 2))
                    room -= end - start
                    start = end
                    if not room:
                        seconds += self._truth.drafts[f"draft_{number}"](parts)
                        room, parts = self._chunk, []
            seconds += self._truth.drafts[f"draft_{number}"](parts)
        return seconds


def _verified(group: StepGroup, shape: StepShape, shares_pass: bool) -> list[PassPart]:
    """What a group brings to the target's pass; to one of its own, as a captured step has it."""
    if not group.live:
        return [verify_part(shape)]
    rows = zip(group.requests, group.live, strict=True)
    parts = [PassPart(1, count, request.cache_len) for request, count in rows]
    if not shares_pass:
        num_live = sum(group.live)
        num_rows = captured_rows(group.plan.num_nodes, len(group.requests), num_live)
        # rows of nobody read no committed ones
        parts += [PassPart(1, num_rows - num_live, 0.0)] if num_rows > num_live else []
    return parts


def _part_of(span: Span) -> PassPart:
    """Prompt tokens attend to half of their own span on average, and to all before it."""
    return PassPart(1, span.end - span.start, (span.start + span.end) / 2)


def _tree(plan: SpecPlan, load: Load, truth: LatencyTable) -> TokenTree:
    rows = load.requests[0].drafting.rows
    missing = [draft for draft in plan.drafts if draft not in rows]
    missing += [model for model in plan.model_names if model not in truth.drafts]
    if plan.combine or missing:
        raise ConfigError(
            f"plan {plan.name} of {', '.join(plan.drafts)}"
            + (f", nothing known of {missing[0]}" if missing else ""),
            "a plan of one draft whose acceptance and seconds are given",
            "leave the plan out, or add its draft to the load and to the latency table",
        )
    if plan.dynamic is None:
        return plan.tree_of(plan.drafters[0])
    return likely_tree(plan.dynamic, rows[plan.drafts[0]])


def _children(tree: TokenTree) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in tree.parents]
    for node, parent in enumerate(tree.parents[1:], start=1):
        found[parent].append(node)
    return found
