"""Which classes of dimensions are cut for a number of ranks, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from specc.errors import ConfigError
from specc.passes.program import Program
from specc.passes.shard.dimension_classes import DimensionClasses, Run
from specc.passes.shard.relations import Element, Relations, size_of
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
        self._whole: set[Run] = set()
        self._choose_heads()
        self._choose_rest()

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

    def is_padded(self, element: Element) -> bool:
        return self.cut(element)[-1].stop > size_of(element)

    def _interval(self, run: Run) -> Interval:
        _, start, stop = run
        pieces = self._chosen.get(self.classes.class_of(run))
        if pieces is None:
            return Interval(start, stop)
        if pieces.pads:
            stop = start + -(-(stop - start) // pieces.parts) * pieces.parts
        return Interval(start, stop, pieces.parts, pieces.copies)

    def _choose_heads(self) -> None:
        """Each attention is cut by its heads as a whole, or not at all."""
        for queries, keys in self._relations.heads:
            heads, kv_heads = (self.classes.whole_class(item) for item in (queries, keys))
            names = {heads, kv_heads}
            if None in names or names & self.classes.blocked.keys():
                self._whole |= {name for name in names if name is not None}
                continue
            assert heads is not None
            assert kv_heads is not None
            self._chosen[heads] = self._divided(size_of(queries), "attention heads")
            size = size_of(keys)
            if self._num_ranks % size == 0:
                self._chosen[kv_heads] = Pieces(size, self._num_ranks // size)
            else:
                self._chosen[kv_heads] = self._divided(size, "key and value heads")

    def _choose_rest(self) -> None:
        inner = {
            self.classes.class_of(run)
            for element in self._relations.contracted.values()
            for run in self.classes.runs(element)
        }
        # rows of a table that are never looked up, and columns of logits that never win
        can_pad = {
            name
            for element in (*self._relations.looked_up.values(), self._columns())
            if element is not None and (name := self.classes.whole_class(element)) is not None
        }
        for name, members in self.classes.members.items():
            if name in self.classes.blocked or name in self._chosen or name in self._whole:
                continue
            if not any(self._is_weight(element) for element, _, _ in members):
                continue
            if name in can_pad and all(self._is_whole(run) for run in members):
                self._chosen[name] = Pieces(self._num_ranks, pads=True)
            elif name in inner:
                self._chosen[name] = self._divided(self._granularity(members), "inner features")
            elif self._granularity(members) % self._num_ranks == 0:
                self._chosen[name] = Pieces(self._num_ranks)

    def _columns(self) -> Element | None:
        """The dimension of the vocabulary in the output."""
        (output,) = self._program.graph.find_nodes(op="output")
        return self._relations.element(output.args[0], -1)

    def _granularity(self, members: list[Run]) -> int:
        return min(stop - start for _, start, stop in members)

    def _is_weight(self, element: Element) -> bool:
        return element[0].op == "placeholder" and element[0].target in self._program.weights

    def _is_whole(self, run: Run) -> bool:
        element, start, stop = run
        return (start, stop) == (0, size_of(element))

    def _divided(self, size: int, what: str) -> Pieces:
        if size % self._num_ranks:
            fits = [n for n in range(2, size + 1) if size % n == 0]
            raise ConfigError(
                f"{size} {what} in {self._program.name}, for {self._num_ranks} ranks",
                f"a number of ranks that divides them: {', '.join(map(str, fits[:6])) or '1'}",
                "choose another --tensor-parallel-size",
            )
        return Pieces(self._num_ranks)
