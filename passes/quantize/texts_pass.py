"""A pass of a flat program over texts, with one weight in memory at a time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from specc.passes.program import STATES, Program
from specc.passes.rewrite.tree_recurrence import state_sizes

# what takes the place of a node's own operator: its arguments → its value
Override = Callable[[fx.Node, tuple[Any, ...]], Any]


class TextsPass:
    """Runs the graph of a program over windows of token ids, which are its sequences.

    A value is kept until the last node that reads it has run; caches and states are made for the
    first one.
    Weights are read for each node that needs them.

    Args:
        program: over flat tokens, before the phases of a backend.
        windows: token ids, one or more each.
        read: brings the values of a weight input by its name.
    """

    def __init__(
        self, program: Program, windows: Sequence[Sequence[int]], read: Callable[[str], Tensor]
    ) -> None:
        self._program, self._read = program, read
        self._num_windows, self._longest = len(windows), max(map(len, windows))
        positions = torch.cat([torch.arange(len(window)) for window in windows])
        starts = list(itertools.accumulate(map(len, windows), initial=0))
        self._given: dict[str, Any] = {
            "tokens": torch.tensor(list(itertools.chain.from_iterable(windows))),
            "positions": positions,
            "q_start": torch.tensor(starts, dtype=torch.int32),
            "slot": positions.int(),
            "cache_len": torch.zeros(len(windows), dtype=torch.int32),
            "ancestors": None,
            # a block holds a whole window
            "block_table": torch.arange(len(windows), dtype=torch.int32)[:, None],
            "logit_rows": torch.zeros(0, dtype=torch.int64),
            # all tokens of a window are certain: they change its state, and leave no replay rows
            STATES: torch.tensor(
                [[number, len(window)] for number, window in enumerate(windows)], dtype=torch.int32
            ),
        }

    @torch.inference_mode()
    def run(self, last: fx.Node, override: Override) -> None:
        """Compute everything before a node.

        Args:
            last: which is not computed itself.
            override: called for each node with its arguments, of which weights are left out as
                None; NotImplemented has its own operator run.
        """
        graph = self._program.graph
        left = Counter(user for node in graph.nodes for user in node.all_input_nodes)
        values: dict[fx.Node, Any] = {}

        def value(node: fx.Node) -> Any:
            if node.op == "placeholder" and node.target in self._program.weights:
                return self._read(str(node.target))
            if node not in values:
                values[node] = self._input(node)
            return values[node]

        for node in graph.nodes:
            if node is last:
                return
            if node.op == "placeholder":
                continue
            known = fx.map_arg(node.args, values.get)
            found = override(node, known)
            if found is NotImplemented:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value)
                found = node.target(*args, **kwargs)  # type: ignore[operator]
            values[node] = found
            for item in node.all_input_nodes:
                left[item] -= 1
                if not left[item]:
                    values.pop(item, None)

    def _input(self, node: fx.Node) -> Any:
        name, program = str(node.target), self._program
        if name in program.constants:
            return program.constants[name]
        if name in self._given:
            return self._given[name]
        like = node.meta["val"]
        if name in program.states:
            number, part = program.states[name]
            layer = program.state_layers[number]
            return torch.zeros(state_sizes(layer, part, self._num_windows, 1), dtype=like.dtype)
        # a cache
        sizes = [self._num_windows, self._longest, *map(int, like.shape[2:])]
        return torch.zeros(sizes, dtype=like.dtype)
