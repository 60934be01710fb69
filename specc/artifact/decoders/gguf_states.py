"""Parameters of layers that keep states: kernels, decays, and heads in another order.

Of a recurrence, several value heads may share a key head. transformers has the value heads of a key
head side by side; llama.cpp repeats keys as a whole, so its converter puts the first value head of
each key head before the second ones (Qwen3.5), in whatever has rows or columns of value heads.
Source: llama.cpp, conversion/qwen.py, conversion/mamba.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specc.artifact.decoders import gguf_made, gguf_rows
from specc.artifact.decoders.decoded_weight import DecodedWeight
from specc.artifact.decoders.gguf_file import GGUFReader, GGUFTensor
from specc.artifact.decoders.gguf_rows import RowOrder
from specc.artifact.decoders.gguf_targets import Architecture, How
from specc.artifact.decoders.gguf_weights import computed, ordered, with_columns
from specc.errors import WeightError


@dataclass(frozen=True)
class StateHeads:
    """Heads of a file's recurrences; zeros where it has none.

    Args:
        keys: heads of keys.
        values: heads of values.
        key_width: rows of a key head.
        value_width: rows of a value head.
        is_tiled: value heads lie in the file's own order.
    """

    keys: int
    values: int
    key_width: int
    value_width: int
    is_tiled: bool

    @classmethod
    def of(cls, reader: GGUFReader, architecture: Architecture) -> StateHeads:
        kind = reader.fields.get("general.architecture")
        names = ("group_count", "time_step_rank", "state_size", "inner_size")
        found = [reader.fields.get(f"{kind}.ssm.{name}") for name in names]
        keys, values, width, inner = (item if type(item) is int else 0 for item in found)
        return cls(keys, values, width, inner // max(1, values), architecture.has_tiled_values)

    def made(self, name: str, how: How, items: Sequence[GGUFTensor], where: str) -> DecodedWeight:
        """The parameter that these tensors are.

        Args:
            name: of the parameter.
            how: one of `OF_STATES`.
            items: as many as it needs.
            where: the file, for errors.
        Raises:
            WeightError: rows or columns that are no whole heads.
        """
        first = items[0]
        rows, width = math.prod(first.shape[:-1]), first.shape[-1]
        if how is How.FLAT:
            return computed(name, (rows * width,), items, gguf_made.as_stored)
        if how is How.DECAY:
            order = self._order(rows * width, first, where)
            return computed(name, (rows * width,), items, gguf_made.logarithm(order))
        if how is How.CHANNEL_DECAY:
            return computed(name, (1, 1, rows * width, 1), items, gguf_made.logarithm(None))
        if how is How.KERNELS:
            rows *= len(items)
            return computed(name, (rows, 1, width), items, gguf_made.in_order(None, rows, width))
        if how is How.KERNEL:
            order = self._order(rows, first, where)
            return computed(name, (rows, 1, width), items, gguf_made.in_order(order, rows, width))
        if how is How.VALUE_COLUMNS:
            return with_columns(first, name, self._order(width, first, where))
        if how is How.VALUES:
            return ordered(name, first.shape, items, self._order(first.shape[0], first, where))
        assert how is How.STATE_GROUPS
        return ordered(name, (rows + items[1].shape[0], width), items, self._groups(items, where))

    def _order(self, rows: int, tensor: GGUFTensor, where: str) -> RowOrder | None:
        """Of rows or columns: one of each value head, or all of theirs, behind keys or not."""
        if not self.is_tiled or self.keys == self.values:
            return None
        inner, keys = self.values * self.value_width, 2 * self.keys * self.key_width
        if (
            not self.keys
            or self.values % self.keys
            or rows not in (self.values, inner, keys + inner)
        ):
            raise self._refusal(tensor, rows, where)
        before, width = keys if rows > inner else 0, 1 if rows == self.values else self.value_width
        return gguf_rows.tiled_heads(self.keys, self.values, width, before)

    def _groups(self, items: Sequence[GGUFTensor], where: str) -> RowOrder:
        inner = self.values * self.value_width
        sizes = (2 * self.keys * self.key_width + inner, inner)
        for item, size in zip(items, sizes, strict=True):
            if not self.keys or self.values % self.keys or item.shape[0] != size:
                raise self._refusal(item, item.shape[0], where)
        return gguf_rows.grouped_states(self.keys, self.key_width, inner // self.keys)

    def _refusal(self, tensor: GGUFTensor, rows: int, where: str) -> WeightError:
        return WeightError(
            f"{tensor.name} in {where} has {rows} rows or columns of heads",
            f"those of {self.keys} key heads of {self.key_width} and {self.values} value heads of"
            f" {self.value_width}, as its fields …ssm.… say",
            "download or convert the file again",
        )
