"""One weight of a quantized checkpoint: what it is called, how it is stored, and its rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specc.artifact.integers import Integers
from specc.artifact.quantized_layout import GROUPS, QuantizedLayout
from specc.artifact.safetensors_io import TensorReader
from specc.errors import WeightError


@dataclass(frozen=True)
class DecodedWeight(ABC):
    """A weight as the model has it, of tensors as the checkpoint has them.

    Args:
        name: of the parameter, by the checkpoint's own names: `….q_proj.weight`.
        shape: of the parameter, [N, K] or, of stacked experts, with one dimension more.
        scheme: what people call it, for errors and `specc inspect`: `gptq, 4 bits, groups of 128`.
    """

    name: str
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    scheme: str

    @property
    def is_quantized(self) -> bool:
        """Whether it is not just floating-point numbers in another place or order."""
        return True

    @property
    def layout(self) -> QuantizedLayout | None:
        """How an engine stores it as it is; None where none of its layouts holds these numbers."""
        return None

    @property
    def order(self) -> Tensor | None:
        """[K] int64, the columns in the order in which `integers` has them; None as they are."""
        return None

    @property
    def is_turned(self) -> bool:
        """Whether its integers are those of matrices [N, K], and the parameter's are [K, N]."""
        return False

    @property
    def outputs(self) -> int:
        """N, rows of a matrix of integers."""
        return self.shape[-1 if self.is_turned else -2]

    @abstractmethod
    def values(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        """Rows start … stop - 1 along dim 0 in float32: products (u - z) · s, rounded once."""

    def integers(self, reader: TensorReader, start: int, stop: int) -> Integers:
        """The same rows as `layout` holds them, [rows, K], those of one matrix after the other.

        Of weights that have a layout. A range of stacked experts is of whole matrices.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class GroupedWeight(DecodedWeight):
    """A matrix of integers with a scale for each output and group of columns.

    Args:
        bits: 4 or 8.
        group: columns that share a scale; K where an output has one. The last group may be short.
        has_zeros: groups have zero points of their own.
        columns: [K], the columns group after group; None where they are in this order.
    """

    bits: int
    group: int
    has_zeros: bool
    columns: Tensor | None = field(default=None, compare=False)

    @property
    def num_groups(self) -> int:
        return -(-self.shape[1] // self.group)

    @property
    def layout(self) -> QuantizedLayout | None:
        return layout_of(self.bits, self.group, self.has_zeros, self.shape[1])

    @property
    def order(self) -> Tensor | None:
        return self.columns

    @abstractmethod
    def rows(self, reader: TensorReader, start: int, stop: int) -> Integers:
        """Rows start … stop - 1, with a scale for each of the checkpoint's own groups.

        Columns are in their own order, whatever that of the groups is.
        """

    def values(self, reader: TensorReader, start: int, stop: int) -> Tensor:
        part = self.rows(reader, start, stop)
        steps = part.levels.float()
        if part.zeros is None:
            steps -= 1 << (self.bits - 1)
        else:
            steps -= self._wide(part.zeros.float())
        return steps * self._wide(part.scales)

    def integers(self, reader: TensorReader, start: int, stop: int) -> Integers:
        part, layout = self.rows(reader, start, stop), self.layout
        assert layout is not None
        levels = part.levels if self.columns is None else part.levels[:, self.columns]
        if layout.group in (0, self.group):
            return Integers(levels, part.scales, part.zeros)
        # groups of the engine are whole parts of the checkpoint's
        owners = group_owners(layout, self.group, self.shape[1])
        zeros = None if part.zeros is None else part.zeros[:, owners]
        return Integers(levels, part.scales[:, owners], zeros)

    def _wide(self, items: Tensor) -> Tensor:
        """[n, G] of groups as [n, K] of their columns."""
        wide = items.repeat_interleave(self.group, 1)[:, : self.shape[1]]
        if self.columns is None:
            return wide
        return torch.empty_like(wide).index_copy_(1, self.columns, wide)


def layout_of(
    bits: int, group: int, has_zeros: bool, columns: int, is_float: bool = False
) -> QuantizedLayout | None:
    """How an engine holds levels in groups of `group` columns, or None.

    A group that is a multiple of a layout's, or as long as the row, is several of them with equal
    scales.
    """
    if bits == 8 and group >= columns:
        return QuantizedLayout(8, 0, has_zeros, is_float)
    whole = [own for own in GROUPS if group >= columns or group % own == 0]
    own = group if group in GROUPS else max(whole, default=None)
    return None if own is None else QuantizedLayout(bits, own, has_zeros, is_float)


def group_owners(layout: QuantizedLayout, group: int, columns: int) -> Tensor:
    """Of each group of columns of a layout, the checkpoint's group that it is a part of."""
    return torch.arange(layout.num_groups(columns)) * layout.group // group


def check_group(group: int, columns: int, name: str, where: str) -> None:
    """Raises WeightError: groups of columns that no engine has."""
    if group >= columns or (group > 0 and any(group % own == 0 for own in GROUPS)):
        return
    raise WeightError(
        f"{name} in {where} has a scale for each {group} columns",
        "groups of 32, 64 or 128 columns, a multiple of them, or one scale for each output",
        "quantize the model with one of these groups, or pass the unquantized checkpoint with"
        " --quantize int8 or int4",
    )
