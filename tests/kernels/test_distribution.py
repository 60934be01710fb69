"""Typed trees put out the target's distribution; sixteen schemes that do not are refused.

Every comparison is of the joint counts of three tokens, over many sequences with seeds of their
own, which several steps have put out. A right implementation fails one with probability 1e-9, and
as all seeds are fixed, it passes them all or it never does. The slow tier compares 200,000
sequences of every case, the default tier 60,000, and of cases that cover all pairs: Pearson's
statistic then finds relative deviations of 7 % (root mean square, weighed by probability) instead
of 4 %. The mildest of the losing schemes deviates by 14 %: 60,000 sequences of it are 14 standard
deviations beyond the bound.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specc.drafters.block import BlockDraft
from specc.kernels.reference import accept as reference_accept
from specc.kernels.reference import sampling as reference_sampling
from specc.kernels.reference import trees as reference_trees
from specc.kernels.reference.commit import next_tokens_reference
from specc.sampling.rows import Rule
from specc.speculation.plans import MERGE, SpecPlan
from specc.speculation.tree import TokenTree
from tests.kernels.distribution import (
    NUM_DRAWS,
    Options,
    Outcome,
    Proposals,
    Propose,
    State,
    World,
    compare,
    joint,
    make_world,
    measure,
    measure_mixed,
    rows_of,
    run,
    sampled_alone,
    write_figures,
)
from tests.kernels.distribution_schemes import SCHEMES
from tests.kernels.distribution_trees import (
    SHAPES,
    Part,
    alone,
    biased_tree,
    block_tree,
    draft_tree,
    lookup_part,
    merge,
    proposing,
)
from tests.tiers import only

WORLD = make_world()
# drafts that like what the target does not: schemes do harm where proposals are rejected
HARD_WORLD = make_world(likeness=-1.0, noise=1.0)
COMBINATIONS = ("one", "two", "one-and-lookup", "voted", "lookup")
TEMPERATURES = (0.3, 1.0, 1.5)
FILTERS = {"top-p": {"top_p": 0.85}, "top-k": {"top_k": 4}}
# trees whose topology is data, and votes, are for rules that hold for any tree
ANY_TREE = (Rule.COUPLED, Rule.DELTA)
# sequences of a case in the default tier
FEW_DRAWS = 60_000
# in the default tier: the simplest one, and those that conditional scores invite
QUICK_SCHEMES = (
    "top-k-with-softmax-q", "candidates-with-q-of-all", "candidates-with-q-of-all-swor",
    "score-with-q-of-the-row", "iterated-with-stale-q", "left-out-by-what-was-drawn",
    "random-input-of-verification",
)  # fmt: skip
# how far beyond its bound a losing scheme has to be, by the number of sequences
MARGINS = {FEW_DRAWS: 1.5, NUM_DRAWS: 3.0}
ORACLES = SimpleNamespace(
    draft_children=reference_accept.draft_children_reference,
    accept=reference_accept.accept_reference,
    merge_trees=reference_sampling.merge_trees_reference,
    rerank_tree=reference_sampling.rerank_tree_reference,
    ancestor_words=reference_sampling.ancestor_words_reference,
    vote_chain=reference_trees.vote_chain_reference,
    lookup=reference_trees.lookup_reference,
    record_tokens=reference_trees.record_tokens_reference,
    next_tokens=next_tokens_reference,
)


@dataclass(frozen=True)
class Case:
    rule: Rule
    shape: str
    combination: str
    temperature: float
    filter: str

    @property
    def is_valid(self) -> bool:
        """Votes and lookups are chains, budgets are of one draft; see `ANY_TREE`."""
        if self.combination in ("voted", "lookup") and self.shape != "chain-3":
            return False
        if self.shape == "budget" and self.combination != "one":
            return False
        needs_any = self.combination == "voted" or self.shape == "dynamic"
        return not needs_any or self.rule in ANY_TREE

    @property
    def name(self) -> str:
        heat = f"T{self.temperature}"
        return "-".join((self.rule.name.lower(), self.shape, self.combination, heat, self.filter))

    def parts(self, size: int) -> frozenset[Any]:
        """Its values, so many at a time."""
        return frozenset(itertools.combinations(asdict(self).items(), size))

    def measure(self, operators: Any, num_draws: int = NUM_DRAWS) -> Outcome:
        options = Options(self.rule, self.temperature, **FILTERS[self.filter])
        tree = proposing(self.combination, self.shape)
        return measure(operators, WORLD, tree, options, seed_of(self.name), num_draws)


def seed_of(name: str) -> int:
    """Of the first sequence of a case; those of two cases do not meet."""
    return zlib.crc32(name.encode()) << 24


def all_cases() -> list[Case]:
    shapes = (*SHAPES, "dynamic", "budget")
    rows = itertools.product(Rule, shapes, COMBINATIONS, TEMPERATURES, FILTERS)
    return [case for row in rows if (case := Case(*row)).is_valid]


def covering(cases: list[Case], size: int) -> list[Case]:
    """Cases that hold every `size` values which any case holds together; greedy."""
    parts = [case.parts(size) for case in cases]
    missing, chosen = set().union(*parts), []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(parts[i] & missing))
        chosen.append(cases[best])
        missing -= parts[best]
    return chosen


CASES = all_cases()
PAIRWISE = covering(CASES, 2)
# and draws of a level that is shared out
FIRST_CASES = [
    *covering(PAIRWISE, 1),
    *(x for x in PAIRWISE if (x.rule, x.shape) == (Rule.MSS, "budget")),
]


def ids(case: Case) -> str:
    return case.name


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """Rows of the product and of the schemes; written where all of them were measured."""
    rows: list[dict[str, Any]] = []
    yield rows
    if len(rows) == len(CASES) + 2 * len(SCHEMES):
        write_figures(request.config.rootpath / "build" / "distribution.json", rows)


def check(outcome: Outcome, least_accepted: float = 0.1, num_draws: int = NUM_DRAWS) -> None:
    assert outcome.is_lossless, outcome
    assert outcome.num_draws == num_draws
    assert outcome.accepted_per_step > least_accepted, "hardly anything was speculated"


@pytest.mark.default(
    "swor-irregular-one-and-lookup-T1.0-top-p",
    "delta-dynamic-one-T1.0-top-p",
    "mss-budget-one-T0.3-top-p",
)
@pytest.mark.parametrize("case", only(FIRST_CASES, PAIRWISE), ids=ids)
def test_pairs_of_properties(operators, case):
    check(case.measure(operators, FEW_DRAWS), num_draws=FEW_DRAWS)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_every_case(operators, figures, case):
    outcome = case.measure(operators)
    figures.append({"case": case.name} | asdict(outcome))
    check(outcome)


few_and_many = pytest.mark.parametrize(
    "num_draws", [FEW_DRAWS, pytest.param(NUM_DRAWS, marks=pytest.mark.slow)]
)


@pytest.mark.default(*(f"{name}-{FEW_DRAWS}" for name in QUICK_SCHEMES))
@few_and_many
@pytest.mark.parametrize("name", SCHEMES)
def test_losing_scheme_is_refused(operators, figures, name, num_draws):
    """And its lossless form is not, by the same statistic."""
    scheme = SCHEMES[name]
    options = Options(scheme.rule, scheme.temperature)
    for is_wrong in (False, True):
        tree = scheme.proposing(is_wrong)
        outcome = measure(operators, HARD_WORLD, tree, options, seed_of(name), num_draws)
        if num_draws == NUM_DRAWS:
            figures.append({"case": name, "is_wrong": is_wrong} | asdict(outcome))
        if is_wrong:
            margin = 1.0 if scheme.is_deep else MARGINS[num_draws]
            assert outcome.total_variation > margin * outcome.variation_bound
            assert outcome.chi_square > MARGINS[num_draws] * outcome.chi_square_bound
        else:
            check(outcome, least_accepted=0.05, num_draws=num_draws)


PENALTIES = {"repetition": 1.4, "presence": 0.5, "frequency": 0.3}


@few_and_many
@pytest.mark.parametrize("rule", only((Rule.MSS,), Rule), ids=lambda rule: rule.name.lower())
def test_penalties(operators, rule, num_draws):
    """Of tokens that the steps before have put out, and of the path's."""
    options = Options(rule, min_p=0.05, **PENALTIES)
    tree = proposing("one-and-lookup", "tree-2-2-1")
    outcome = measure(operators, WORLD, tree, options, seed_of(f"penalties-{rule}"), num_draws)
    check(outcome, num_draws=num_draws)
    for name in PENALTIES:
        without = replace(options, **{name: float(name == "repetition")})
        moved = float((joint(WORLD, without) - joint(WORLD, options)).abs().sum()) / 2
        assert moved > 1.5 * outcome.variation_bound, f"{name} hardly changes anything"


