"""Which static tree gives the most tokens a second on this machine, and whether any beats off.

Sequoia searches the optimal trees of every size and depth for the best ratio of expected tokens
to the measured seconds of the step (arXiv:2402.12374 §3.3); here the seconds of a level also
depend on its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specc.cost.acceptance import Rows, check_acceptance, expected_tokens, is_falling
from specc.cost.best_tree import check_size, to_tree
from specc.cost.best_tree_dp import TreeTables
from specc.cost.best_tree_heap import GrownNode, grow_best_first
from specc.cost.step_seconds import StepSeconds
from specc.speculation.tree import TokenTree


@dataclass(frozen=True)
class PlanFigures:
    """What a plan is expected to do; figures are those of one sequence of the measured batch.

    Args:
        tree: of the plan; the root alone is off.
        expected_tokens: a step, bonus token included.
        seconds: a step.
        off_seconds: a step without speculation.
    """

    tree: TokenTree
    expected_tokens: float
    seconds: float
    off_seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.expected_tokens / self.seconds

    @property
    def break_even_length(self) -> float:
        """Mean acceptance length (bonus included) at which the plan is as fast as off."""
        return self.seconds / self.off_seconds

    @property
    def speedup(self) -> float:
        """Tokens a second over those of off."""
        return self.expected_tokens / self.break_even_length


@dataclass(frozen=True)
class PlanChoice:
    """The outcome of `best_plan`.

    Args:
        speculative: the best plan that drafts; None where no node is worth anything.
        off: plain decoding.
    """

    speculative: PlanFigures | None
    off: PlanFigures

    @property
    def best(self) -> PlanFigures:
        """The faster of the two; off where they are equal."""
        if self.speculative is None or self.speculative.tokens_per_s <= self.off.tokens_per_s:
            return self.off
        return self.speculative


def best_plan(
    acceptance: Sequence[Sequence[float]],
    step_seconds: StepSeconds,
    max_nodes: int,
    max_depth: int,
) -> PlanChoice:
    """Choose among the optimal trees of all sizes up to `max_nodes` and depths up to `max_depth`.

    Args:
        acceptance: by depth and sibling rank; see specc/cost/acceptance.py.
        max_nodes: root included.
        max_depth: levels that are drafted at most.
    Raises:
        ConfigError: acceptance that is no table of probabilities.
        TreeError: fewer than 1 or more than 1024 nodes, or a negative depth.
    """
    rows = check_acceptance(acceptance)
    check_size(max_nodes, max_depth)
    off = PlanFigures(TokenTree.chain(0), 1.0, step_seconds.off, step_seconds.off)
    depths = range(1, min(max_depth, max_nodes - 1) + 1)
    search = _search_grown if is_falling(rows) else _search_tables
    tree = search(rows, step_seconds, max_nodes, depths)
    if tree is None:
        return PlanChoice(None, off)
    figures = PlanFigures(
        tree, expected_tokens(tree, rows), step_seconds.of(tree), step_seconds.off
    )
    return PlanChoice(figures, off)


def _search_grown(
    rows: Rows, step_seconds: StepSeconds, max_nodes: int, depths: range
) -> TokenTree | None:
    """Every prefix of a growth is the optimal tree of its size."""
    best_rate, best = 0.0, None
    for depth in depths:
        grown = grow_best_first(rows, max_nodes, depth)
        for count, rate in _rates(grown, step_seconds):
            if rate > best_rate:
                best_rate, best = rate, [node.parent for node in grown[:count]]
    return None if best is None else to_tree(best)


def _rates(grown: list[GrownNode], step_seconds: StepSeconds) -> Iterator[tuple[int, float]]:
    """Size and tokens a second of the trees of 2, 3, … nodes."""
    tokens = grown[0].probability
    fed: list[int] = []
    draft_seconds = 0.0
    for count, node in enumerate(grown[1:], start=2):
        tokens += node.probability
        if node.rank == 0:  # the parent's first child: from now on it is fed to the draft
            level = node.depth - 1
            if level == len(fed):
                fed.append(0)
            else:
                draft_seconds -= step_seconds.level(level, fed[level])
            fed[level] += 1
            draft_seconds += step_seconds.level(level, fed[level])
        yield count, tokens / (step_seconds.verify(count) + step_seconds.overhead + draft_seconds)


def _search_tables(
    rows: Rows, step_seconds: StepSeconds, max_nodes: int, depths: range
) -> TokenTree | None:
    """Build trees in the order of what they could reach, until none can beat the best one."""
    tables = TreeTables(rows, max_nodes)
    bounds: list[tuple[float, int, int]] = []
    for depth in depths:
        expected, shallower = tables.expected(depth), tables.expected(depth - 1)
        for count in range(2, max_nodes + 1):
            # else a smaller or a shallower tree does the same
            if expected[count] > max(expected[count - 1], shallower[count]):
                least = step_seconds.verify(count) + step_seconds.overhead
                least += sum(step_seconds.level(level, 1) for level in range(depth))
                bounds.append((float(expected[count]) / least, depth, count))
    best_rate, best = 0.0, None
    for bound, depth, count in sorted(bounds, key=lambda entry: (-entry[0], *entry[1:])):
        if bound <= best_rate:
            break
        tree = to_tree(tables.parents(count, depth))
        rate = expected_tokens(tree, rows) / step_seconds.of(tree)
        if rate > best_rate:
            best_rate, best = rate, tree
    return best
