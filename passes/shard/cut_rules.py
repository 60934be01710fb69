"""What operators of specc say about dimensions: layouts of their table, read as relations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from specc.kernels.operator import Cut, CutRule, Elementwise
from specc.passes.program import bind_args
from specc.passes.shard.relations import Element, Relations, is_tensor

_WHOLE, _SILENT, _LEADING, _OPTIONAL = "*", ".", "...", "?"
_NAMELESS = (_WHOLE, _SILENT)


def apply_cut(found: Relations, node: fx.Node, name: str, rule: CutRule) -> None:
    """Collect what a call says.

    Args:
        found: gets it.
        node: the call.
        name: of the operator.
        rule: of its table.
    """
    match rule:
        case Cut():
            _Layouts(found, node, rule).apply()
        case Elementwise():
            (operand,) = node.all_input_nodes
            for dim in range(node.meta["val"].dim()):
                found.same(operand, dim, node, dim)
        case _:
            for item in (*node.all_input_nodes, node):
                found.block_all(item, f"{name}: {rule.reason}")


class _Layouts:
    """The words of all operands of one call."""

    def __init__(self, found: Relations, node: fx.Node, rule: Cut) -> None:
        self._found, self._node, self._rule = found, node, rule
        bound = bind_args(node)
        # of those that are there
        self._operands = {key: bound[key] for key in rule.operands if is_tensor(bound[key])}

    def apply(self) -> None:
        places: dict[str, list[Element]] = {}
        for key, item in self._operands.items():
            self._note(places, item, self._words_of(key))
        self._note(places, self._node, _words(self._rule.result, self._node.meta["val"].dim()))
        for first, *others in places.values():
            for other in others:
                self._found.same(*first, *other)
        if self._rule.contracted is not None:
            key, word = self._rule.contracted
            place = self._words_of(key).index(word)
            if (element := self._found.element(self._operands[key], place)) is not None:
                self._found.contracted[self._node] = element
        if self._rule.heads is not None:
            queries, keys = map(self._heads, self._rule.heads)
            self._found.heads[self._node] = queries, keys

    def _words_of(self, key: str) -> list[str]:
        return _words(self._rule.operands[key], self._operands[key].meta["val"].dim())

    def _heads(self, key: str) -> Element:
        words = enumerate(self._words_of(key))
        return self._operands[key], next(i for i, word in words if word not in _NAMELESS)

    def _note(self, places: dict[str, list[Element]], item: fx.Node, words: Sequence[str]) -> None:
        for dim, word in enumerate(words):
            if word == _WHOLE:
                self._found.block(item, dim, self._rule.why)
            elif word != _SILENT:
                places.setdefault(word, []).append((item, dim))


def _words(layout: str, rank: int) -> list[str]:
    """A word for each dimension; those that `...` stands for are numbered from the left."""
    *words, last = layout.split()
    is_there = not last.endswith(_OPTIONAL) or rank > len(words)
    words += [last.removesuffix(_OPTIONAL)] if is_there else []
    if words[0] != _LEADING:
        assert len(words) == rank, f"{layout} is not a layout of {rank} dimensions"
        return words
    rest = words[1:]
    return [f"{_LEADING}{i}" for i in range(rank - len(rest))] + rest
