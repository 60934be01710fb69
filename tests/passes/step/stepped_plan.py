"""Steps of a plan over fake models, one after the other, as a runner takes them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specc.artifact.graph_io import graph_from_json
from specc.kernels import ops as _ops  # noqa: F401
from specc.kernels.reference.accept import accept_reference
from specc.passes.step.fuse_step import fuse_step
from specc.passes.step.step_graph import HISTORY, PROPOSALS, TARGET, VOTE_WEIGHTS, slab_name
from specc.runtime.backends.captured.step_buffers import PADDING
from specc.sampling.rows import Rule
from specc.speculation.plans import VOTE, SpecPlan
from tests.passes.step.grown_trees import Proposed, Request, drawn_from
from tests.passes.step.reading_models import BLOCK, NOTHING, VOCAB, Reader, logits_of

# blocks of a sequence
WIDTH = 40


def requests_of(plan: SpecPlan, seed: int) -> list[Request]:
    """One of each kind that the plan may serve, and one more whose text is a single token."""
    dice = random.Random(seed)

    def text(length: int) -> tuple[int, ...]:
        # few different tokens, so that lookups find something
        letters = dice.choice([2, 3, VOCAB])
        return tuple(dice.randrange(letters) for _ in range(length))

    plain, filtered = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0), (0.9, 0.95, 0.0, 1.0, 0.0, 0.0)
    penalized, warm = (1.3, 1.0, 0.05, 1.4, 0.3, 0.2), (1.1, 1.0, 0.0, 1.0, 0.0, 0.0)
    rows = [
        (plain, Rule.COUPLED, 0),
        (plain, Rule.SWOR, 3),
        (filtered, Rule.COUPLED, 0),
        (penalized, Rule.DELTA, 0),
        (warm, Rule.MSS, 0),
        (penalized, Rule.MSS, 4),
        (warm, Rule.SWOR, 5),
        (filtered, Rule.SWOR, 0),
    ]
    made = []
    for values, rule, top_k in rows:
        if values == plain or rule in plan.rules:
            known = text(dice.choice([1, 2, 5, 9, 14, 20]))
            words = (dice.getrandbits(62), top_k, int(rule), min(3, len(known)))
            made.append(Request(known, values, words))
    return [Request(text(1), warm, (5, 0, int(Rule.COUPLED), 1)), *made]


class Stepped:
    """A plan's step, the caches of its models, and the texts of its sequences.

    Row 1 of every batch is padding, whose block table names other sequences' blocks. Before each
    step, rows that a model need not have are spoiled.

    Args:
        requests: the first state of each sequence.
        seed: of the proposals and the votes' weights.
        num_more: last tokens that rows have beyond those that the plan reads.
    """

    def __init__(
        self, plan: SpecPlan, requests: list[Request], seed: int = 0, num_more: int = 1
    ) -> None:
        self.plan = plan
        self.requests = requests
        self.rows = [0, *range(2, len(requests) + 1)]
        self.program = json.loads(
            json.dumps(fuse_step(plan, dict.fromkeys((TARGET, *plan.model_names), 1)).to_json())
        )
        self.constants = {
            name: torch.tensor(value["values"], dtype=getattr(torch, value["dtype"]))
            for name, value in self.program["constants"].items()
        }
        self.num_last = plan.catch_up + num_more
        blocks = len(requests) * WIDTH
        torch.manual_seed(seed)
        # blocks in no order, so that a slot that is taken for a row shows
        own = torch.randperm(blocks).view(len(requests), WIDTH)
        self.table = torch.zeros(len(requests) + 1, WIDTH, dtype=torch.int32)
        self.table[self.rows] = own.int()
        self.models = {
            name: Reader(name, torch.full((1, 2, blocks, BLOCK, 1, 1), float(NOTHING)))
            for name in (TARGET, *plan.model_names)
        }
        self.graphs = [
            graph_from_json(stage["graph"], self.models) for stage in self.program["stages"]
        ]
        self.history = torch.full((blocks, BLOCK), NOTHING, dtype=torch.int32)
        self._dice = random.Random(seed)
        # rows of each model that are committed
        self.lengths = {name: [0] * len(requests) for name in self.models}
        for b, request in enumerate(requests):
            committed = len(request.text) - 1
            for name in self.models:
                # a draft may lack as much as its first level feeds
                held = committed if name == TARGET else max(0, committed + 1 - plan.catch_up)
                self.lengths[name][b] = held
                for slot in range(held):
                    self.models[name].write(self.blocks_of(b), slot, request.text[slot])
            for position in range(committed):
                self.record(b, position, request.text[position])

    def blocks_of(self, b: int) -> list[int]:
        return self.table[self.rows[b]].tolist()

    def _places(self, b: int, first: int) -> tuple[Tensor, Tensor]:
        """Blocks and rows of all slots of a sequence from `first` on."""
        slots = torch.arange(first, WIDTH * BLOCK)
        return self.table[self.rows[b]].long()[slots // BLOCK], slots % BLOCK

    def record(self, b: int, position: int, token: int) -> None:
        self.history[self.blocks_of(b)[position // BLOCK], position % BLOCK] = token

    def recorded(self, b: int, count: int) -> tuple[int, ...]:
        blocks = self.blocks_of(b)
        return tuple(int(self.history[blocks[p // BLOCK], p % BLOCK]) for p in range(count))

    def step(self) -> dict[str, Any]:
        """Run one step; returns its environment. `requests` are still those before it."""
        for model in self.models.values():
            model.fed.clear()
            model.calls.clear()
        self.draw_extra()
        batch = len(self.requests) + 1
        env: dict[str, Any] = {
            "last_tokens": torch.zeros(batch, self.num_last, dtype=torch.int64),
            "cache_len": torch.full((batch,), PADDING, dtype=torch.int32),
            "block_table": self.table,
            "sampling_values": torch.zeros(batch, 6),
            "sampling_words": torch.zeros(batch, 4, dtype=torch.int64),
            HISTORY: self.history,
        }
        if "suffix" in self.plan.drafts:
            env[PROPOSALS] = torch.full((batch, self.plan.max_depth), -1)
        if self.plan.combine == VOTE:
            env[VOTE_WEIGHTS] = torch.zeros(batch, len(self.plan.drafts))
        for row, request in zip(self.rows, self.requests, strict=True):
            count = min(self.num_last, len(request.text))
            env["last_tokens"][row, self.num_last - count :] = torch.tensor(request.text[-count:])
            env["cache_len"][row] = len(request.text) - 1
            env["sampling_values"][row], env["sampling_words"][row] = (
                rows[0] for rows in request.options
            )
            if PROPOSALS in env:
                proposals = torch.tensor(request.proposals, dtype=torch.int64)
                env[PROPOSALS][row, : len(proposals)] = proposals
            if VOTE_WEIGHTS in env:
                env[VOTE_WEIGHTS][row] = torch.tensor(request.weights)
        env |= {slab_name(name, 0): model.slab for name, model in self.models.items()}
        env |= self.constants
        for graph in self.graphs:
            env |= graph(*(env[n.target] for n in graph.graph.find_nodes(op="placeholder")))
        return env

    def take(self, env: dict[str, Any]) -> None:
        """Go on after a step; rows that are not committed are spoiled."""
        for b, row in enumerate(self.rows):
            request = self.requests[b]
            output = env["output_tokens"][row, : env["num_accepted"][row] + 1].tolist()
            self.requests[b] = replace(request, text=(*request.text, *output))
            for name, model in self.models.items():
                lengths = env["next_cache_len" if name == TARGET else f"{name}_len"]
                self.lengths[name][b] = int(lengths[row])
                model.slab[:, :, *self._places(b, int(lengths[row]))] = NOTHING
            self.history[self._places(b, int(env["next_cache_len"][row]))] = NOTHING

    def draw_extra(self) -> None:
        """Proposals of the host's index, often what the target likes, and weights of votes."""
        dice, plan = self._dice, self.plan
        for b, request in enumerate(self.requests):
            proposals: list[int] = []
            for _ in range(dice.randint(0, plan.max_depth)):
                best = int(logits_of(TARGET, (*request.text, *proposals)).argmax())
                proposals.append(best if dice.random() < 0.7 else dice.randrange(VOCAB))
            weights = tuple(dice.choice([0.5, 1.0, 1.0, 1.5]) for _ in plan.drafts)
            self.requests[b] = replace(request, proposals=tuple(proposals), weights=weights)


