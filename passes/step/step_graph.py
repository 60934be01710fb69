"""Graphs of a step's stages: how they are built, and the names that they hand to each other."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, fx

from specc.lora.target_adapters import NO_ADAPTERS, TargetAdapters
from specc.speculation.tree import WORD_BITS

aten = torch.ops.aten
specc = torch.ops.specc

TARGET = "target"
# [B, C] i64 tokens up to cache_len, [B] i32 committed rows, [B, n] i32, [B, 6] f32, [B, 4] i64
STEP_INPUTS = ("last_tokens", "cache_len", "block_table", "sampling_values", "sampling_words")
# [blocks, block_size] i32 tokens of the sequences, paged as the caches are
HISTORY = "history"
# [B, S] f32 of plans that vote; [B, L] i64 proposals of the host's index, then -1
VOTE_WEIGHTS, PROPOSALS = "vote_weights", "proposals"
# [B, C] i64 columns of the block table that views see, of one view after the other
CHOSEN_BLOCKS = "chosen_blocks"
# [M, n] f32 attention that blocks get, see `block_mass_reference`
BLOCK_MASS = "block_mass"
# [B, 2] i32 of targets whose layers keep states: places in these, and how many nodes are certain
STATES = "states"
# the same of drafts whose layers keep states, for nodes after the committed ones
DRAFT_STATES = "draft_states"
# [B] i32 of targets with adapters: that of each sequence, -1 for none
ADAPTERS = "adapters"


class StepGraph:
    """A stage under construction: named inputs, calls, named outputs.

    Args:
        constants: of the step; stages add theirs, which become inputs as they are asked for.
        inputs: names of the environment.
        is_padded: model programs write the nodes of a pass to rows that follow each other.
        block_size: rows of a block of the caches, which views count in.
        windowed: self-drafts whose programs see a part of the cache by themselves.
        stateful: models whose layers keep states.
        adapters: that the target takes for each token.
    """

    def __init__(
        self,
        constants: dict[str, Tensor],
        *inputs: str,
        is_padded: bool = False,
        block_size: int = 0,
        windowed: Collection[str] = (),
        stateful: Collection[str] = (),
        adapters: TargetAdapters = NO_ADAPTERS,
    ) -> None:
        self.graph = fx.Graph()
        self.stateful = stateful
        self.adapters = adapters
        self.is_padded = is_padded
        self.block_size = block_size
        self.windowed = windowed
        self._constants = constants
        self._inputs = {name: self.graph.placeholder(name) for name in inputs}
        self._last = next(reversed(self._inputs.values()))

    def __getitem__(self, name: str) -> fx.Node:
        """A value of the environment."""
        if name not in self._inputs:
            with self.graph.inserting_after(self._last):
                self._last = self._inputs[name] = self.graph.placeholder(name)
        return self._inputs[name]

    def __contains__(self, name: str) -> bool:
        """Whether a value of the environment is an input already."""
        return name in self._inputs

    def constant(self, name: str, value: Tensor) -> fx.Node:
        """A tensor that the step carries; one name is one value."""
        known = self._constants.setdefault(name, value)
        assert known is value or torch.equal(known, value), f"two constants {name}"
        return self[name]

    def call(self, target: Callable, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def parts(self, target: Callable, count: int, *args: Any) -> list[fx.Node]:
        """Call an operator of several results."""
        made = self.call(target, *args)
        return [self.call(operator.getitem, made, i) for i in range(count)]

    def model(self, name: str, *inputs: fx.Node | None) -> fx.Node:
        """Call a model program with its runtime inputs; returns logits [R, V]."""
        return self.graph.call_module(name, inputs)

    @property
    def batch(self) -> fx.Node:
        return self.call(aten.sym_size.int, self["last_tokens"], 0)

    def flat(self, node: fx.Node) -> fx.Node:
        return self.call(aten.reshape.default, node, [-1])

    def reshape(self, node: fx.Node, *sizes: Any) -> fx.Node:
        return self.call(aten.reshape.default, node, list(sizes))

    def cat(self, *nodes: fx.Node) -> fx.Node:
        """Side by side: [B, ·] each."""
        return nodes[0] if len(nodes) == 1 else self.call(aten.cat.default, list(nodes), 1)

    def rows(
        self, nodes: fx.Node, depths: fx.Node, cache_len: fx.Node | None = None
    ) -> list[fx.Node]:
        """Slots [B * M] i32 and positions [B * M] i64 of nodes [M], after so many rows."""
        cache_len = self["cache_len"] if cache_len is None else cache_len
        return self.parts(specc.tree_rows.default, 2, cache_len, nodes, depths)

    def adapter_rows(self, count: int) -> list[fx.Node]:
        """[B * count, 1] adapter of each of `count` tokens of each sequence; [] where there are
        none: what a pass of the target is given after its states.
        """
        if not self.adapters.names:
            return []
        wide = self.call(aten.unsqueeze.default, self[ADAPTERS], 1)
        wide = self.call(aten.expand.default, wide, [self.batch, count])
        return [self.reshape(wide, -1, 1)]

    def multiple(self, size: fx.Node, factor: int, extra: int = 0) -> fx.Node:
        return self.call(operator.add, self.call(operator.mul, size, factor), extra)

    def arange(self, start: Any, end: Any, step: int, dtype: torch.dtype) -> fx.Node:
        return self.call(
            aten.arange.start_step, start, end, step, dtype=dtype, device=torch.device("cpu")
        )

    def repeat_rows(self, node: fx.Node, batch: fx.Node) -> fx.Node:
        """[M, W] → [B * M, W]."""
        return self.call(aten.repeat.default, node, [batch, 1])

    def expand_rows(self, node: fx.Node, width: int) -> fx.Node:
        """[width] → [B, width], without a copy."""
        wide = self.call(aten.unsqueeze.default, node, 0)
        return self.call(aten.expand.default, wide, [self.batch, width])

    def column(self, node: fx.Node, start: int, stop: int) -> fx.Node:
        return self.call(aten.slice.Tensor, node, 1, start, stop)

    def part(self, node: fx.Node, dim: int, start: int, stop: int, size: int) -> fx.Node:
        """Of a dimension of this size; all of it is the node itself."""
        if (start, stop) == (0, size):
            return node
        return self.call(aten.slice.Tensor, node, dim, start, stop)

    def node_rows(self, node: fx.Node, start: int, stop: int, count: int) -> fx.Node:
        """[B * count, W] → [B * (stop - start), W], of some nodes of each sequence."""
        if (start, stop) == (0, count):
            return node
        words = -(-count // WORD_BITS)
        wide = self.reshape(node, self.batch, count, words)
        return self.reshape(self.part(wide, 1, start, stop, count), -1, words)

    def last(self, node: fx.Node, count: int) -> fx.Node:
        """The last columns."""
        return self.call(aten.slice.Tensor, node, 1, -count)

    def select(self, node: fx.Node, name: str, columns: list[int], width: int) -> fx.Node:
        """Columns of [B, width] in this order."""
        if columns == list(range(width)):
            return node
        return self.call(
            aten.index_select.default, node, 1, self.constant(name, torch.tensor(columns))
        )

    def finish(self, **outputs: fx.Node) -> fx.Graph:
        self.graph.output(outputs)
        self.graph.lint()
        return self.graph


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def slab_name(model: str, index: int) -> str:
    """Environment name of a model's cache slab."""
    return f"{model}_slab_{index}"


def state_names(model: str, index: int) -> tuple[str, str]:
    """Environment names of a slab of a model's states, and of that of their replay rows."""
    return f"{model}_states_{index}", f"{model}_replay_{index}"


def seen_name(draft: str) -> str:
    """Environment name of how many tokens [B] int32 of each sequence a draft's states have seen."""
    return f"seen_by_{draft}"


def slots_name(model: str) -> str:
    """Environment name of the rows in which a model holds the tree's nodes."""
    return f"slot_of_{model}"
