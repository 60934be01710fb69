"""Steps of tree drafting with a head's program: caches in blocks, features by row, two sequences.

A step feeds what has been accepted since the last one, with the target's features, and drafts a
tree level by level: a node reads what its parent's row has handed on. Then a part of one path is
accepted, and a token that was not drafted. Rows that were written with a head's own features are
overwritten by the next step.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from specc.artifact.graph_io import graph_from_json, graph_to_json
from specc.passes.program import Program

BLOCK, BLOCKS = 4, 12
# parents of drafted nodes, -1 is the row before all of them; levels of 3, 3 and 2 nodes
PARENTS = (-1, -1, -1, 0, 0, 2, 3, 5)


@dataclass
class Sequence_:
    """A request.

    Args:
        tokens: known ones; the target has not run over the last.
        handed_on: slot → what its row has handed on, as the last pass wrote it.
        fed: rows in the cache that have the target's features.
    """

    tokens: list[int]
    table: Tensor
    handed_on: dict[int, Tensor]
    fed: int = 0


@dataclass
class Row:
    """A row of a pass: row i of a sequence has token i + 1, and stands at position i."""

    sequence: int
    slot: int
    position: int
    token: int
    feature: Tensor
    is_tapped: bool
    ancestors: int = 0
    parent: int = -1  # slot of the row whose own feature it reads


class TreeDrafts:
    """Runs a head's program.

    Args:
        prompts: tokens of each sequence.
        taps_of: tokens → [T, A · H] hidden states of the target.
    """

    def __init__(
        self,
        program: Program,
        module: torch.nn.Module,
        prompts: Sequence[Sequence[int]],
        taps_of: Callable[[list[int]], Tensor],
    ) -> None:
        self.taps_of = taps_of
        data = json.loads(json.dumps(graph_to_json(program.graph)))
        self._graph = fx.Interpreter(graph_from_json(data))
        self._program = program
        generator = torch.Generator().manual_seed(8)
        tables = torch.randperm(len(prompts) * BLOCKS, generator=generator).int()
        self.sequences = [
            Sequence_(list(tokens), table, {})
            for tokens, table in zip(prompts, tables.view(len(prompts), -1), strict=True)
        ]
        parameters = module.state_dict()
        self._stored: dict[str, Tensor] = dict(program.constants)
        for name, weight in program.weights.items():
            self._stored[name] = torch.cat([parameters[key].detach() for key in weight.parameters])
        for name in program.caches:
            shape = program.placeholder(name).meta["val"].shape[2:]
            rows = torch.randn(len(tables), BLOCK, *shape, generator=generator)
            self._stored[name] = rows

    def step(self, chooser: random.Random, vocab: int) -> list[list[tuple[list[int], Tensor]]]:
        """Draft a tree for each sequence.

        Returns:
            for each, paths of drafted tokens and [V] logits after them; the first path is empty.
        """
        found: list[list[tuple[list[int], Tensor]]] = [[([], root)] for root in self._catch_up()]
        trees = [[chooser.randrange(vocab) for _ in PARENTS] for _ in self.sequences]
        depth = 1
        while level := [node for node in range(len(PARENTS)) if _depth(node) == depth]:
            rows = [
                self._node(b, node, tree[node]) for b, tree in enumerate(trees) for node in level
            ]
            logits = self._run(rows, [len(s.tokens) - 1 for s in self.sequences], is_tree=True)
            places = [(b, node) for b in range(len(trees)) for node in level]
            for (b, node), row in zip(places, logits, strict=True):
                found[b].append(([trees[b][item] for item in _path(node)], row))
            depth += 1
        return found

    def accept(self, b: int, path: Sequence[int], bonus: int) -> None:
        """Take drafted tokens and one that was not, as a target decides."""
        self.sequences[b].tokens += [*path, bonus]

    def _catch_up(self) -> list[Tensor]:
        """Rows of the target's features, those that the last step has drafted again."""
        rows, lasts = [], []
        for b, own in enumerate(self.sequences):
            taps = self.taps_of(own.tokens[:-1])
            for i in range(own.fed, len(own.tokens) - 1):
                rows.append(Row(b, i, i, own.tokens[i + 1], taps[i], True))
            lasts.append(len(rows) - 1)
            own.fed = len(own.tokens) - 1
        logits = self._run(rows, [own.fed for own in self.sequences], is_tree=False)
        return [logits[last] for last in lasts]

    def _node(self, b: int, node: int, token: int) -> Row:
        own, rows = self.sequences[b], len(self.sequences[b].tokens) - 1
        parent = PARENTS[node]
        above = rows - 1 if parent < 0 else rows + parent
        feature = own.handed_on[above]
        position = rows + _depth(node) - 1
        words = sum(1 << item for item in _path(node))
        return Row(b, rows + node, position, token, feature, False, words, above)

    def _run(self, rows: list[Row], lengths: list[int], is_tree: bool) -> Tensor:
        """[rows, V] logits; what rows hand on is kept by slot."""
        counts = [sum(row.sequence == b for row in rows) for b in range(len(self.sequences))]
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
        spec = self._rows(rows)
        inputs: dict[str, Any] = {
            "tokens": torch.tensor([row.token for row in rows]),
            "positions": torch.tensor([row.position for row in rows]),
            "q_start": starts.int(),
            "slot": torch.tensor([row.slot for row in rows]).int(),
            "cache_len": torch.tensor(lengths).int(),
            "ancestors": torch.tensor([[row.ancestors] for row in rows]) if is_tree else None,
            "block_table": torch.stack([own.table for own in self.sequences]),
            "logit_rows": torch.arange(len(rows)),
            **spec,
        }
        names = [str(node.target) for node in self._program.graph.find_nodes(op="placeholder")]
        values = [self._stored[x] if x in self._stored else inputs[x] for x in names]
        with torch.no_grad():
            return self._logits(self._graph.run(*values), rows)

    def _logits(self, output: Any, rows: list[Row]) -> Tensor:
        logits, handed_on = output
        for row, value in zip(rows, handed_on[0], strict=True):
            self.sequences[row.sequence].handed_on[row.slot] = value
        return logits

    def _rows(self, rows: list[Row]) -> dict[str, Tensor]:
        """Features of each row; what it does not read is no number."""
        shapes = {x: self._program.placeholder(x).meta["val"].shape[1] for x in ("features",)}
        shapes["own_features"] = self._program.placeholder("own_features").meta["val"].shape[1]
        made = {key: torch.full((len(rows), int(n)), torch.nan) for key, n in shapes.items()}
        for i, row in enumerate(rows):
            made["features" if row.is_tapped else "own_features"][i] = row.feature
        return {**made, "is_tapped": torch.tensor([[row.is_tapped] for row in rows])}


