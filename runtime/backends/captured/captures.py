"""How parts of a step become graphs: run once, then captured one after another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specc.errors import EngineError
from specc.runtime.backends.failed_operator import OperatorError
from specc.runtime.backends.graph_device import Graph, GraphDevice


class CaptureWarning(UserWarning):
    """A step runs operator by operator, because it could not be captured."""


class LoneGraph(NamedTuple):
    """A graph and the step that it was captured from, whose constants it reads at each replay."""

    graph: Graph
    run: Callable[[], object]

    def replay(self) -> None:
        self.graph.replay()


def warm_up(parts: Sequence[Callable[[], object]], what: str) -> None:
    """Run once: this compiles and allocates what the first run does.

    Args:
        what: they are, for errors.
    Raises:
        EngineError: one of them cannot run.
    """
    try:
        for part in parts:
            part()
    except OperatorError as error:
        raise EngineError(
            f"{what} cannot run: {error}",
            "a step whose operators run on this device, and memory for them",
            "lower max_num_seqs if memory ran out; --backend eager runs the engine without"
            " the kernels",
        ) from error


def capture_parts(
    device: GraphDevice, parts: Sequence[Callable[[], object]], what: str
) -> list[Graph] | None:
    """A graph of each part; where that fails a warning says so, and there are none.

    Args:
        parts: in their order; they have run.
        what: they are, for the warning.
    """
    graphs: list[Graph] = []
    try:
        for part in parts:
            if graphs:
                # its capture has computed nothing, and a device may run what it captures once
                # before: what this part reads has to be there
                graphs[-1].replay()
            graphs.append(device.capture(part))
        return graphs
    except OperatorError as error:
        warnings.warn(
            f"{what} cannot be captured and runs operator by operator, which is slower: {error}",
            CaptureWarning,
            stacklevel=4,
        )
        return None
