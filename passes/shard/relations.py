"""Which dimensions of a graph's values are laid out alike, as operators say it one by one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from torch import Tensor, fx

# a dimension of a value
Element = tuple[fx.Node, int]


def is_tensor(node: object) -> bool:
    """Whether a node's value is one tensor."""
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def size_of(element: Element) -> int:
    node, dim = element
    return int(node.meta["val"].shape[dim])


@dataclass(frozen=True)
class Relation:
    """Index i of `small` is the run of `scale` indices of `large` from i * scale + offset on."""

    large: Element
    small: Element
    scale: int = 1
    offset: int = 0

    def down(self, index: int) -> int | None:
        """The boundary in `small` that this one of `large` is; None where it is inside or out."""
        place, rest = divmod(index - self.offset, self.scale)
        return place if not rest and 0 <= place <= size_of(self.small) else None

    def up(self, index: int) -> int:
        return index * self.scale + self.offset

    def carry(self, element: Element, indices: set[int]) -> tuple[Element, set[int]]:
        """The other side, and what boundaries of this one are there."""
        if element == self.small:
            return self.large, {self.up(index) for index in indices}
        moved = (self.down(index) for index in indices)
        return self.small, {index for index in moved if index is not None}


@dataclass
class Relations:
    """What the rules collect.

    Args:
        relations: between dimensions.
        boundaries: indices at which something cuts a dimension in parts.
        blocks: why a dimension must stay whole.
        contracted: product → its operand's dimension that is summed over.
        looked_up: lookup → the dimension of its table that indices choose from.
        heads: attention or recurrence → its queries' (or values') and keys' dimension of heads, in
            order.
    """

    relations: list[Relation] = field(default_factory=list)
    boundaries: dict[Element, set[int]] = field(default_factory=lambda: defaultdict(set))
    blocks: list[tuple[Element, str]] = field(default_factory=list)
    contracted: dict[fx.Node, Element] = field(default_factory=dict)
    looked_up: dict[fx.Node, Element] = field(default_factory=dict)
    heads: dict[fx.Node, tuple[Element, Element]] = field(default_factory=dict)

    def element(self, node: fx.Node, dim: int) -> Element | None:
        """None for dimensions that nothing can cut: those of size 1, and those of tokens."""
        shape = node.meta["val"].shape
        size = shape[dim]
        return (node, dim % len(shape)) if isinstance(size, int) and size > 1 else None

    def same(self, a: fx.Node, dim_a: int, b: fx.Node, dim_b: int) -> None:
        """Two dimensions are laid out alike."""
        first, second = self.element(a, dim_a), self.element(b, dim_b)
        if first and second and size_of(first) != size_of(second):
            self.blocks += [(item, "it meets another size") for item in (first, second)]
        elif first and second:
            self.relations.append(Relation(first, second))
        elif one := first or second:
            self.blocks.append((one, "it meets a dimension of size 1 or of tokens"))

    def nested(self, large: Element, small: Element, scale: int) -> None:
        """An index of `small` is a run of `scale` indices of `large`."""
        self.relations.append(Relation(large, small, scale))

    def part(self, source: fx.Node, result: fx.Node, dim: int, start: int, stop: int) -> None:
        """A result is a part of its source along a dimension; the others are as they were."""
        rank = source.meta["val"].dim()
        dim %= rank
        for other in range(rank):
            if other != dim:
                self.same(source, other, result, other)
        large, small = self.element(source, dim), self.element(result, dim)
        if large is not None:
            self.boundaries[large] |= {start, stop}
            if small is not None:
                self.relations.append(Relation(large, small, 1, start))

    def block(self, node: fx.Node, dim: int, why: str) -> None:
        if (element := self.element(node, dim)) is not None:
            self.blocks.append((element, why))

    def block_all(self, node: fx.Node, why: str) -> None:
        if is_tensor(node):
            for dim in range(node.meta["val"].dim()):
                self.block(node, dim, why)