@few_and_many
@pytest.mark.parametrize("shape", [pytest.param("tree-2-2-1", marks=pytest.mark.slow), "irregular"])
@pytest.mark.parametrize("rule", only((Rule.MSS,), Rule), ids=lambda rule: rule.name.lower())
def test_levels_of_a_block(operators, rule, shape, num_draws):
    """All nodes of a depth have the same children, drawn once from what knows no path."""

    def propose(operators: Any, world: World, state: State) -> Proposals:
        part = block_tree(operators, world.drafts[0], SHAPES[shape], state)
        return alone(part, SHAPES[shape].max_depth)

    seed = seed_of(f"block-{rule}-{shape}")
    outcome = measure(operators, WORLD, propose, Options(rule, 1.0, top_p=0.9), seed, num_draws)
    check(outcome, num_draws=num_draws)


def block_and_lookup(shape: TokenTree, longest: int) -> Propose:
    """The tree of a block drafter, merged with a lookup."""

    def propose(operators: Any, world: World, state: State) -> Proposals:
        part = block_tree(operators, world.drafts[0], shape, state)
        return merge(operators, [part, lookup_part(operators, state, longest)], longest)

    return propose


BLOCK_RULES = (Rule.COUPLED, Rule.DELTA, Rule.SWOR)


@few_and_many
@pytest.mark.parametrize(
    "rule", only((Rule.SWOR,), BLOCK_RULES), ids=lambda rule: rule.name.lower()
)
def test_levels_of_a_block_beside_a_lookup(operators, rule, num_draws):
    plan = SpecPlan.from_widths((4, 2, 1), ("draft_0", "lookup-3"), MERGE)
    assert plan.with_drafters({"draft_0": BlockDraft(5, 0)}).rules == BLOCK_RULES
    propose = block_and_lookup(TokenTree.from_widths((4, 2, 1)), 3)
    seed = seed_of(f"block-and-lookup-{rule}")
    outcome = measure(operators, WORLD, propose, Options(rule, 1.0), seed, num_draws)
    check(outcome, num_draws=num_draws)


