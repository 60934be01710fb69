"""Engines whose draft is a head: every pass and every row of it, beside a head without caches.

Random heads propose what nobody accepts but by chance, and what they propose changes no output. So
the logits of all nodes are compared, and the rows that are kept, whatever came before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specc.config import CompileConfig
from specc.runtime.backends.engine_cache import features_of
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.scheduling.request import Request
from specc.speculation.dynamic_tree import BudgetTree, DynamicTree
from specc.speculation.plans import SpecPlan
from tests.head_reference import Reference, hidden_states
from tests.heads import VOCAB
from tests.mtp import MtpReference
from tests.runtime.tap_rows import serve_each

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
BLOCK, CHUNK = 4, 7
CHAIN, TREE = SpecPlan.from_widths((1, 1, 1)), SpecPlan.from_widths((2, 2, 1))
DYNAMIC = SpecPlan.from_dynamic(DynamicTree(6, 3, 3))
BUDGET = SpecPlan.from_dynamic(BudgetTree.of((2, 3, 2)))


def options(**changes: Any) -> CompileConfig:
    config = CompileConfig(
        plans=(CHAIN, TREE, DYNAMIC),
        max_batch_size=4,
        max_seq_len=64,
        block_size=BLOCK,
        # prompts of more than one chunk
        prefill_chunk=CHUNK,
        backend="eager",
        probe=False,
    )
    return replace(config, **changes)


@dataclass
class HeadOracle:
    """Compares what a head computes in an engine with what it computes from scratch.

    Args:
        number: of the draft.
    """

    target: Any
    reference: Reference | MtpReference
    number: int = 0
    num_nodes: int = 0
    num_rows: int = 0
    depths: set[int] = field(default_factory=set)
    _tokens: dict[tuple[str, int], int] = field(default_factory=dict)
    # of a request: as many as were needed so far
    _taps: dict[str, Tensor] = field(default_factory=dict)
    # of the tokens of a request, and a path after them
    _features: dict[tuple[str, int, tuple[int, ...]], Tensor] = field(default_factory=dict)

    def watch(self, core: EngineCore) -> None:
        """Look at every pass of the head from here on."""
        model: Any = core.engine.drafts[self.number]
        model.register_forward_hook(lambda _, given, logits: self._look(core, given, logits))

    def reset(self) -> None:
        """Forget requests: those of another engine may have the same names."""
        self._taps.clear()
        self._features.clear()
        self._tokens.clear()

    def taps(self, request: Request, count: int) -> Tensor:
        """[count, A · H] of the first tokens."""
        known = self._taps.get(request.request_id)
        if known is None or len(known) < count:
            boundaries = self.reference.case.boundaries
            known = hidden_states(self.target, request.token_ids[:-1], boundaries)
            self._taps[request.request_id] = known
        return known[:count]

    def logits(self, request: Request, path: tuple[int, ...]) -> Tensor:
        """[V] after a path of drafted tokens; see `Reference.logits`."""
        ids = [*request.token_ids[1:], *path]
        g = self._feature(request, path)
        return self.reference.run(g, ids)[1][-1]

    def _feature(self, request: Request, path: tuple[int, ...]) -> Tensor:
        """[n, d] features of all rows up to the last of a path."""
        key = request.request_id, len(request.token_ids), path
        if key not in self._features:
            if path:
                g = self._feature(request, path[:-1])
                handed_on, _ = self.reference.run(g, [*request.token_ids[1:], *path[:-1]])
                self._features[key] = torch.cat([g, handed_on[-1:]])
            else:
                taps = self.taps(request, len(request.token_ids) - 1)
                self._features[key] = self.reference.project(taps)
        return self._features[key]

    def check_rows(self, engine: Engine, request: Request) -> None:
        """What the head has handed on of all that it has read with the target's features."""
        count = request.draft_lens[self.number] - 1
        if count < 1:
            return
        g = self.reference.project(self.taps(request, count))
        wanted, _ = self.reference.run(g, request.token_ids[1 : count + 1])
        assert engine.manifest is not None
        slab = features_of(engine.manifest.models[1 + self.number], engine.cache)
        blocks = engine.cache.block_table([request.blocks])[0].long()
        rows = torch.arange(count)
        found = slab[blocks[rows // slab.shape[1]], rows % slab.shape[1]]
        torch.testing.assert_close(found, wanted, **CLOSE)
        self.num_rows += count

    def _look(self, core: EngineCore, given: Sequence[Any], logits: Tensor) -> None:
        tokens, _, q_start, slot, cache_len, ancestors, table, logit_rows, _ = given
        owner = [
            b for b in range(len(q_start) - 1) for _ in range(int(q_start[b]), int(q_start[b + 1]))
        ]
        requests = [owner_of(core, row.tolist()) for row in table]
        for i, b in enumerate(owner):
            self._tokens[requests[b].request_id, int(slot[i])] = int(tokens[i])
        for row, i in zip(logits, logit_rows.tolist(), strict=True):
            request, length = requests[owner[i]], int(cache_len[owner[i]])
            path: list[int] = []
            if ancestors is not None:
                # node 0 is the root, which is no drafted token
                bits = int(ancestors[i, 0])
                nodes = [node for node in range(1, 63) if bits >> node & 1]
                path = [self._tokens[request.request_id, length + node] for node in nodes]
            assert length == request.cache_len - 1 == len(request.token_ids) - 2
            torch.testing.assert_close(row, self.logits(request, tuple(path)), **CLOSE)
            self.num_nodes += 1
            self.depths.add(len(path))


def owner_of(core: EngineCore, table: list[int]) -> Request:
    (found,) = (
        s for s in core.scheduler.running if s.blocks and table[: len(s.blocks)] == s.blocks
    )
    return found


def load(path: Any, **limits: Any) -> Engine:
    """Open an engine; what was never written in its caches is large."""
    engine = Engine.load(path, **limits)
    for slabs in engine.cache.slabs.values():
        for number, slab in enumerate(slabs):
            generator = torch.Generator(device=slab.device).manual_seed(3 + number)
            slab.normal_(0.0, 30.0, generator=generator)
    if engine.cache.states is not None:
        for slab in (*engine.cache.states.states, *engine.cache.states.replay):
            slab.normal_(0.0, 30.0)
    return engine


def serve(
    core: EngineCore,
    oracle: Any,
    prompts: Sequence[list[int]],
    num_tokens: int = 12,
    every: int = 2,
    **params: Any,
) -> list[Request]:
    """Requests that come one after the other; the head's rows are compared after every step."""
    return serve_each(core, oracle.check_rows, prompts, num_tokens, every, **params)


def prompts_of(block_size: int, seed: int = 5) -> list[list[int]]:
    """Of several lengths; some share beginnings, one of whole blocks and then another token."""
    generator = torch.Generator().manual_seed(seed)

    def text(length: int) -> list[int]:
        return torch.randint(0, VOCAB, (length,), generator=generator).tolist()

    prefix = text(3 * block_size)
    return [
        text(1), prefix + text(4), text(20), prefix + text(3), prefix[: 2 * block_size] + text(2),
        prefix + text(1),
    ]  # fmt: skip
