"""What a draft stage must propose, in plain Python: one sequence, one node after the other.

Only the choice of a node's children from its logits is left to the oracle of that operator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specc.drafters.registry import drafter_of
from specc.kernels.reference.accept import draft_children_reference
from specc.sampling.rows import MIN_TEMPERATURE, Rule, Value
from specc.speculation.dynamic_tree import BudgetTree
from specc.speculation.plans import VOTE, SpecPlan
from specc.speculation.sharpness import factor_of
from tests.passes.step.reading_models import logits_of


@dataclass(frozen=True)
class Request:
    """A sequence of a batch.

    Args:
        text: tokens so far; the last one is the root.
        values: row of `sampling_values`.
        words: row of `sampling_words`.
        proposals: of the host's index.
        weights: of the votes.
    """

    text: tuple[int, ...]
    values: tuple[float, ...]
    words: tuple[int, ...]
    proposals: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    @property
    def options(self) -> tuple[Tensor, Tensor]:
        return torch.tensor([self.values]), torch.tensor([self.words])


@dataclass
class Grown:
    """What one draft proposes, or all of them.

    Args:
        paths: of each node, the tokens from the root's child on; None where it is dead.
        parents: -1 at the root and at dead nodes.
        slots: row of each node after the committed ones, -1 for none.
        passes: after the first, (slot, path) of each node that is fed.
        q: of each node, the text whose logits it was drawn from; None for none.
        num_ties: choices among equals that decided what is in the tree.
    """

    paths: list[tuple[int, ...] | None]
    parents: list[int]
    slots: list[int] = field(default_factory=list)
    passes: list[list[tuple[int, tuple[int, ...]]]] = field(default_factory=list)
    q: list[tuple[int, ...] | None] = field(default_factory=list)
    num_ties: int = 0

    @property
    def tokens(self) -> list[int | None]:
        """None at the root and at dead nodes."""
        return [path[-1] if path else None for path in self.paths]


@dataclass
class Proposed:
    """The tree that is verified, and where it came from.

    Args:
        tree: nodes in their order.
        image: node of each proposal, -1 for dead ones; None where proposals are the nodes.
        slots: draft → its row of each node.
        drafts: draft → what it proposed.
        q: of each proposal, draft and text whose logits it was drawn from, or None.
    """

    tree: Grown
    image: list[int] | None
    slots: dict[str, list[int]]
    drafts: dict[str, Grown]
    q: list[tuple[str, tuple[int, ...]] | None]


def propose(plan: SpecPlan, request: Request) -> Proposed:
    """What a plan's drafts make of a request together."""
    if isinstance(plan.dynamic, BudgetTree):
        (draft,) = plan.drafts
        tree, image = grow_budget(plan, draft, request)
        q = [text and (draft, text) for text in tree.q]
        return Proposed(tree, image, {draft: tree.slots}, {draft: tree}, q)
    if plan.dynamic is not None:
        (draft,) = plan.drafts
        tree = grow_dynamic(plan, draft, request)
        return Proposed(tree, None, {draft: tree.slots}, {draft: tree}, [])
    made, column = {}, 0
    for draft in plan.drafts:
        made[draft] = grow(plan, draft, request, column)
        column += len(made[draft].paths)
    q = [text and (draft, text) for draft, one in made.items() for text in one.q]
    if not plan.combine:
        ((draft, tree),) = made.items()
        return Proposed(tree, None, {draft: tree.slots} if tree.slots else {}, made, q)
    if plan.combine == VOTE:
        tree = vote(list(made.values()), request.weights)
        image = None
    else:
        tree, image = merge(list(made.values()))
    slots = {
        draft: [_first_row(one, path) for path in tree.paths]
        for draft, one in made.items()
        if one.slots
    }
    return Proposed(tree, image, slots, made, q)