@pytest.mark.default("delta-beside-a-lookup-60000")
@few_and_many
@pytest.mark.parametrize("merges", only((True,), (False, True)), ids=["alone", "beside-a-lookup"])
@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name.lower())
def test_blocks_whose_logits_depend_on_the_token_before(operators, rule, merges, num_draws):
    """DSpark: children of each node have a row of their own, whatever made it."""
    plan = SpecPlan.from_widths((2, 2, 1), ("draft_0", "lookup-3"), MERGE)
    block = BlockDraft(5, 0, is_biased=True)
    assert plan.with_drafters({"draft_0": block}).rules == tuple(Rule)

    def propose(operators: Any, world: World, state: State) -> Proposals:
        shape = SHAPES["tree-2-2-1"]
        part = biased_tree(operators, world.drafts[0], shape, state)
        if merges:
            return merge(operators, [part, lookup_part(operators, state, 3)], 3)
        return alone(part, 3)

    seed = seed_of(f"dspark-{rule}-{merges}")
    outcome = measure(operators, WORLD, propose, Options(rule, 0.7), seed, num_draws)
    check(outcome, num_draws=num_draws)


@pytest.mark.slow
def test_merged_blocks_need_more_than_draws_with_replacement(operators):
    """Why their plans refuse MSS: equal siblings become one, with the same draws twice after it."""
    options = Options(Rule.MSS, 0.7)
    wrong = block_and_lookup(TokenTree.from_widths((4, 2, 1)), 3)
    outcome = measure(operators, WORLD, wrong, options, 9 << 32, NUM_DRAWS)
    assert outcome.chi_square > 2 * outcome.chi_square_bound, outcome
    # what branches at its last level alone has no draws after equal siblings
    right = block_and_lookup(TokenTree.from_widths((1, 1, 3)), 3)
    outcome = measure(operators, WORLD, right, options, 9 << 32, NUM_DRAWS)
    assert outcome.is_lossless, outcome


