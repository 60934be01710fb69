"""Which classes of dimensions are cut for a number of ranks, and by how much.

Classes that nothing blocks are still not free of each other. Some are cut together or not at all:
heads of queries with those of keys, those of a recurrence's values with its keys', and all
intervals that one product sums over. Others exclude each other: a weight that was cut along both
dimensions would leave each rank a block of its diagonal, and the rest nowhere. Heads are cut first,
then the vocabulary, then what holds most.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

from torch import fx

from specc.errors import ConfigError
from specc.kernels import ops
from specc.passes.program import Program
from specc.passes.shard.dimension_classes import DimensionClasses, Run
from specc.passes.shard.relations import Element, Relations, is_tensor, size_of
from specc.sharding.shard_plan import Cut, Interval, local_size


@dataclass(frozen=True)
class Pieces:
    """How a class is cut.

    Args:
        parts: pieces, see `Interval`.
        copies: ranks that hold the same piece.
        pads: the interval's end is moved so that the parts are equal.
    """

    parts: int
    copies: int = 1
    pads: bool = False


class CutChoice:
    """The cut of every dimension of a graph.

    Args:
        program: before the cut.
        relations: of its operators.
        num_ranks: of the group, 2 or more.
    Raises:
        ConfigError: heads, or the inner dimension of a product, are not divisible.
    """

    def __init__(self, program: Program, relations: Relations, num_ranks: int) -> None:
        self._program, self._relations, self._num_ranks = program, relations, num_ranks
        self.classes = DimensionClasses(relations)
        self._chosen: dict[Run, Pieces] = {}
        self._whole = set(self.classes.blocked)
        # class → those that are cut with it or not at all, and those that are not cut beside it
        self._together: dict[Run, set[Run]] = defaultdict(set)
        self._apart: dict[Run, set[Run]] = defaultdict(set)
        self._inner = {
            name for item in relations.contracted.values() for name in self._classes_of(item)
        }
        self._tie_sums()
        self._keep_apart()
        # pairs of pieces that classes of heads must be cut into
        self._heads = self._tie_heads()
        self._can_pad = self._find_can_pad()
        self._keep_whole(set(self._whole))
        for name in (*self._heads, *self._can_pad, *self._by_bytes()):
            self._choose(name)

    def cut(self, element: Element) -> Cut:
        """Intervals of a dimension; one, whole, where nothing is known of it."""
        runs = self.classes.runs(element)
        if not runs:
            return (Interval(0, size_of(element)),)
        return tuple(self._interval(run) for run in runs)

    def local_size(self, node: fx.Node, dim: int) -> int:
        """Of a rank's part of a dimension of fixed size."""
        element = self._relations.element(node, dim)
        return local_size(self.cut(element)) if element else int(node.meta["val"].shape[dim])

    def is_cut(self, element: Element | None) -> bool:
        """Whether any part of a dimension differs from rank to rank."""
        return element is not None and any(part.parts > 1 for part in self.cut(element))

    def cut_dims(self, node: fx.Node) -> list[int]:
        """Dimensions of a value that are cut."""
        dims = range(node.meta["val"].dim())
        return [dim for dim in dims if self.is_cut(self._relations.element(node, dim))]

    def _interval(self, run: Run) -> Interval:
        _, start, stop = run
        pieces = self._chosen.get(self.classes.class_of(run))
        if pieces is None:
            return Interval(start, stop)
        if pieces.pads:
            stop = start + -(-(stop - start) // pieces.parts) * pieces.parts
        return Interval(start, stop, pieces.parts, pieces.copies)

    # --- what classes have to do with each other

    def _classes_of(self, element: Element | None) -> list[Run]:
        runs = [] if element is None else self.classes.runs(element)
        return [self.classes.class_of(run) for run in runs]

    def _tie(self, names: list[Run]) -> None:
        for name in names:
            self._together[name].update(names)

    def _tie_sums(self) -> None:
        """What is not cut of a sum would count once for each rank."""
        for summed in self._relations.contracted.values():
            self._tie(self._classes_of(summed))
        for element in [*self._relations.looked_up.values(), self._columns()]:
            # a rank holds rows and columns that follow each other
            if len(names := self._classes_of(element)) > 1:
                self._whole.update(names)

    def _keep_apart(self) -> None:
        """A value is cut along one dimension, and parts of a sum along none."""
        for node in self._program.graph.nodes:
            if not is_tensor(node):
                continue
            dims = [
                self._classes_of(self._relations.element(node, dim))
                for dim in range(node.meta["val"].dim())
            ]
            for summed in (self._relations.contracted, self._relations.looked_up):
                dims.append(self._classes_of(summed.get(node)))
            for some, others in itertools.combinations(dims, 2):
                for a, b in itertools.product(some, others):
                    self._apart[a].add(b)
                    self._apart[b].add(a)

    def _tie_heads(self) -> dict[Run, Pieces | None]:
        """Each attention, and each recurrence, is cut by its heads as a whole, or not at all.

        Returns what its classes are cut into; None is a number of heads that cannot be divided.
        """
        found: dict[Run, Pieces | None] = {}
        for queries, keys in self._relations.heads.values():
            names = [*self._classes_of(queries), *self._classes_of(keys)]
            self._tie(names)
            num_heads, num_kv_heads = size_of(queries), size_of(keys)
            if len(names) != 1 + (num_kv_heads > 1) or num_heads == 1:
                self._whole.update(names)
                continue
            heads = Pieces(self._num_ranks) if num_heads % self._num_ranks == 0 else None
            kv_heads = Pieces(self._num_ranks) if num_kv_heads % self._num_ranks == 0 else None
            if self._num_ranks % num_kv_heads == 0:
                kv_heads = Pieces(num_kv_heads, self._num_ranks // num_kv_heads)
            # the only head of keys is whole on every rank
            for name, pieces in zip(names, (heads, kv_heads), strict=False):
                # ranks with the same piece would count it twice in a sum
                counts_twice = pieces is not None and pieces.copies > 1 and name in self._inner
                if counts_twice or found.setdefault(name, pieces) != pieces:
                    self._whole.add(name)
        return found

    def _find_can_pad(self) -> dict[Run, None]:
        """Rows of a table that are never looked up, and columns of logits that never win."""
        dims = [self._columns(), *self._relations.looked_up.values()]
        names = dict.fromkeys(name for item in dims for name in self._classes_of(item))
        return {x: None for x in names if x not in self._inner and self._is_one_size(x)}

    def _keep_whole(self, names: set[Run]) -> None:
        """Neither these classes nor those that go with them are cut."""
        waiting = list(names)
        while waiting:
            self._whole.add(name := waiting.pop())
            waiting += self._together[name] - self._whole

    # --- the choice

    def _choose(self, name: Run) -> None:
        """Cut a class and those that go with it, unless something that is cut forbids it."""
        if name in self._whole or name in self._chosen:
            return
        unit, waiting = {name: None}, [name]
        while waiting:
            others = [item for item in self._together[waiting.pop()] if item not in unit]
            unit |= dict.fromkeys(others)
            waiting += others
        excluded = {other for item in unit for other in self._apart[item]}
        if excluded & (self._chosen.keys() | unit.keys()):
            self._keep_whole(set(unit))
            return
        pieces = {item: self._pieces(item) for item in unit}
        if None in pieces.values():
            self._keep_whole(set(unit))
            return
        self._chosen |= {item: found for item, found in pieces.items() if found is not None}

    def _pieces(self, name: Run) -> Pieces | None:
        """What a class is cut into; None is a class that stays whole."""
        if name in self._can_pad and name not in self._heads:
            return Pieces(self._num_ranks, pads=True)
        size = math.gcd(*(stop - start for _, start, stop in self.classes.members[name]))
        if name in self._heads:
            if (pieces := self._heads[name]) is None:
                self._refuse(*self._heads_of(name))
            elif size % pieces.parts:
                # such as a norm over several heads
                self._refuse(size, "groups of heads", self._heads_of(name)[2])
            return pieces
        if size % self._num_ranks == 0:
            return Pieces(self._num_ranks)
        if name in self._inner:
            self._refuse(size, "inner features", self._summed_weight(name))
        return None

    def _heads_of(self, name: Run) -> tuple[int, str, str]:
        for node, (queries, keys) in self._relations.heads.items():
            is_recurrence = node.target is ops.tree_recurrence
            if name in self._classes_of(queries):
                what = "value heads" if is_recurrence else "attention heads"
                return size_of(queries), what, self._layer_of(node)
            if name in self._classes_of(keys):
                what = "key heads" if is_recurrence else "key and value heads"
                return size_of(keys), what, self._layer_of(node)
        raise AssertionError(name)

    def _layer_of(self, node: fx.Node) -> str:
        """Name of the layer that attends, or keeps a state, by this call."""
        program, kinds = self._program, (ops.tree_conv, ops.tree_recurrence)
        if node.target in kinds:
            return program.state_layers[program.calls(*kinds).index(node)].name
        attended = [x for x in self._relations.heads if x.target not in kinds]
        return program.layers[attended.index(node)].name

    def _summed_weight(self, name: Run) -> str:
        """The first weight of a product that sums over a class, with its shape."""
        for node, summed in self._relations.contracted.items():
            if name not in self._classes_of(summed):
                continue
            for item in node.all_input_nodes:
                weight = self._program.weights.get(str(item.target))
                if weight is not None and item.op == "placeholder" and len(weight.shape) > 1:
                    return f"{weight.key} {list(weight.shape)}"
            return node.name  # a product of two computed values
        raise AssertionError(name)

    def _refuse(self, size: int, what: str, where: str) -> None:
        fits = [n for n in range(2, size + 1) if size % n == 0]
        raise ConfigError(
            f"{size} {what} of {where} in {self._program.name}, for {self._num_ranks} ranks",
            f"a number of ranks that divides them: {', '.join(map(str, fits[:6])) or '1'}",
            "choose another --tensor-parallel-size",
        )

    def _columns(self) -> Element | None:
        """The dimension of the vocabulary in the output."""
        (output,) = self._program.graph.find_nodes(op="output")
        return self._relations.element(output.args[0], -1)

    def _by_bytes(self) -> list[Run]:
        """Classes that hold weights, the largest first."""
        found: dict[Run, int] = {}
        for name, members in self.classes.members.items():
            for (node, dim), start, stop in members:
                if node.op == "placeholder" and node.target in self._program.weights:
                    value = node.meta["val"]
                    share = value.numel() // value.shape[dim] * (stop - start)
                    found[name] = found.get(name, 0) + share * value.dtype.itemsize
        return sorted(found, key=found.__getitem__, reverse=True)

    def _is_one_size(self, name: Run) -> bool:
        """Whether all members of a class are whole dimensions of the same size."""
        members = self.classes.members[name]
        return {(start, stop) for _, start, stop in members} == {
            (0, size_of(element)) for element, _, _ in members
        } and len({stop for _, _, stop in members}) == 1