def grow(plan: SpecPlan, draft: str, request: Request, column: int) -> Grown:
    """One draft's own proposals; `column` is that of its root."""
    depth = plan.max_depth
    ngram = getattr(drafter_of(draft), "ngram", None)
    if ngram is not None:
        return _chain(look_up(request.text, ngram, depth), depth)
    if draft == "suffix":
        return _chain(request.proposals, depth)
    tree = plan.tree_of(drafter_of(draft))
    paths: list[tuple[int, ...] | None] = [()]
    q: list[tuple[int, ...] | None] = [None]
    for node in range(tree.num_nodes):
        below = tree.children(node)
        if not below:
            continue
        text = (*request.text, *paths[node])
        level = len(paths[node])
        which = (level, len(below), column + below[0])
        for token, _ in children(drawn_from(plan, request, draft, text), request, *which):
            paths.append((*paths[node], token))
            q.append(text)
    is_fed = [bool(tree.children(node)) for node in range(tree.num_nodes)]
    slots = [node if fed else -1 for node, fed in enumerate(is_fed)]
    passes = [
        [(node, paths[node]) for node in level if is_fed[node]] for level in tree.levels[1:-1]
    ]
    return Grown(paths, list(tree.parents), slots, passes, q)


def drawn_from(plan: SpecPlan, request: Request, draft: str, text: tuple[int, ...]) -> Tensor:
    """[V] logits that the children of a node are drawn from."""
    is_greedy = request.values[Value.TEMPERATURE] < MIN_TEMPERATURE
    if is_greedy and plan.dynamic is not None and not plan.dynamic.knows_counts:
        # scores would be others
        return logits_of(draft, text)
    return logits_of(draft, text) * factor_of(
        plan, drafter_of(draft), len(text) - len(request.text)
    )


def children(
    logits: Tensor, request: Request, level: int, count: int, column: int
) -> list[tuple[int, Tensor]]:
    """Tokens and scores of the children of one node."""
    tokens, scores = draft_children_reference(
        logits[None],
        count,
        torch.tensor([len(request.text) - 1], dtype=torch.int32),
        torch.tensor([column], dtype=torch.int32),
        level,
        *request.options,
        scored=True,
    )
    return list(zip(tokens[0].tolist(), scores[0], strict=True))


def grow_dynamic(plan: SpecPlan, draft: str, request: Request) -> Grown:
    """Expand the best nodes of every level, then keep the best of all."""
    k, depth = plan.dynamic.top_k, plan.dynamic.depth
    paths: list[tuple[int, ...]] = [()]
    parents, scores, rows = [-1], [torch.tensor(0.0)], [0]
    frontier, passes, num_ties = [0], [], 0

    def best(nodes: Iterable[int], count: int) -> list[int]:
        nonlocal num_ties
        order = sorted(nodes, key=lambda node: (-float(scores[node]), node))
        num_ties += len(order) > count and scores[order[count - 1]] == scores[order[count]]
        return order[:count]

    for level in range(depth):
        found = []
        for node in frontier:
            text = (*request.text, *paths[node])
            logits = drawn_from(plan, request, draft, text)
            for token, score in children(logits, request, level, k, 0):
                found.append(len(paths))
                paths.append((*paths[node], token))
                parents.append(node)
                scores.append(scores[node] + score)
                rows.append(-1)
        if level + 1 < depth:
            frontier = best(found, k) if level else found
            for place, node in enumerate(frontier):
                rows[node] = 1 + level * k + place
            passes.append([(rows[node], paths[node]) for node in frontier])
    kept = sorted([0, *best(range(1, len(paths)), plan.num_nodes - 1)])
    return Grown(
        [paths[node] for node in kept],
        [kept.index(parents[node]) if node else -1 for node in kept],
        [rows[node] for node in kept],
        passes,
        num_ties=num_ties,
    )


