"""The part of a captured step that verifies live nodes alone, whichever these are.

How many first nodes of each tree are live is data (`specc.speculation.live_nodes`): one graph has
a number of rows, which hold the live nodes of one sequence after those of the other, and rows that
are left over belong to no sequence. So the target's pass is that of backends whose passes take any
number of nodes: dead nodes have no row in it. Nothing attends to them, nothing of them is written,
and kernels that look for their work by `q_start` find none. Logits come out at the places of all
nodes, those of dead ones being some row's; no walk reads them, as dead nodes have no parent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from specc.runtime.backends.failed_operator import OperatorError, do_named
from specc.speculation.plans import SpecPlan

# place of `parents` among the arguments of `accept`
_PARENTS = 2
# parents of live nodes, and -1 [B, N]: what acceptance takes for the tree
LIVE_PARENTS = "live_parents"
# inputs of a pass, as of `ModelProgram.forward`, up to the tokens that get logits
_NUM_INPUTS = 8


class LiveRows(NamedTuple):
    """Where the live nodes of B trees of N nodes lie in a pass of R rows.

    Args:
        q_start: [B + 1] int32; sequence b owns rows q_start[b] … q_start[b + 1] - 1.
        place: [R] int64 node of each row, counted through all trees; of rows that no sequence
            owns, some node.
        is_owned: [R] bool.
        row: [B * N] int64 row of each node; of dead ones 0.
        is_live: [B, N] bool.
    """

    q_start: Tensor
    place: Tensor
    is_owned: Tensor
    row: Tensor
    is_live: Tensor


def live_rows(live: Tensor, nodes: Tensor, rows: Tensor) -> LiveRows:
    """Find them, on the device of `live` and without a word of the host.

    Args:
        live: [B] int32 live nodes of each sequence, 0 … N, at most R together.
        nodes: [N] int32, 0 … N - 1.
        rows: [R] int32, 0 … R - 1.
    """
    num_nodes = len(nodes)
    ends = live.cumsum(0, dtype=torch.int32)
    q_start = torch.nn.functional.pad(ends, (1, 0))
    owner = torch.searchsorted(ends, rows, right=True).clamp(max=len(live) - 1)
    node = (rows - q_start[owner]).clamp(0, num_nodes - 1)
    is_live = nodes < live[:, None]
    row = (q_start[:-1, None] + nodes).masked_fill(~is_live, 0)
    place = owner * num_nodes + node
    return LiveRows(q_start, place, rows < ends[-1], row.flatten().long(), is_live)


class LivePass:
    """The verify stage of a static plan for live nodes; see the module.

    Args:
        stage: the one for whole trees, whose pass of the target is made here.
        environment: of the step, with `live`; gets `logits` [B * N, V] and `LIVE_PARENTS`.
        num_seqs: B.
        num_rows: R of the pass.
    """

    def __init__(
        self,
        stage: fx.GraphModule,
        environment: dict[str, Any],
        plan: SpecPlan,
        num_seqs: int,
        num_rows: int,
    ) -> None:
        (self._call,) = (node for node in stage.graph.nodes if node.op == "call_module")
        self._target = stage.get_submodule(str(self._call.target))
        # what the pass takes besides: rows of votes
        self._more = [str(node.target) for node in self._call.args[_NUM_INPUTS:]]
        self._environment = environment
        device = environment["live"].device
        counts = (plan.num_nodes, num_rows)
        self._nodes, self._rows = (
            torch.arange(count, dtype=torch.int32, device=device) for count in counts
        )
        self._words: Tensor = environment["ancestors"].repeat(num_seqs, 1)
        self._parents: Tensor = environment["parents"].expand(num_seqs, -1)

    def run(self) -> None:
        """Pass the live nodes through the target.

        Raises:
            OperatorError: an operator failed.
        """
        env = self._environment
        inputs: list[Tensor] = []
        do_named("finding live nodes", self._gather, inputs)
        try:
            env["logits"] = self._target(*inputs, *(env[name] for name in self._more))
        except Exception as error:
            raise OperatorError.of(self._call, error) from error

    def _gather(self, inputs: list[Tensor]) -> None:
        """The inputs of the pass, and the parents that acceptance reads."""
        env = self._environment
        at = live_rows(env["live"], self._nodes, self._rows)
        env[LIVE_PARENTS] = self._parents.masked_fill(~at.is_live, -1)
        slots, positions = torch.ops.specc.tree_rows(env["cache_len"], self._nodes, env["depths"])
        inputs += [
            env["tokens"].flatten()[at.place],
            positions[at.place],
            at.q_start,
            slots[at.place].masked_fill(~at.is_owned, -1),
            env["cache_len"],
            self._words[at.place],
            env["block_table"],
            at.row,
        ]


def accepts_live(stage: fx.GraphModule) -> fx.GraphModule:
    """The accept stage, with the parents that live nodes have in place of the tree's.

    Args:
        stage: for whole trees, which stays as it is.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(stage.graph, {}))
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        parents = graph.placeholder(LIVE_PARENTS)
    (accept,) = (node for node in graph.nodes if node.target is torch.ops.specc.accept.default)
    accept.update_arg(_PARENTS, parents)
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(stage, graph)


def without_output(stage: fx.GraphModule, name: str) -> fx.GraphModule:
    """A stage that does not compute one of its outputs; the same stage where it has no such one.

    What it makes is not named by its own graph, as modules with weights may be among it.
    """
    (output,) = (node for node in stage.graph.nodes if node.op == "output")
    if name not in output.args[0]:
        return stage
    graph = fx.Graph()
    kept = dict(graph.graph_copy(stage.graph, {}))
    del kept[name]
    graph.output(kept)
    graph.eliminate_dead_code(is_impure_node=_has_effects)
    graph.lint()
    found = fx.GraphModule(stage, graph)
    found.graph.owning_module = None
    return found


def _has_effects(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op != "call_function" or (schema is not None and schema.is_mutable)
