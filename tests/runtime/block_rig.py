"""Engines whose draft is a block drafter: every pass and every row of it, beside one by formulas.

Random drafters propose what nobody accepts but by chance, and what they propose changes no output.
So logits of all depths are compared, and the rows that are kept, whatever came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specc.runtime.backends.engine_cache import caches_of
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.scheduling.request import Request
from specc.speculation.plans import SpecPlan
from specc.speculation.tree import TokenTree
from tests.head_reference import hidden_states
from tests.runtime.head_rig import CLOSE, owner_of


@dataclass
class BlockOracle:
    """Compares what a drafter computes in an engine with what it computes from scratch.

    Args:
        reference: of the drafter, as `BlockReference`.
        number: of the draft.
    """

    target: Any
    reference: Any
    number: int = 0
    # rows that the drafter has of a text, fewer than tokens
    rows_behind: int = 0
    num_passes: int = 0
    num_rows: int = 0
    num_nodes: int = 0
    num_confident: int = 0
    sees_confidence: bool = False
    _taps: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_cached(self) -> int:
        """Layers with keys and values."""
        return self.reference.case.num_layers

    def watch(self, core: EngineCore) -> None:
        """Look at every pass of the drafter from here on."""
        model: Any = core.engine.drafts[self.number]
        model.register_forward_hook(lambda _, given, logits: self._look(core, given, logits))

    def reset(self) -> None:
        """Forget requests: those of another engine may have the same names."""
        self._taps.clear()

    def taps(self, request: Request, count: int) -> Tensor:
        """[count, A · H] of the first tokens."""
        known = self._taps.get(request.request_id)
        if known is None or len(known) < count:
            boundaries = self.reference.case.boundaries
            known = hidden_states(self.target, request.token_ids[:count], boundaries)
            self._taps[request.request_id] = known
        return known[:count]

    def check_rows(self, engine: Engine, request: Request) -> None:
        """Keys and values of all tokens that the drafter has read the target's features of."""
        count = request.draft_lens[self.number] - self.rows_behind
        if count < 1:
            return
        taps = self.taps(request, count)
        wanted = [self.reference.kept(taps, layer) for layer in range(self.num_cached)]
        self.compare_rows(engine, request, wanted, count)

    def compare_rows(
        self, engine: Engine, request: Request, wanted: Sequence[tuple[Tensor, Tensor]], count: int
    ) -> None:
        """With keys and values of the first rows, [count, HK, D] each, layer by layer."""
        assert engine.manifest is not None
        caches = caches_of(engine.manifest.models[1 + self.number], engine.cache)
        blocks = engine.cache.block_table([request.blocks])[0].long()
        rows = torch.arange(count)
        # those of hidden states come after them
        for slabs, pair in zip(caches[: len(wanted)], wanted, strict=True):
            for slab, own in zip(slabs, pair, strict=True):
                found = slab[blocks[rows // slab.shape[1]], rows % slab.shape[1]]
                torch.testing.assert_close(found, own, **CLOSE)
        self.num_rows += count

    def check_trees(self, core: EngineCore, plan: SpecPlan) -> None:
        """Look at what children of every node are drawn from, in every step from here on."""
        core.engine.steps[plan.name].before_accept = lambda values: self._look_at_tree(
            core, plan.tree, values
        )

    def _look_at_tree(self, core: EngineCore, tree: TokenTree, values: Any) -> None:
        requests = [owner_of(core, row.tolist()) for row in values["block_table"]]
        fed = [[node for node in level if node not in tree.leaves] for level in tree.levels[:-1]]
        for b, request in enumerate(requests):
            tokens = values["tokens"][b].tolist()
            assert tokens[0] == request.token_ids[-1]
            taps = self.taps(request, request.cache_len)
            if self.sees_confidence and self.reference.case.confidence:
                found = values["confidence"][b].tolist()
                for node in (node for level in fed for node in level):
                    path = [tokens[i] for i in path_to(tree, node)]
                    wanted = self.reference.confidence(taps, tokens[0], path)
                    assert abs(found.pop(0) - float(wanted)) < 1e-4
                    self.num_confident += 1
            for depth, nodes in enumerate(fed):
                q = values[f"q_{depth}"]
                # a row for each node, or one for all of them
                found = q.view(len(requests), -1, q.shape[-1])[b].expand(len(nodes), -1)
                for row, node in zip(found, nodes, strict=True):
                    path = [tokens[i] for i in path_to(tree, node)]
                    wanted = self.after(request, taps, tokens[0], path)
                    torch.testing.assert_close(row, wanted, **CLOSE)
                    self.num_nodes += 1

    def after(self, request: Request, taps: Tensor, anchor: int, path: Sequence[int]) -> Tensor:
        """[V] logits of the children of a node."""
        found: Tensor = self.reference.after(taps, anchor, path)
        return found

    def left(self, taps: Tensor, anchor: int, count: int, columns: int) -> Tensor:
        """[count, columns] that a pass leaves: logits, and where they are read, hidden states."""
        wanted: Tensor = self.reference.proposed(taps, anchor)[:count]
        if columns > wanted.shape[1]:
            first = 0 if self.reference.case.from_anchor else 1
            hidden = self.reference.hidden(taps, anchor)[first:]
            wanted = torch.cat([wanted, hidden[:count]], 1)
        return wanted

    def _look(self, core: EngineCore, given: Sequence[Any], logits: Tensor) -> None:
        q_start, cache_len, table, logit_rows = given[2], given[4], given[6], given[7]
        requests = [owner_of(core, row.tolist()) for row in table]
        depth = len(logit_rows) // len(requests)
        if not depth:
            return
        owner = [
            b for b in range(len(requests)) for _ in range(int(q_start[b]), int(q_start[b + 1]))
        ]
        found: dict[int, list[Tensor]] = {}
        for row, i in zip(logits, logit_rows.tolist(), strict=True):
            found.setdefault(owner[i], []).append(row)
        for b, rows in found.items():
            request = requests[b]
            assert int(cache_len[b]) + self.rows_behind == request.cache_len
            assert request.cache_len == len(request.token_ids) - 1
            taps = self.taps(request, request.cache_len)
            if getattr(self.reference.case, "lilicorr", None):
                # the last row is the context's, of which steps read what it is projected from
                context = rows.pop()[-self.reference.case.width :]
                for known in self.reference.context(taps)[-1:]:
                    torch.testing.assert_close(context, known, **CLOSE)
            wanted = self.left(taps, request.token_ids[-1], len(rows), logits.shape[1])
            torch.testing.assert_close(torch.stack(rows), wanted, **CLOSE)
            self.num_passes += 1


class MedusaOracle(BlockOracle):
    """Compares what heads compute in an engine with their formulas. They keep no rows."""

    def check_rows(self, engine: Engine, request: Request) -> None:
        assert request.draft_lens[self.number] == 0
        self.num_rows += 1

    def _look(self, core: EngineCore, given: Sequence[Any], logits: Tensor) -> None:
        cache_len, table, logit_rows = given[4], given[6], given[7]
        requests = [owner_of(core, row.tolist()) for row in table]
        assert logit_rows.tolist() == list(range(len(requests)))
        found = logits.view(len(requests), -1, logits.shape[1])
        for b, request in enumerate(requests):
            assert int(cache_len[b]) == request.cache_len == len(request.token_ids) - 1
            taps = self.taps(request, request.cache_len)
            wanted = self.reference.proposed(taps, request.token_ids[-1])
            torch.testing.assert_close(found[b], wanted, **CLOSE)
            self.num_passes += 1


def path_to(tree: TokenTree, node: int) -> list[int]:
    """Nodes from below the root to a node, itself the last."""
    path: list[int] = []
    while node > 0:
        path.insert(0, node)
        node = tree.parents[node]
    return path