# one too flat, and one too sharp, level by level
FACTORS = ((0.5, 2.0, 0.7), (3.0, 1.0, 0.4))


def sharpened(*names: str, is_told: bool = True) -> Propose:
    """Drafts whose logits are multiplied, each by its factors, in one tree."""

    def propose(operators: Any, world: World, state: State) -> Proposals:
        parts: list[Part] = []
        for table, factors, name in zip(world.drafts, FACTORS, names, strict=False):
            column = sum(part.tokens.shape[1] for part in parts)
            row = sum(len(level) // len(state.words) for p in parts for level in p.draft_logits)
            where = (SHAPES[name], state, column, row)
            parts.append(draft_tree(operators, table, *where, factors, is_told))
        depth = max(SHAPES[name].max_depth for name in names)
        return merge(operators, parts, depth) if len(parts) > 1 else alone(parts[0], depth)

    return propose


@pytest.mark.slow
@few_and_many
@pytest.mark.parametrize("rule", only((Rule.SWOR,), Rule), ids=lambda rule: rule.name.lower())
def test_drafts_of_another_sharpness(operators, rule, num_draws):
    """Whatever the factors are, where what verifies is told of them."""
    tree = sharpened("tree-2-2-1", "tree-3-2")
    options = Options(rule, 1.0, top_p=0.9)
    outcome = measure(operators, WORLD, tree, options, seed_of(f"sharp-{rule}"), num_draws)
    check(outcome, num_draws=num_draws)


@pytest.mark.slow
@few_and_many
@pytest.mark.parametrize(
    "rule",
    [Rule.MSS, pytest.param(Rule.SWOR, marks=pytest.mark.slow)],
    ids=lambda rule: rule.name.lower(),
)
def test_sharpness_that_is_not_told_is_refused(operators, rule, num_draws):
    """Children of one distribution, verified as those of another."""
    for is_told in (True, False):
        tree = sharpened("chain-3", is_told=is_told)
        seed = seed_of(f"untold-{rule}")
        outcome = measure(operators, HARD_WORLD, tree, Options(rule, 1.0), seed, num_draws)
        if is_told:
            check(outcome, least_accepted=0.05, num_draws=num_draws)
        else:
            assert outcome.total_variation > MARGINS[num_draws] * outcome.variation_bound
            assert outcome.chi_square > MARGINS[num_draws] * outcome.chi_square_bound


MIXED = (
    Options(Rule.COUPLED, 0.0, top_k=2), Options(Rule.MSS, 0.8, top_p=0.9),
    Options(Rule.DELTA, 1.3, top_k=5), None, Options(Rule.SWOR, 1.0, min_p=0.05),
    Options(Rule.COUPLED, 0.7, **PENALTIES), Options(Rule.MSS, 0.0, **PENALTIES),
    Options(Rule.SWOR, 1.4, top_p=0.8),
)  # fmt: skip


def test_rows_of_every_rule_in_the_same_calls(operators):
    """Greedy ones, penalties, filters and padding among them; 25,000 sequences of each."""
    tree = proposing("two-and-lookup", "tree-2-2-1")
    outcomes = measure_mixed(operators, WORLD, tree, MIXED, seed_of("mixed"))
    assert len(outcomes) == len(MIXED) - 1
    for outcome in outcomes:
        assert outcome.is_lossless, outcome
        assert outcome.num_draws == NUM_DRAWS // len(MIXED)


@pytest.mark.slow
@few_and_many
@pytest.mark.parametrize(
    "rule",
    [pytest.param(Rule.MSS, marks=pytest.mark.slow), Rule.SWOR],
    ids=lambda rule: rule.name.lower(),
)
def test_plans_change_from_step_to_step(operators, rule, num_draws):
    """A column that was deep in one step's tree is shallow in the next one's, at the same place."""
    trees = itertools.cycle(proposing("one", shape) for shape in ("chain-3", "tree-3-2"))
    options = Options(rule, 1.2, top_p=0.9)
    outcome = measure(
        operators,
        WORLD,
        lambda *step: next(trees)(*step),
        options,
        seed_of(f"plans-{rule}"),
        num_draws,
    )
    check(outcome, num_draws=num_draws)


def test_oracles_put_out_the_same_tokens(operators):
    """Sequence by sequence, with rows of every rule."""
    tree = proposing("two-and-lookup", "tree-2-2-1")
    rows = rows_of(MIXED, 160, seed_of("oracles"))
    found, _ = run(operators, WORLD, tree, *rows)
    wanted, _ = run(ORACLES, WORLD, tree, *rows)
    is_live = rows[2] >= 0
    assert torch.equal(found[is_live], wanted[is_live])


@pytest.mark.parametrize(
    "shape_and_combination",
    [("dynamic", "two"), ("irregular", "one-and-lookup"), ("chain-3", "voted")],
    ids="-".join,
)
@pytest.mark.parametrize("rule", ANY_TREE, ids=lambda rule: rule.name.lower())
def test_output_of_a_seed_is_that_without_speculation(operators, rule, shape_and_combination):
    """Token by token: noise depends on seed and position alone."""
    shape, combination = shape_and_combination
    values, words, lens = rows_of([Options(rule, 0.9, top_p=0.9)], 10_000, seed_of("alone"))
    found, accepted = run(operators, WORLD, proposing(combination, shape), values, words, lens)
    wanted, is_near = sampled_alone(WORLD, values, words)
    assert torch.equal(found[~is_near], wanted[~is_near])
    assert int(is_near.sum()) < 10
    assert accepted > 0.5


@pytest.mark.parametrize("shape", ["chain-3", "tree-2-2-1", "irregular"])
@pytest.mark.parametrize("temperature", [0.3, 1.5], ids="T{}".format)
@pytest.mark.parametrize("rule", [Rule.COUPLED, Rule.MSS, Rule.SWOR], ids=lambda r: r.name.lower())
def test_draft_equal_to_its_target_is_accepted(operators, rule, temperature, shape):
    """The first child at every node: both have the same noise there, and P / q is 1."""
    world = replace(WORLD, drafts=(WORLD.target,))
    rows = rows_of([Options(rule, temperature, top_k=5)], 2000, seed_of("equal"))
    _, accepted = run(operators, world, proposing("one", shape), *rows)
    # in these shapes first children lead to the deepest level
    assert accepted == SHAPES[shape].max_depth


def test_a_slightly_other_distribution_is_refused(operators):
    """The statistic's own power: 4 % of the temperature, without speculation."""
    options = Options(Rule.COUPLED, 1.0, top_k=5)

    def nothing(operators: Any, world: Any, state: Any) -> Proposals:
        root = state.last_tokens[:, -1:]
        return Proposals(root, torch.full_like(root, -1, dtype=torch.int32), 0)

    rows = rows_of([options], NUM_DRAWS, seed_of("power"))
    tokens, accepted = run(operators, WORLD, nothing, *rows)
    assert accepted == 0
    assert compare(tokens, joint(WORLD, options), 0.0).is_lossless
    warmer = compare(tokens, joint(WORLD, replace(options, temperature=1.04)), 0.0)
    assert not warmer.is_lossless


def test_pairs_are_covered():
    wanted = set().union(*(case.parts(2) for case in CASES))
    assert set().union(*(case.parts(2) for case in PAIRWISE)) == wanted
    assert len(PAIRWISE) < 40
    assert len({case.name for case in CASES}) == len(CASES)
