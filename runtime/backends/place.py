"""Put the graphs of an engine on a device: they are stored without one."""

from __future__ import annotations

import torch
from torch import fx


def place(graph: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Let every operator that makes or moves tensors use this device; changes the graph.

    Programs are traced without a device of their own, so whatever device they name is the one
    that they were traced on.
    """
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": device}
    graph.recompile()
    return graph
