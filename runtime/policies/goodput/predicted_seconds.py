"""Seconds of iterations to come: a latency table, corrected by those that went before."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from specc.cost.latency_table import (
    LatencyTable,
    PassPart,
    StepShape,
    verify_part,
    verify_parts,
    with_unused,
)
from specc.runtime.policies.goodput.constants import TUNED
from specc.runtime.policies.goodput.drafter_ends import DrafterEnds
from specc.runtime.policies.goodput.host_seconds import HostSeconds, Kind
from specc.runtime.policies.goodput.latency_correction import LatencyCorrection
from specc.runtime.policies.goodput.prompt_shares import NO_PROMPTS, PromptShare, PromptShares
from specc.speculation.live_nodes import captured_rows, expected_rows
from specc.speculation.plans import SpecPlan

if TYPE_CHECKING:
    from specc.runtime.backends.step_io import StepResult
    from specc.runtime.scheduling.batch import Batch, RunResult, StepGroup

_TARGET = "target"
# passes without dead nodes
_CUT = "cut target"
# numbers of tokens that are known at a time
_MOST_SIZES = 4096


class PredictedSeconds:
    """Seconds by groups, learned while steps run.

    Prompts in the target's pass take the room that reading its weights would leave for nodes: the
    seconds of decoding are those of its pass alone, and what it adds to a pass of prompts, each as
    often as it happens, see `PromptShares`.

    Where stages are timed apart, target and drafts are corrected each by its own ratio, by tokens
    and by requests; where a step runs as a whole, every plan is, by requests, and apart where it
    verifies parts of trees.

    Args:
        shares_pass: groups are verified in one pass of the target; else each in its own.
        graph_sizes: sequences of captured steps, ascending: a batch takes the smallest that holds
            it, with rows of nobody; () are steps of as many as there are.
        ends: of the plans whose drafters end trees; None: no drafter does.
    """

    def __init__(
        self,
        table: LatencyTable,
        shares_pass: bool,
        graph_sizes: Sequence[int] = (),
        ends: DrafterEnds | None = None,
    ) -> None:
        self.table = table
        self.shares_pass = shares_pass
        self._graph_sizes = graph_sizes
        self._ends = ends or DrafterEnds([])
        self.host_s = HostSeconds(table.iteration_s)
        # of stages that are timed apart; plan, and whether its trees are cut → of its whole steps
        self._ratios: dict[str, LatencyCorrection] = {}
        self._wholes: dict[tuple[str, bool], LatencyCorrection] = {}
        # tokens → seconds of a pass by the table, and their ratio, until that changes
        self._sizes: dict[tuple[float, bool], tuple[float, float]] = {}
        self._prompts = PromptShares()

    def iteration(self, shapes: Sequence[StepShape], prompts: PromptShare | None = None) -> float:
        """Seconds that these groups take in an iteration, those of prompts not counted.

        Args:
            prompts: that come along; None is as lately.
        """
        shapes = [self._with_nodes(shape) for shape in shapes]
        in_parts = [shape for shape in shapes if not self.is_whole(shape.plan)]
        is_cut = any(self.is_cut(shape.plan) for shape in in_parts)
        is_together = self.shares_pass and (is_cut or len(in_parts) > 1)
        kind = Kind.of(any(shape.plan.speculates for shape in shapes), is_together)
        seconds = self.host_s(kind) + sum(map(self.alone, shapes))
        if self.shares_pass:
            parts = [verify_part(shape) for shape in in_parts]
            return seconds + self.passed(parts, seconds, prompts, is_cut)
        return seconds + sum(self.passed(verify_parts(shape)) for shape in in_parts)

    def nodes_of(self, plan: SpecPlan) -> float:
        """Tokens of each sequence in the target's pass: fewer where drafters end their trees."""
        return self._ends.nodes(plan)[-1]

    def graph_size(self, rows: float) -> float:
        """Sequences that a pass of so many has: more where it is a graph of fixed sizes."""
        place = bisect_left(self._graph_sizes, rows)
        return self._graph_sizes[place] if place < len(self._graph_sizes) else rows

    def pass_tokens(self, plan: SpecPlan, rows: float) -> float:
        """Tokens of the target's pass over so many sequences, those of nobody included.

        Fewer where drafters end their trees: as many as are expected, or, of a captured step, the
        rows of the graph that holds these.
        """
        nodes = self.nodes_of(plan) * rows
        if self.shares_pass:
            return nodes
        size = self._sequences(rows)
        if not self.is_cut(plan):
            return plan.num_nodes * size
        return expected_rows(plan.num_nodes, math.ceil(size), nodes)

    def is_cut(self, plan: SpecPlan) -> bool:
        """Its drafter ends trees, so that passes have no dead nodes in them."""
        return self._ends.ends(plan)

    def _with_nodes(self, shape: StepShape) -> StepShape:
        if shape.nodes is not None:
            return shape
        nodes = self.nodes_of(shape.plan) * shape.rows
        unused = self.pass_tokens(shape.plan, shape.rows) - nodes
        return shape._replace(nodes=nodes, size=self._sequences(shape.rows), unused=unused)

    def _sequences(self, rows: float) -> float:
        """That passes over so many have, nobody's included."""
        return rows if self.shares_pass else self.graph_size(rows)

    def is_whole(self, plan: SpecPlan) -> bool:
        """Steps of this plan are timed as a whole, its pass of the target included."""
        return self.ratio_of_whole(plan) is not None

    def alone(self, shape: StepShape) -> float:
        """Seconds of a group by itself: of its drafts, or of all where it is timed as a whole."""
        drafting_s = self.table.draft_s(shape)
        return self.group(shape.plan, drafting_s, verify_part(shape), shape.unused)

    def group(
        self, plan: SpecPlan, drafting_s: float, part: PassPart, unused: float = 0.0
    ) -> float:
        """The same of a group whose seconds of drafting are known, by the table.

        Args:
            drafting_s: seconds.
            part: what it brings to the target's pass.
            unused: tokens of nobody in that pass.
        """
        whole = self.ratio_of_whole(plan)
        if whole is not None:
            target_s = self.table.target(with_unused(part, unused))
            return (drafting_s + target_s) * whole(part.rows)
        return drafting_s * self.drafting(plan, part.rows)

    def drafting(self, plan: SpecPlan, rows: float) -> float:
        """How many times as long as by the table drafts of so many sequences take."""
        return self._ratio(_draft_key(plan), rows)

    def passed(
        self,
        parts: Sequence[PassPart],
        besides: float = 0.0,
        prompts: PromptShare | None = None,
        is_cut: bool = False,
    ) -> float:
        """Seconds by which groups make one pass of the target longer.

        Args:
            besides: seconds of the iteration besides this pass.
            prompts: see `iteration`.
            is_cut: see `pass_s`.
        """
        if not parts:
            return 0.0
        row_s = self.table.target.row_s
        rows_s = sum(part.context * row_s(part.tokens / part.rows) for part in parts)
        return self.pass_s(sum(part.tokens for part in parts), rows_s, besides, prompts, is_cut)

    def catch_up_at_once(self, plan: SpecPlan, tokens: Mapping[int, int], context: float) -> float:
        """Seconds of a pass in which drafts read what requests have missed.

        Args:
            plan: whose first level does not reach back to it.
            tokens: draft → that it has to read.
            context: rows that each of these tokens attends to.
        """
        return sum(
            self._read_s(plan, draft, count, context) for draft, count in tokens.items() if count
        )

    def draft_token_s(self, plan: SpecPlan, context: float) -> float:
        """Seconds in which a plan's drafts read a token after such a context, in a long pass."""
        drafts = plan.draft_lens
        return (
            sum(self._read_s(plan, draft, TUNED.chunk, context) for draft in drafts) / TUNED.chunk
        )

    def target_token_s(self, context: float) -> float:
        """Seconds by which a token after such a context makes a pass of the target longer."""
        more = [
            self.table.target((PassPart(1, n, context),))
            for n in (TUNED.long_pass, TUNED.longer_pass)
        ]
        return (
            (more[1] - more[0])
            / (TUNED.longer_pass - TUNED.long_pass)
            * self._ratio(_TARGET, TUNED.long_pass)
        )

    def _read_s(self, plan: SpecPlan, draft: int, tokens: int, context: float) -> float:
        part = PassPart(1, tokens, context)
        seconds = self.table.drafts[f"draft_{draft}"]((part,))
        return seconds * self._ratio(_draft_key(plan), tokens)

    def observe(self, batch: Batch, result: RunResult, lagging: Collection[str] = ()) -> None:
        """Compare an iteration's seconds with the table's.

        Args:
            lagging: plans whose drafts had to catch up: their seconds say nothing about levels.
        """
        shapes = self._shapes(batch, result)
        parts: list[PassPart] = []
        accept_s = sum(step.stage_s.get("accept_commit", 0.0) for step in result.steps)
        for group, shape, step in zip(batch.groups, shapes, result.steps, strict=True):
            stages = step.stage_s
            part = verify_part(shape)
            # steps that vote are few: medians leave them out
            drafting = self.table.draft_s(shape, with_votes=False)
            is_behind = shape.plan.name in lagging
            if "step" in stages:
                if is_behind:
                    continue
                whole_key = shape.plan.name, bool(group.live)
                whole = self._wholes.setdefault(whole_key, LatencyCorrection())
                predicted = drafting + self.table.target(verify_parts(shape))
                whole.observe(shape.rows, predicted, stages["step"])
                continue
            if not is_behind:
                drafted = stages.get("draft", 0.0)
                self._observe(_draft_key(shape.plan), shape.rows, drafting, drafted)
            parts.append(part)
            if "verify" in stages and not result.pass_s:
                seconds = stages["verify"] + stages.get("accept_commit", 0.0)
                self._observe(_TARGET, part.tokens, self.table.target((part,)), seconds)
        if result.wall_s and not batch.prefill:
            is_together = len(batch.groups) > 1 or any(group.live for group in batch.groups)
            drafts = any(group.plan.speculates for group in batch.groups)
            kind = Kind.of(drafts, self.shares_pass and is_together)
            timed_s = sum(sum(step.stage_s.values()) for step in result.steps)
            self.host_s.observe(kind, result.wall_s - timed_s)
        if result.pass_s and parts:
            parts += [
                PassPart(1, span.end - span.start, (span.start + span.end) / 2)
                for span in batch.prefill
            ]
            tokens = sum(part.tokens for part in parts)
            is_cut = any(group.live for group in batch.groups)
            self._observe(
                _CUT if is_cut else _TARGET,
                tokens,
                self.table.target(parts),
                result.pass_s + accept_s,
            )

    def observe_prompts(self, batch: Batch, result: RunResult, is_due: bool) -> None:
        """Count an iteration that has steps; every one, since shares are what is asked for.

        Args:
            result: after its commit.
            is_due: its seconds are to be predicted, too.
        """
        if not self.shares_pass:
            return
        alone_s = self.iteration(self._shapes(batch, result), NO_PROMPTS) if is_due else None
        self._prompts.observe(sum(span.end - span.start for span in batch.prefill), alone_s)

    def pass_s(
        self,
        tokens: float,
        rows_s: float,
        besides: float = 0.0,
        prompts: PromptShare | None = None,
        is_cut: bool = False,
    ) -> float:
        """Seconds by which groups make one pass of the target longer, by what they add up to.

        Args:
            tokens: of the groups, above 0.
            rows_s: seconds of their committed rows, by the table.
            besides: seconds of the iteration besides this pass.
            prompts: see `iteration`.
            is_cut: it has no dead nodes in it; such passes are timed apart.
        """
        tokens_s, ratio = self._sized(tokens, is_cut)
        alone = (tokens_s + rows_s) * ratio
        if not self.shares_pass:
            return alone
        prompts = self._prompts.beside(besides + alone) if prompts is None else prompts
        if not prompts.share:
            return alone
        more_s, ratio = self._sized(tokens + prompts.tokens, is_cut)
        added = (more_s + rows_s - self.table.target.tokens_s(prompts.tokens)) * ratio
        return (1 - prompts.share) * alone + prompts.share * added

    def _sized(self, tokens: float, is_cut: bool) -> tuple[float, float]:
        """Seconds of a target's pass over so many tokens by the table, and their ratio."""
        found = self._sizes.get((tokens, is_cut))
        if found is None:
            if len(self._sizes) >= _MOST_SIZES:
                self._sizes.clear()
            key = _CUT if is_cut else _TARGET
            found = self.table.target.tokens_s(tokens), self._ratio(key, tokens)
            self._sizes[tokens, is_cut] = found
        return found

    def _observe(self, key: str, size: float, predicted: float, measured: float) -> None:
        self._ratios.setdefault(key, LatencyCorrection()).observe(size, predicted, measured)
        self._sizes.clear()

    def _ratio(self, key: str, size: float) -> float:
        """Of what was never measured: that of the target, which tells how fast the machine is."""
        ratio = self._ratios.get(key) or self._ratios.get(_TARGET)
        return ratio(size) if ratio else 1.0

    def ratio_of_whole(self, plan: SpecPlan, is_cut: bool = False) -> LatencyCorrection | None:
        """The ratio of a plan's steps that are timed as wholes; None: no step is.

        Of one that never ran, that of another plan.

        Args:
            is_cut: they verify parts of trees, as where drafters end them; where none did, as those
                of whole ones.
        """
        known = self._wholes
        if not known:
            return None
        is_cut = is_cut or self.is_cut(plan)
        found = known.get((plan.name, is_cut))
        if is_cut and found is not None and found.num_observed < TUNED.cut_steps:
            # the first ones may have captured their graphs, which take a hundred steps' time
            found = None
        return found or known.get((plan.name, False)) or next(iter(known.values()))

    def _shapes(self, batch: Batch, result: RunResult) -> list[StepShape]:
        return [
            self._shape(group, _contexts_of(step))
            for group, step in zip(batch.groups, result.steps, strict=True)
        ]

    def _shape(self, group: StepGroup, contexts: Sequence[int]) -> StepShape:
        shape = StepShape.of(group.plan, contexts, group.num_nodes)
        if self.shares_pass:
            return shape
        size, nodes = self.graph_size(len(group.requests)), group.plan.num_nodes
        tokens = captured_rows(nodes, int(size), group.num_nodes) if group.live else size * nodes
        return shape._replace(size=size, unused=tokens - group.num_nodes)


def _contexts_of(step: StepResult) -> list[int]:
    """Committed rows of each request before the step."""
    return [
        after - accepted - 1
        for after, accepted in zip(step.next_cache_len, step.num_accepted, strict=True)
    ]


def _draft_key(plan: SpecPlan) -> str:
    return "draft " + "+".join(plan.drafts)
