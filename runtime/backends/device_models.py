"""The models of an engine on a device, and what ranks that share the target make of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, fx, nn

from specc.runtime.backends.graph_device import GraphDevice

# of a stage's graph, the name of its plan, and names of the plan's constants
Adapt = Callable[[fx.GraphModule, str, Collection[str]], object]


def leave_alone(graph: fx.GraphModule, plan: str, constants: Collection[str]) -> None:
    """Changes nothing about a stage."""


class DeviceProgram(Protocol):
    """A model's program on a device; inputs and result as of `ModelProgram.forward`."""

    name: str
    weights: Any

    def __call__(self, *inputs: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class DeviceModels:
    """The models of an engine on a device, target first.

    Args:
        between: name → program, as passes between steps call it.
        within: name → module, as steps call it; the target's second programs are among them.
        adapt: called with the graph of each stage of a step, which it may change; see `Adapt`.
    """

    between: Mapping[str, DeviceProgram]
    within: Mapping[str, nn.Module]
    adapt: Adapt = leave_alone


class DeviceRanks(Protocol):
    """Ranks of an engine whose steps are captured, in one of their processes."""

    def join(self, graphs: GraphDevice, models: DeviceModels) -> tuple[GraphDevice, DeviceModels]:
        """Called once, when the models are loaded and no step is.

        Args:
            models: on it, this rank's part of the target first.
        Returns:
            both as steps are to use them.
        Raises:
            SpeccError: another rank is lost, or could not load its part.
        """
        ...
