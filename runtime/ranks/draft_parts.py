"""Draft stages whose drafts live on several ranks: each rank's part, and what rank 0 waits for.

A value of a stage belongs to the ranks of the drafts that it follows from. What follows from drafts
of one other rank alone is that rank's part; what follows from none is computed wherever it is
needed; the rest (merging, voting, what verification reads) is rank 0's. So rank 0 asks for all
parts at once, does its own, and then takes what the others found.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

# inputs of a draft stage that other ranks are given: dtype and dimensions
SENT = {
    "last_tokens": (torch.int64, 2),
    "cache_len": (torch.int32, 1),
    "block_table": (torch.int32, 2),
    "sampling_values": (torch.float32, 2),
    "sampling_words": (torch.int64, 2),
}


@dataclass(frozen=True)
class Part:
    """What one rank computes of a draft stage.

    Args:
        rank: 1 or more.
        graph: from the inputs of the stage that it needs to a tuple of its results.
        nodes: of the whole stage that nobody else computes.
        results: those of them that others read, in the order of the results.
    """

    rank: int
    graph: fx.GraphModule
    nodes: frozenset[fx.Node]
    results: tuple[fx.Node, ...]

    @property
    def inputs(self) -> list[str]:
        """Names in the environment of the step."""
        return [str(node.target) for node in self.graph.graph.find_nodes(op="placeholder")]


def parts_of(
    stage: fx.GraphModule, homes: Mapping[str, int], constants: Collection[str]
) -> list[Part]:
    """Parts of the ranks that have drafts of a stage, but for rank 0, in the order of ranks.

    Args:
        homes: name of a model → its rank; of others it is rank 0.
        constants: of the step, which all ranks have. Other inputs than these and `SENT` are rank
            0's alone: its history of tokens, and what its host proposes.
    """
    owners = _owners(stage.graph, homes, {*constants, *SENT})
    ranks = sorted({rank for item in owners.values() for rank in item} - {0})
    return [part for rank in ranks if (part := _part(stage, owners, rank)) is not None]


def asked_of(parts: Sequence[Part], constants: Collection[str]) -> list[str]:
    """Inputs that ranks are given for their parts; constants of the step all have."""
    return sorted({name for part in parts for name in part.inputs} - set(constants))


def leave_rows(stage: fx.GraphModule, homes: Mapping[str, int]) -> None:
    """Leave moves of rows to the ranks that have the caches; changes the stage's graph.

    Args:
        homes: draft → its rank, where that is not rank 0.
    """
    graph = stage.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.specc.commit_kv.default):
        slab = node.args[0]
        if any(str(slab.target).startswith(f"{name}_slab_") for name in homes):
            graph.erase_node(node)
            if not slab.users:
                graph.erase_node(slab)
    stage.recompile()


def leave_parts(
    stage: fx.GraphModule,
    parts: Sequence[Part],
    asked: Sequence[str],
    led: Collection[str],
    ask: Callable[..., Any],
    take: Callable[[Any], list[Any]],
) -> None:
    """Rewrite a stage to that of rank 0: parts of others are asked for, and taken.

    Args:
        stage: of all ranks; it becomes that of rank 0.
        asked: names of inputs that the others are given.
        led: models whose passes all ranks run; they come after the parts, since a rank that waits
            to be rid of its results cannot take part in one.
        ask: given these inputs; returns what `take` is given.
        take: returns the results of all parts, one after the other.
    """
    old, new = stage.graph, fx.Graph()
    results = [node for part in parts for node in part.results]
    elsewhere = _elsewhere(old, parts)
    made: dict[fx.Node, fx.Node] = {}
    late: list[fx.Node] = []
    waits = set(results)
    inputs = {node.target: node for node in old.find_nodes(op="placeholder")}
    for node in inputs.values():
        if node.target in asked or any(user not in elsewhere for user in node.users):
            made[node] = new.node_copy(node)
    number = new.call_function(ask, tuple(made[inputs[name]] for name in asked))
    (output,) = old.find_nodes(op="output")
    for node in old.nodes:
        if node in made or node in elsewhere or node is output:
            continue
        is_led = node.op == "call_module" and node.target in led
        if is_led or waits.intersection(node.all_input_nodes):
            waits.add(node)
            late.append(node)
        else:
            made[node] = new.node_copy(node, made.__getitem__)
    found = new.call_function(take, (number,))
    for place, node in enumerate(results):
        made[node] = new.call_function(operator.getitem, (found, place))
    for node in late:
        made[node] = new.node_copy(node, made.__getitem__)
    new.node_copy(output, made.__getitem__)
    stage.graph = new
    stage.recompile()


def _owners(
    graph: fx.Graph, homes: Mapping[str, int], known: Collection[str]
) -> dict[fx.Node, frozenset[int]]:
    """Node → ranks of the models, and of the inputs, that it follows from."""
    owners: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        own: set[int] = set()
        if node.op == "call_module":
            own = {homes.get(str(node.target), 0)}
        elif node.op == "placeholder" and node.target not in known:
            own = {0}
        owners[node] = frozenset(own).union(*(owners[item] for item in node.all_input_nodes))
    return owners


def _part(
    stage: fx.GraphModule, owners: Mapping[fx.Node, frozenset[int]], rank: int
) -> Part | None:
    own = {node for node, item in owners.items() if item == {rank} and node.op != "output"}
    results = tuple(n for n in stage.graph.nodes if n in own and not own.issuperset(n.users))
    needed = set(own)
    for node in reversed(list(stage.graph.nodes)):
        if node in needed:
            needed.update(node.all_input_nodes)
    if not results:
        return None
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in stage.graph.nodes:
        if node in needed:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] for node in results))
    return Part(rank, fx.GraphModule(stage, graph), frozenset(own), results)


def _elsewhere(graph: fx.Graph, parts: Sequence[Part]) -> set[fx.Node]:
    """Nodes that rank 0 does not compute: of other parts, and what only these read."""
    gone = {node for part in parts for node in part.nodes}
    for node in reversed(list(graph.nodes)):
        if node.users and gone.issuperset(node.users):
            gone.add(node)
    return gone
