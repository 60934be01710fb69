"""Classes of intervals that are cut together or not at all: union-find over relations.

An interval is a run of a dimension between two boundaries. Boundaries travel along relations until
nothing changes, so that the three parts of a fused `[q | k | v]` are intervals of its weight, too;
then intervals that relations make one are joined.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from specc.passes.shard.relations import Element, Relation, Relations, size_of

# of an element: its first and last index
Run = tuple[Element, int, int]


class DimensionClasses:
    """Intervals of all dimensions of a graph, and the classes that they belong to.

    Args:
        relations: what the operators say.
    """

    def __init__(self, relations: Relations) -> None:
        self._around: dict[Element, list[Relation]] = defaultdict(list)
        for relation in relations.relations:
            self._around[relation.large].append(relation)
            self._around[relation.small].append(relation)
        alone = [element for element, _ in relations.blocks]
        alone += [*relations.looked_up.values(), *relations.contracted.values()]
        self._runs = self._find_runs([*self._around, *alone], relations.boundaries)
        self._parent: dict[Run, Run] = {}
        unlike = [run for relation in relations.relations for run in self._join(relation)]
        # class → why it stays whole
        self.blocked: dict[Run, str] = {}
        for element, why in relations.blocks:
            for run in self.runs(element):
                self.blocked.setdefault(self.class_of(run), why)
        for run in unlike:
            self.blocked.setdefault(self.class_of(run), "a part of it ends inside an inner run")
        self.members: dict[Run, list[Run]] = defaultdict(list)
        for element in self._runs:
            for run in self.runs(element):
                self.members[self.class_of(run)].append(run)

    def runs(self, element: Element) -> list[Run]:
        """The intervals of a dimension, in order; none where no operator says anything of it."""
        return [(element, start, stop) for start, stop in self._runs.get(element, ())]

    def class_of(self, run: Run) -> Run:
        """The interval that stands for the class of this one."""
        root = run
        while (parent := self._parent.get(root, root)) != root:
            root = parent
        while (parent := self._parent.get(run, run)) != root:
            self._parent[run], run = root, parent
        return root

    def _find_runs(
        self, elements: list[Element], boundaries: dict[Element, set[int]]
    ) -> dict[Element, list[tuple[int, int]]]:
        """The intervals of each dimension: boundaries, carried along until nothing changes."""
        found = {
            element: {0, size_of(element)} | boundaries.get(element, set())
            for element in dict.fromkeys(elements)
        }
        changed = list(found)
        while changed:
            element = changed.pop()
            for relation in self._around.get(element, ()):
                other, carried = relation.carry(element, found[element])
                if not carried <= found[other]:
                    found[other] |= carried
                    changed.append(other)
        return {element: list(itertools.pairwise(sorted(x))) for element, x in found.items()}

    def _join(self, relation: Relation) -> list[Run]:
        """Make intervals of both sides one; returns those that have no partner, and must not."""
        there = self.runs(relation.large)
        alone: list[Run] = []
        for small in self.runs(relation.small):
            first, last = relation.up(small[1]), relation.up(small[2])
            if (large := (relation.large, first, last)) in there:
                self._parent[self.class_of(large)] = self.class_of(small)
            else:
                inside = [run for run in there if run[1] < last and first < run[2]]
                alone += [small, *inside]
        return alone
