"""Weights of its target that a draft has in place of its own, in the programs of both."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from specc.artifact.decoders.kept_integers import KeptIntegers
from specc.passes.drafters.head_source import shared_parameters
from specc.passes.drafters.head_spec import HeadSpec
from specc.passes.program import Program, Weight


def shared_weights(
    head: HeadSpec, module: nn.Module, target: Program
) -> Iterator[tuple[str, Weight]]:
    """Parameters of a draft that are its target's, and each weight that the target has of them."""
    names = shared_parameters(head, module) if head.shared else {}
    for parameter, name in names.items():
        for weight in dict.fromkeys(target.weights.values()):
            if weight.parameters == (name,):
                yield parameter, weight


def integers_of_target(
    head: HeadSpec, module: nn.Module, target: Program
) -> dict[str, KeptIntegers]:
    """Parameters of a draft that are its target's → how the target holds its integers of them.

    Args:
        target: its program, after the last pass.
    """
    return {
        parameter: KeptIntegers(weight.quantized)
        for parameter, weight in shared_weights(head, module, target)
        # an order of columns is a matter of the rows that they are multiplied with
        if weight.quantized is not None and not _order(target, weight)
    }


def _order(program: Program, weight: Weight) -> bytes:
    kept = program.integers.get(weight.parameters[0])
    return b"" if kept is None else kept.order
