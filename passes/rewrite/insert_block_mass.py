"""Let passes of a target say how much attention each block gets, where they are asked to."""

from __future__ import annotations

import torch
from torch import fx

from specc.kernels import ops
from specc.passes.base import Pass, PassResult
from specc.passes.program import MASS, Program, add_placeholder, bind_args, emit_call

_SHARED = ("q_start", "position", "slot", "cache_len", "ancestors", "block_table")


def attention_is_summed(program: Program) -> bool:
    """Every attention over blocks has a sum of what each of them gets."""
    calls = program.calls(ops.tree_attention, ops.attend)
    return len(calls) == len(program.calls(ops.block_mass)) == len(program.layers) > 0


class InsertBlockMass(Pass):
    """`specc.block_mass` after each attention, over the same queries and the same cache.

    All layers add to one input, `mass`, which follows the other inputs of the runtime. Where it has
    no columns, or its rows say that nobody votes, the program computes what it did before, so one
    program serves both.

    It is the last pass: rewrites before it look for values that attention alone reads.
    """

    ensures = (attention_is_summed,)

    def run(self, program: Program) -> PassResult:
        result = PassResult()
        table = program.placeholder("block_table")
        # rows and columns are the runtime's choice
        value = table.meta["val"].new_empty(table.meta["val"].shape, dtype=torch.float32)
        last = program.placeholder(program.runtime_inputs[-1])
        mass = add_placeholder(program, MASS, value, last)
        program.runtime_inputs += (MASS,)
        for node in program.calls(ops.tree_attention, ops.attend):
            _insert(program.graph, node, mass)
            result.rewrites += 1
        return result


def erase_block_mass(graph: fx.Graph) -> None:
    """Leave out what the pass has put in: it is a compilation's last one."""
    for node in graph.find_nodes(op="call_function", target=ops.block_mass):
        graph.erase_node(node)
    for node in graph.find_nodes(op="placeholder", target=MASS):
        graph.erase_node(node)


def _insert(graph: fx.Graph, attention: fx.Node, mass: fx.Node) -> None:
    bound = bind_args(attention)
    with graph.inserting_after(attention):
        emit_call(
            graph,
            ops.block_mass,
            bound["q"],
            bound["k_cache"],
            *(bound[name] for name in _SHARED),
            mass,
            scale=bound["scale"],
        )
