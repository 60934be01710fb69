"""What an iteration costs: passes of target and drafts by tokens and by context.

A pass reads its weights once and works on every token; of each sequence it reads the committed
rows once, and compares each of the sequence's tokens with them. So its seconds are

    tokens(all tokens) + Σ over parts  committed rows x context(tokens a sequence)

where both functions come from measured points. A plan's iteration is its draft levels, one pass of
the target, and fixed costs. A self-draft's pass is one of the target that reads at most the
view's rows of each sequence, Σ min(rows of the sequence, rows of the view).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specc.cost.contexts import Contexts
from specc.cost.draft_levels import draft_levels
from specc.cost.measured_seconds import MeasuredSeconds
from specc.drafters.drafter import Drafter
from specc.drafters.views import View, rows_between_votes
from specc.errors import EngineError
from specc.speculation.plans import SpecPlan

SCHEMA_VERSION = 1
_DO = "measure the table again"


class PassPart(NamedTuple):
    """Sequences that bring equally many tokens to a pass.

    Args:
        rows: sequences, above 0; on average, so they need not be whole.
        tokens: of all of them together.
        context: committed rows of all of them together.
    """

    rows: float
    tokens: float
    context: float


class PassPoint(NamedTuple):
    """One measurement of a pass over equal sequences.

    Args:
        rows: sequences.
        tokens: of all of them together.
        context: committed rows of all of them together.
        seconds: of the pass.
    """

    rows: int
    tokens: int
    context: int
    seconds: float


class PassSeconds:
    """Seconds of one model's pass.

    Args:
        tokens: tokens of a pass → its seconds without context.
        context: tokens a sequence → seconds of each committed row.
        what: model, for errors.
    Raises:
        ConfigError: no point, or seconds that are negative or no number.
    """

    def __init__(
        self, tokens: Mapping[int, float], context: Mapping[int, float], what: str
    ) -> None:
        self._points = dict(sorted(tokens.items())), dict(sorted(context.items()))
        self._tokens = MeasuredSeconds(tokens, f"a pass of {what}")
        self._context = MeasuredSeconds(context, f"a row of {what}'s context")

    def __call__(self, parts: Iterable[PassPart]) -> float:
        """Seconds of one pass over all parts; none of them takes none."""
        tokens = seconds = 0.0
        for part in parts:
            tokens += part.tokens
            seconds += part.context * self._context(part.tokens / part.rows)
        return seconds + self._tokens(tokens) if tokens else 0.0

    def tokens_s(self, tokens: float) -> float:
        """Seconds of a pass over so many tokens, without committed rows; none takes none."""
        return self._tokens(tokens) if tokens else 0.0

    def row_s(self, tokens: float) -> float:
        """Seconds of each committed row of a sequence that brings so many tokens."""
        return self._context(tokens)

    @classmethod
    def from_points(cls, points: Sequence[PassPoint], what: str) -> PassSeconds:
        """Fit measured points.

        Where the same pass was measured after several contexts, the slope between the shortest
        and the longest one is what a row costs; of several such slopes at one number of tokens a
        sequence, the median counts. What remains of the point of the shortest context is the cost
        of its tokens.

        Raises:
            ConfigError: no point.
        """
        alike: dict[tuple[int, int], list[PassPoint]] = {}
        for point in points:
            alike.setdefault((point.rows, point.tokens), []).append(point)
        slopes: dict[int, list[float]] = {}
        for (rows, tokens), same in alike.items():
            short, long = min(same, key=_context_of), max(same, key=_context_of)
            if long.context > short.context:
                slope = (long.seconds - short.seconds) / (long.context - short.context)
                slopes.setdefault(max(1, round(tokens / rows)), []).append(max(0.0, slope))
        context = {width: statistics.median(values) for width, values in slopes.items()}
        # one context alone says nothing about the cost of a row
        per_row = MeasuredSeconds(context or {1: 0.0}, "a row of context")
        rest: dict[int, list[float]] = {}
        # after a long context, what remains is a small difference of large seconds
        for point in (min(same, key=_context_of) for same in alike.values()):
            alone = point.seconds - point.context * per_row(point.tokens / point.rows)
            rest.setdefault(point.tokens, []).append(max(0.0, alone))
        fixed = {tokens: statistics.median(values) for tokens, values in rest.items()}
        return cls(fixed, context or {1: 0.0}, what)

    def scaled(self, factor: float, context_factor: float | None = None) -> PassSeconds:
        """The same passes, each this many times as long.

        Args:
            factor: of all seconds.
            context_factor: of those of committed rows, where it is another one.
        """
        factors = factor, factor if context_factor is None else context_factor
        tokens, context = (
            {size: by * seconds for size, seconds in points.items()}
            for by, points in zip(factors, self._points, strict=True)
        )
        return PassSeconds(tokens, context, "a model")

    def to_json(self) -> dict[str, Any]:
        names = ("seconds_by_tokens", "seconds_of_row_by_tokens_a_sequence")
        return {
            name: {str(size): seconds for size, seconds in points.items()}
            for name, points in zip(names, self._points, strict=True)
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], what: str) -> PassSeconds:
        names = ("seconds_by_tokens", "seconds_of_row_by_tokens_a_sequence")
        tokens, context = (
            {int(size): float(seconds) for size, seconds in data[name].items()} for name in names
        )
        return cls(tokens, context, what)


class StepShape(NamedTuple):
    """Sequences that run one plan.

    Args:
        rows: sequences, above 0; on average, so they need not be whole.
        context: committed rows of all of them together.
        each: those of each sequence, or a sample of them; None is equally many.
        nodes: of all of them together that the target verifies; None is all nodes of the plan.
        size: sequences that passes have, those of nobody included; None is `rows`.
        unused: tokens of the target's pass that belong to nobody; no committed row is read for
            them.
    """

    plan: SpecPlan
    rows: float
    context: float
    each: Contexts | None = None
    nodes: float | None = None
    size: float | None = None
    unused: float = 0.0

    @classmethod
    def of(cls, plan: SpecPlan, lengths: Sequence[float], nodes: float | None = None) -> StepShape:
        """Sequences of these committed rows, one or more, and no others."""
        return cls(plan, len(lengths), sum(lengths), Contexts(lengths), nodes)


@dataclass(frozen=True)
class LatencyTable:
    """Seconds of an engine's passes on one machine.

    Args:
        drafts: `draft_0`, … → of theirs.
        iteration_s: fixed seconds of every iteration.
        step_s: of every group that drafts, besides its passes.
        about: how it was made, for readers.
        votes: what a pass of the target takes longer when its tokens vote on blocks; None where no
            draft chooses any, or nobody has measured it.
    """

    target: PassSeconds
    drafts: Mapping[str, PassSeconds] = field(default_factory=dict)
    iteration_s: float = 0.0
    step_s: float = 0.0
    about: Mapping[str, Any] = field(default_factory=dict)
    votes: PassSeconds | None = None

    def draft_s(self, shape: StepShape, with_votes: bool = True) -> float:
        """Seconds in which a group's drafts propose, and the target votes on what they see.

        Args:
            with_votes: on average over steps; else none of these seconds, which are in the stage
                that verifies.
        """
        if not shape.plan.speculates:
            return 0.0
        seconds = self.step_s
        if with_votes:
            depth, part = shape.plan.max_depth, verify_part(shape)
            seconds += self.vote_s(shape.plan.views, depth, part)
        num_unused = 0.0 if shape.size is None else shape.size - shape.rows
        for draft, levels in draft_levels(shape.plan):
            for width in levels:
                part = PassPart(shape.rows, shape.rows * width, shape.context)
                seconds += self.level_s(draft, part, shape.each, num_unused * width)
        return seconds

    def vote_s(self, views: Sequence[View], depth: int, part: PassPart) -> float:
        """Mean seconds of a step in which its nodes vote on blocks.

        They do so as often as a step that accepts everything comes by as many rows as are between
        two votes: that is the most it can take.

        Args:
            views: that drafts of the step see.
            depth: draft tokens that it accepts at most.
            part: what it brings to the target's pass.
        """
        if self.votes is None or not any(view.chosen for view in views):
            return 0.0
        return vote_share(views, depth) * self.votes((part,))

    def level_s(
        self, draft: Drafter, part: PassPart, each: Contexts | None = None, unused: float = 0.0
    ) -> float:
        """Seconds of a pass of a draft: of a model, or of the target over as much as it sees.

        A second program of the target counts as it was measured; without that, as the target.

        Args:
            part: sequences, with all of their committed rows.
            each: those of each sequence; None is equally many.
            unused: tokens of nobody in the same pass.
        """
        if (view := draft.view) is not None:
            most = part.rows * view.num_rows
            read = min(part.context, most) if each is None else part.rows * each.read(view.num_rows)
            part = part._replace(context=read)
        return self.pass_s(draft)(with_unused(part, unused))

    def pass_s(self, draft: Drafter) -> PassSeconds:
        if draft.facts.is_self:
            return self.drafts.get(draft.name, self.target)
        return self.drafts[draft.name]

    def draft_rows(self, plan: SpecPlan) -> tuple[tuple[float, float], ...]:
        """What a sequence's committed rows add to the seconds of its drafts.

        Returns:
            rows that are read at most, and seconds of each of them, for every such number.
        """
        found: dict[float, float] = {}
        if self.votes is not None and any(view.chosen for view in plan.views):
            share = vote_share(plan.views, plan.max_depth)
            found[math.inf] = share * self.votes.row_s(plan.num_nodes)
        for draft, levels in draft_levels(plan):
            most = math.inf if draft.view is None else draft.view.num_rows
            found[most] = found.get(most, 0.0) + sum(map(self.pass_s(draft).row_s, levels))
        return tuple(found.items())

    def target_s(self, shapes: Iterable[StepShape]) -> float:
        """Seconds of one pass that verifies all groups."""
        return self.target(part for shape in shapes for part in verify_parts(shape))

    def iteration(self, shapes: Sequence[StepShape], shares_pass: bool = True) -> float:
        """Seconds of an iteration without prefill.

        Args:
            shares_pass: all are verified in one pass of the target; else each in its own.
        """
        if not shapes:
            return 0.0
        drafting = sum(map(self.draft_s, shapes))
        if shares_pass:
            return self.iteration_s + drafting + self.target_s(shapes)
        return self.iteration_s + drafting + sum(self.target_s([shape]) for shape in shapes)

    def scaled(self, target: float = 1.0, drafts: float = 1.0) -> LatencyTable:
        """The same machine with passes this many times as long."""
        return LatencyTable(
            self.target.scaled(target),
            {name: seconds.scaled(drafts) for name, seconds in self.drafts.items()},
            self.iteration_s,
            self.step_s,
            {**self.about, "scaled": {"target": target, "drafts": drafts}},
            self.votes.scaled(target) if self.votes else None,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "target": self.target.to_json(),
            "drafts": {name: seconds.to_json() for name, seconds in self.drafts.items()},
            "iteration_s": self.iteration_s,
            "step_s": self.step_s,
            "about": dict(self.about),
            **({"votes": self.votes.to_json()} if self.votes else {}),
        }

    @classmethod
    def from_json(cls, data: Any) -> LatencyTable:
        """Read what `to_json` wrote.

        Raises:
            EngineError: of another schema, or malformed.
            ConfigError: no point, or seconds that are negative or no number.
        """
        version = data.get("schema_version") if isinstance(data, Mapping) else None
        if version != SCHEMA_VERSION:
            raise EngineError(
                f"a latency table of schema {version}", f"schema {SCHEMA_VERSION}", _DO
            )
        try:
            return cls(
                PassSeconds.from_json(data["target"], "target"),
                {name: PassSeconds.from_json(one, name) for name, one in data["drafts"].items()},
                float(data["iteration_s"]),
                float(data["step_s"]),
                dict(data["about"]),
                PassSeconds.from_json(data["votes"], "votes") if "votes" in data else None,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"a latency table without {error}", "target, drafts, iteration_s, step_s", _DO
            ) from error

    @classmethod
    def neutral(cls, drafts: Iterable[str], draft_share: float = 0.1) -> LatencyTable:
        """A guess where nothing is measured: only ratios of its seconds mean anything.

        A pass of the target takes 10 ms, and twice that with 64 tokens; a row of context 0.2 µs.

        Args:
            draft_share: of a draft's pass in that of the target.
        """
        target = PassSeconds({1: 0.01, 64: 0.02, 1024: 0.2}, {1: 2e-7, 64: 2e-6}, "target")
        about = {"source": "neutral guess", "draft_share": draft_share}
        return cls(target, {name: target.scaled(draft_share) for name in drafts}, about=about)


def vote_share(views: Sequence[View], depth: int) -> float:
    """Of steps that accept so many draft tokens each, how many vote; see `LatencyTable.vote_s`."""
    return min(1.0, (depth + 1) / rows_between_votes(views))


def verify_part(shape: StepShape) -> PassPart:
    """What the sequences of a group bring to the target's pass."""
    nodes = shape.rows * shape.plan.num_nodes if shape.nodes is None else shape.nodes
    return PassPart(shape.rows, nodes, shape.context)


def verify_parts(shape: StepShape) -> tuple[PassPart, ...]:
    """The same, and tokens of nobody, where there are such."""
    return with_unused(verify_part(shape), shape.unused)


def with_unused(part: PassPart, unused: float) -> tuple[PassPart, ...]:
    """A part of a pass, and so many tokens of nobody, which read no committed row."""
    return (part, PassPart(1, unused, 0.0)) if unused else (part,)


def _context_of(point: PassPoint) -> int:
    return point.context