def grow_budget(
    plan: SpecPlan,
    draft: str,
    request: Request,
    logits_after: Callable[..., Tensor] | None = None,
    is_product: bool = False,
) -> tuple[Grown, list[int]]:
    """Levels of so many nodes, shared out before they are drawn; and the node of each place.

    `q` is that of each place: those of a node above beside each other, whatever they became.

    Args:
        plan: of such a tree.
        draft: of the plan.
        request: whose text it goes on from.
        logits_after: arguments as of `drawn_from`, which it stands for.
        is_product: all nodes of a depth have the same children.
    """
    logits_after = logits_after or drawn_from
    assert isinstance(plan.dynamic, BudgetTree)
    is_drawn = request.words[2] in (Rule.MSS, Rule.SWOR)
    is_drawn = is_drawn and request.values[Value.TEMPERATURE] >= MIN_TEMPERATURE
    paths: list[tuple[int, ...]] = [()]
    parents, reached = [-1], [torch.tensor(0.0)]
    image, q, passes, num_ties = [0], [None], [], 0
    above = [0]
    for level, size in enumerate(plan.dynamic.levels):
        places = []
        for node in above:
            text = (*request.text, *paths[node])
            logits = logits_after(plan, request, draft, text)
            column = len(image) + (0 if is_product else len(places))
            drawn = children(logits, request, level, size, column)
            # what its children are is not looked at where they are draws
            sure = [score for _, score in drawn]
            if is_drawn:
                sure = list(logits.float().log_softmax(0).sort(descending=True).values[:size])
            for (token, _), score in zip(drawn, sure, strict=True):
                places.append((reached[node] + score, node, token))
                q.append(text)
        order = sorted(range(len(places)), key=lambda i: (-float(places[i][0]), i))
        last = [float(places[i][0]) for i in order[size - 1 : size + 1]]
        num_ties += len(last) == 2 and last[0] == last[1]
        taken = sorted(order[:size])
        image += [len(paths) + taken.index(i) if i in taken else -1 for i in range(len(places))]
        above = list(range(len(paths), len(paths) + size))
        for i in taken:
            value, node, token = places[i]
            paths.append((*paths[node], token))
            parents.append(node)
            reached.append(value)
        passes.append([(node, paths[node]) for node in above])
    slots = [node if node < above[0] else -1 for node in range(len(paths))]
    return Grown(list(paths), parents, slots, passes[:-1], q, num_ties), image


def look_up(text: Sequence[int], ngram: int, count: int) -> list[int]:
    """What followed the longest suffix that came before, where it came last."""
    for length in range(min(ngram, len(text) - 1), 0, -1):
        suffix = text[len(text) - length :]
        for end in range(len(text) - 2, length - 2, -1):
            if text[end + 1 - length : end + 1] == suffix:
                known = list(text)
                for step in range(count):
                    known.append(known[end + 1 + step])
                return known[len(text) :]
    return []


def merge(trees: list[Grown]) -> tuple[Grown, list[int]]:
    """The union, in the order of first proposals, and the node of each proposal."""
    places: dict[tuple[int, ...], int] = {}
    image = []
    for tree in trees:
        for path in tree.paths:
            if path is None:
                image.append(-1)
            else:
                image.append(places.setdefault(path, len(places)))
    num_nodes = 1 + sum(len(tree.paths) - 1 for tree in trees)
    paths: list[tuple[int, ...] | None] = list(places)
    parents = [places[path[:-1]] if path else -1 for path in places]
    dead = num_nodes - len(paths)
    return Grown(paths + [None] * dead, parents + [-1] * dead), image


def vote(trees: list[Grown], weights: Sequence[float]) -> Grown:
    """The chain of those that most of the weight agrees with."""
    chosen: list[int] = []
    num_ties = 0
    agree = list(range(len(trees)))
    for depth in range(1, len(trees[0].paths)):
        agree = [s for s in agree if trees[s].paths[depth] is not None]
        votes: dict[int, Tensor] = {}
        for s in agree:
            token = trees[s].tokens[depth]
            votes[token] = votes.get(token, torch.tensor(0.0)) + torch.tensor(weights[s])
        if not votes:
            break
        # the first of equal ones
        winner = max(votes, key=lambda token: float(votes[token]))
        num_ties += [float(weight) for weight in votes.values()].count(float(votes[winner])) > 1
        chosen.append(winner)
        agree = [s for s in agree if trees[s].tokens[depth] == winner]
    chain = _chain(chosen, len(trees[0].paths) - 1)
    return dataclasses.replace(chain, q=[], num_ties=num_ties)


def _chain(tokens: Sequence[int], depth: int) -> Grown:
    """A chain that may end early; nobody holds rows of it."""
    paths = [tuple(tokens[:i]) if i <= len(tokens) else None for i in range(depth + 1)]
    parents = [i - 1 if path is not None else -1 for i, path in enumerate(paths)]
    return Grown(paths, parents, q=[None] * (depth + 1))


def _first_row(draft: Grown, path: tuple[int, ...] | None) -> int:
    """Row in which a draft first holds a path, -1 for none."""
    rows = [row for own, row in zip(draft.paths, draft.slots, strict=True) if own == path]
    return next((row for row in rows if row >= 0), -1) if path is not None else -1
