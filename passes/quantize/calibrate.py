"""Round projections by what they multiply in texts, one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from specc.artifact.calibrated_reader import CalibratedReader
from specc.artifact.decoders.kept_integers import KeptIntegers
from specc.artifact.error_feedback import round_with_feedback
from specc.artifact.quantized_layout import QuantizedLayout
from specc.artifact.weight_layout import BLOCK
from specc.artifact.weight_spec import Source, WeightSpec
from specc.artifact.weights import read_weight
from specc.passes.base import NoMatch, Pass, PassResult
from specc.passes.frontend.model_source import ModelSource
from specc.passes.program import Program, Weight, bind_args
from specc.passes.quantize.texts_pass import TextsPass

aten = torch.ops.aten
# rows whose products are summed at one time
_ROWS_AT_ONCE = 4096
# part of the squares of its outputs that a projection may lose in 4 bits
MOST_LOST = 0.02


class Calibrate(Pass):
    """Give projections integers that lose little of their outputs for texts.

    A pass over the texts comes to each projection with the rows that all earlier ones, rounded
    already, make of them. It is rounded with `round_with_feedback`, and what it makes of its rows
    from then on is what its integers make. The head, which is last, is left to rounding without
    data, and so are projections whose weight is not rows of the checkpoint's tensors, experts of
    mixtures among them.

    One that would lose too much in 4 bits gets 8, in the same groups: what a projection loses is
    Σ e H eᵀ over rows e of the error, as a part of Σ w H wᵀ. The source's warnings say which.

    The integers are those of a checkpoint from here on: `QuantizeLinear` keeps them.

    Args:
        source: of the program; its reader becomes a `CalibratedReader`.
        layout: int8 or int4.
        windows: token ids of texts.
        advance: told how many projections are done, of all.
    """

    def __init__(
        self,
        source: ModelSource,
        layout: QuantizedLayout,
        windows: Sequence[Sequence[int]],
        advance: Callable[[int, int], None],
    ) -> None:
        self._source, self._layout = source, layout
        self._windows, self._advance = windows, advance
        # of each projection, what it loses
        self._losses: list[float] = []
        # of those that have more bits, with what they would have lost
        self._sensitive: list[str] = []

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        *linears, head = program.calls(aten.linear.default)
        specs = {spec.key: spec for spec in self._source.weight_specs(program)}
        reader = CalibratedReader(self._source.reader)
        self._source.reader = reader

        def read(name: str) -> Tensor:
            spec = specs[program.weights[name].key]
            return read_weight(spec, reader.stored)

        def override(node: fx.Node, args: tuple[Any, ...]) -> Any:
            if node not in linears:
                return NotImplemented
            self._advance(linears.index(node), len(linears))
            name = str(bind_args(node)["weight"].target)
            weight = program.weights.get(name)
            values = None
            with result.attempt(node.name):
                if weight is None:
                    raise NoMatch("its weight is computed")
                values = self._round(program, weight, specs[weight.key], args[0], reader)
            if values is None:
                return NotImplemented
            bias = bind_args(node).get("bias")
            bias = None if bias is None else read(str(bias.target))
            return torch.nn.functional.linear(args[0], values.to(args[0].dtype), bias)

        TextsPass(program, self._windows, read).run(head, override)
        self._advance(len(linears), len(linears))
        self._tell(program.name)
        return result

    def _tell(self, name: str) -> None:
        if not self._losses:
            return
        mean, most = sum(self._losses) / len(self._losses), max(self._losses)
        text = (
            f"{name}: rounded for the texts, {len(self._losses)} projections lose {mean:.2%} of"
            f" what they make of them, one {most:.2%}"
        )
        if self._sensitive:
            text += f"; 8 bits have {', '.join(self._sensitive)}"
        self._source.warnings.append(text)

    def _round(
        self,
        program: Program,
        weight: Weight,
        spec: WeightSpec,
        x: Tensor,
        reader: CalibratedReader,
    ) -> Tensor:
        """The values [N, K] float32 of a weight's integers, which the program and the reader get.

        Raises:
            NoMatch: it keeps its own values.
        """
        if weight.shape[0] < BLOCK:
            raise NoMatch(f"{weight.shape[0]} outputs, fewer than a block has")
        if weight.is_turned or any(not _is_rows(source) for source in spec.sources):
            raise NoMatch("its weight is not rows of tensors of the checkpoint")
        names = [source.name for source in spec.sources]
        if len(set(names)) < len(names) or any(reader.decoded(name) for name in names):
            raise NoMatch("another projection has the same tensor")
        values = read_weight(dataclasses.replace(spec, dtype=torch.float32), reader.stored)
        products, layout = products_of(x), self._layout
        rounded = round_with_feedback(values, products, layout)
        loss = lost(values, rounded.values(layout), products)
        if layout.bits == 4 and loss > MOST_LOST:
            self._sensitive.append(f"{weight.key} ({loss:.1%} in 4)")
            layout = QuantizedLayout(8, layout.group)
            rounded = round_with_feedback(values, products, layout)
            loss = lost(values, rounded.values(layout), products)
        self._losses.append(loss)
        first = 0
        for name in names:
            count = reader.shape(name)[0]
            reader.add(name, rounded.rows(first, first + count), layout)
            first += count
        for parameter in weight.parameters:
            program.integers[parameter] = KeptIntegers(layout)
        return rounded.values(layout)


def _is_rows(source: Source) -> bool:
    """A whole matrix of the checkpoint, as it lies there."""
    return not (source.zeros or source.transpose or source.rows or source.part)


def lost(weight: Tensor, rounded: Tensor, products: Tensor) -> float:
    """Of the squares of outputs, the part that rounding changes: Σ e H eᵀ / Σ w H wᵀ."""
    error = weight - rounded
    whole = float(((weight @ products) * weight).sum())
    return float(((error @ products) * error).sum()) / whole if whole > 0 else 0.0


def products_of(x: Tensor) -> Tensor:
    """Σ x xᵀ over all rows of x [..., K], float32 [K, K]."""
    rows = x.reshape(-1, x.shape[-1])
    total = torch.zeros(rows.shape[1], rows.shape[1])
    for part in rows.split(_ROWS_AT_ONCE):
        own = part.float()
        total += own.T @ own
    return total