class PagedDrafts(TreeDrafts):
    """Runs a head's program after `ReadFeatures`: what rows hand on lies in a slab of its own."""

    def __init__(self, program: Program, *args: Any) -> None:
        super().__init__(program, *args)
        for name in ("handed_on", "features"):
            width = program.placeholder(name).meta["val"].shape[2]
            # what nothing was written to is no number
            slab = torch.full((len(self.sequences) * BLOCKS, BLOCK, int(width)), torch.nan)
            self._stored[name] = slab

    def _node(self, b: int, node: int, token: int) -> Row:
        # nobody here knows what was handed on
        self.sequences[b].handed_on = dict.fromkeys(range(BLOCK * BLOCKS), torch.empty(0))
        return super()._node(b, node, token)

    def _rows(self, rows: list[Row]) -> dict[str, Tensor]:
        named = []
        for row in rows:
            if row.is_tapped:
                block = self.sequences[row.sequence].table[row.slot // BLOCK]
                self._stored["features"][block, row.slot % BLOCK] = row.feature
            named.append((row.slot, -1) if row.is_tapped else (-1, row.parent))
        return {"feature_rows": torch.tensor(named, dtype=torch.int32)}

    def _logits(self, output: Any, rows: list[Row]) -> Tensor:
        return output


def _depth(node: int) -> int:
    return len(_path(node))


def _path(node: int) -> list[int]:
    """Nodes from the first level to this one."""
    path = [node]
    while (parent := PARENTS[path[0]]) >= 0:
        path.insert(0, parent)
    return path