def accept_alone(
    plan: SpecPlan, proposed: Proposed, request: Request
) -> tuple[list[int], list[int]]:
    """Nodes that are accepted, root first, and the tokens that are put out."""
    tree, num_nodes = proposed.tree, len(proposed.tree.paths)
    nothing = torch.full((VOCAB,), float("nan"))
    logits = torch.stack(
        [
            nothing if path is None else logits_of(TARGET, (*request.text, *path))
            for path in tree.paths
        ]
    )
    tokens = [0 if token is None else token for token in tree.tokens]
    tokens[0] = request.text[-1]
    # one row of logits for each text that proposals were drawn from
    sources = list(dict.fromkeys(source for source in proposed.q if source is not None))
    q_rows = [-1 if source is None else sources.index(source) for source in proposed.q]
    drafts = [drawn_from(plan, request, draft, text)[None] for draft, text in sources]
    image = None if proposed.image is None else torch.tensor([proposed.image]).int()
    history = torch.zeros(1, 999, dtype=torch.int32)
    history[0, : len(request.text) - 1] = torch.tensor(request.text[:-1], dtype=torch.int32)
    path, _, output = accept_reference(
        logits.view(num_nodes, VOCAB),
        torch.tensor([tokens]),
        torch.tensor([tree.parents], dtype=torch.int32),
        plan.max_depth,
        image,
        torch.tensor(q_rows, dtype=torch.int32) if sources else None,
        drafts,
        *request.options,
        torch.tensor([len(request.text) - 1], dtype=torch.int32),
        history,
        torch.zeros(1, 1, dtype=torch.int32),
    )
    return [n for n in path[0].tolist() if n >= 0], [t for t in output[0].tolist() if t >= 0]
