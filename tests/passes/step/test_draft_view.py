"""What the levels of a self-draft see and write: rows of the target's own cache, one by one.

The draft stage runs over a target that notes its inputs. Which rows of the cache each token
attends to, by slots, table, lengths and ancestors, is compared with a plain description of it.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from specc.artifact.graph_io import graph_from_json
from specc.cost.draft_levels import draft_levels
from specc.drafters.views import View
from specc.kernels import ops as _ops  # noqa: F401
from specc.passes.step.fuse_step import fuse_step
from specc.runtime.backends.captured.step_buffers import PADDING
from specc.sampling.rows import Value, Word
from specc.speculation.plans import DynamicTree, SpecPlan
from tests.passes.step.reading_models import NAMES, VOCAB

BLOCK, WIDTH = 4, 20
NAME = "self_w8_s3"
# no rows; around the first blocks, the budget, and its growth by a block; the end of the table
LENGTHS = (0, 1, 3, 4, 5, 11, 12, 13, 15, 16, 17, 19, 20, 21, 40, 66)


class Noted(nn.Module):
    """Keeps what it is called with; its logits are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, torch.Tensor]] = []

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.calls.append(dict(zip(NAMES, inputs, strict=True)))
        seed = torch.Generator().manual_seed(len(self.calls))
        return torch.randn(len(inputs[-1]), VOCAB, generator=seed)


def draft(plan: SpecPlan, lengths: tuple[int, ...]) -> tuple[Noted, torch.Tensor, dict]:
    """Run the draft stage of some sequences; returns the target, the table, and what was made."""
    step = json.loads(json.dumps(fuse_step(plan, {"target": 1}, block_size=BLOCK).to_json()))
    target, batch = Noted(), len(lengths)
    torch.manual_seed(0)
    # blocks in no order, so that a column that is taken for a block shows
    table = torch.randperm(batch * WIDTH).view(batch, WIDTH).int()
    environment = {
        "last_tokens": torch.randint(0, VOCAB, (batch, 3)),
        "cache_len": torch.tensor(lengths, dtype=torch.int32),
        "block_table": table,
        "vote_weights": torch.ones(batch, len(plan.drafts)),
        "sampling_values": torch.zeros(batch, len(Value)),
        "sampling_words": torch.zeros(batch, len(Word), dtype=torch.int64),
        **{
            name: torch.tensor(one["values"], dtype=getattr(torch, one["dtype"]))
            for name, one in step["constants"].items()
        },
    }
    graph = graph_from_json(step["stages"][0]["graph"], {"target": target})
    inputs = [environment[node.target] for node in graph.graph.find_nodes(op="placeholder")]
    return target, table, graph(*inputs)


def place(table: torch.Tensor, b: int, slot: int) -> int:
    """The row of the cache that a slot of a table is."""
    return int(table[b, slot // BLOCK]) * BLOCK + slot % BLOCK


def seen_by(length: int, window: int = 8, sink: int = 3) -> list[int]:
    """Committed rows that a view of a sequence has."""
    begin = (length // BLOCK - window // BLOCK) * BLOCK
    return [row for row in range(length) if row < -(-sink // BLOCK) * BLOCK or row >= begin]


def check_call(call: dict, table: torch.Tensor, lengths: tuple[int, ...], views: list) -> None:
    """One pass: what each of its tokens sees, and where it writes."""
    count = len(call["tokens"]) // len(lengths)
    assert call["q_start"].tolist() == list(range(0, len(call["tokens"]) + 1, count))
    assert call["rows"].tolist() == list(range(len(call["tokens"])))
    for i in range(len(call["tokens"])):
        b, slot = i // count, int(call["slot"][i])
        length, held = lengths[b], int(call["cache_len"][b])
        if length < 0:
            assert slot < 0, "padding is dead"
            continue
        words = call["ancestors"][i].tolist()
        nodes = [n for n in range(64 * len(words)) if words[n // 64] >> (n % 64) & 1]
        own = slot - held
        assert own in nodes
        assert int(call["positions"][i]) == length + len(nodes) - 1, "true positions"
        found = [place(call["block_table"], b, column) for column in (*range(held), slot)]
        wanted = [[place(table, b, row) for row in (*one(length), length + own)] for one in views]
        assert found in wanted
        # the other nodes of its path are those that earlier levels wrote
        for node in nodes:
            column, row = held + node, length + node
            assert place(call["block_table"], b, column) == place(table, b, row)


PLANS = [
    SpecPlan.from_widths((1, 1, 1, 1, 1), (NAME,)),
    SpecPlan.from_widths((3, 2, 1), (NAME,)),
    replace(SpecPlan.from_widths((3, 2, 1), (NAME,)), tile=2),
    SpecPlan.from_dynamic(DynamicTree(6, 3, 3), NAME),
    SpecPlan.from_dynamic(DynamicTree(20, 4, 4), NAME),
    SpecPlan.from_widths((2, 1, 1), (NAME, "self_w4_s0"), "merge"),
    SpecPlan.from_widths((1, 1), (NAME, "self_w16_s9"), "vote"),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.name}-{plan.tile}")
def test_rows_of_a_view(plan):
    lengths = (*LENGTHS, PADDING)
    target, table, made = draft(plan, lengths)
    views = [
        lambda length, view=view: seen_by(length, view.window, view.sink) for view in plan.views
    ]
    widths = [
        stop - start
        for _, levels in draft_levels(plan)
        for width in levels
        for start, stop in plan.tiles(width)
    ]
    # the root alone first: rows before it are the target's
    assert [len(call["tokens"]) // len(lengths) for call in target.calls] == widths
    for call in target.calls:
        check_call(call, table, lengths, views)
    assert not {name for name in made if name.startswith("slot_of")}


@pytest.mark.parametrize("length", [11, 12, 13, 15, 16, 17])
def test_rows_around_the_budget(length):
    """By hand: two blocks before the one that is being filled, and a sink of one block."""
    seen = {
        11: range(11), 12: range(12), 13: range(13), 15: range(15),
        16: (0, 1, 2, 3, *range(8, 16)), 17: (0, 1, 2, 3, *range(8, 17)),
    }  # fmt: skip
    assert seen_by(length) == list(seen[length])
    target, table, _ = draft(PLANS[0], (length,))
    call = target.calls[0]
    assert int(call["cache_len"][0]) == len(seen[length])
    assert call["slot"].tolist() == [len(seen[length])]
    assert call["positions"].tolist() == [length]
    # what `specc tune` measures acceptance with
    columns, held = View(8, 3).columns(length, BLOCK)
    assert call["block_table"][0, : len(columns)].tolist() == table[0, columns].tolist()
    assert held == len(seen[length])
    wanted = [place(table, 0, row) for row in seen[length]]
    assert [place(call["block_table"], 0, c) for c in range(len(wanted))] == wanted


def test_a_view_is_as_wide_as_its_budget():
    """Not as the context: kernels that go by the width of a table do no more work than that."""
    for plan in PLANS:
        target, _, _ = draft(plan, (66,))
        widths = {call["block_table"].shape[1] for call in target.calls}
        assert widths == {view.num_columns(BLOCK, plan.num_rows) for view in plan.views}


def test_children_are_drawn_at_true_positions():
    """Noise is by position: what `draft_children` is told is the sequence's own length."""
    program = fuse_step(PLANS[0], {"target": 1}, block_size=BLOCK)
    graph = program.stages["draft"]
    drawn = [node for node in graph.nodes if "draft_children" in str(node.target)]
    assert len(drawn) == 5
    assert {node.args[2].target for node in drawn} == {"cache_len"}


def test_views_commit_nothing():
    """Verification wrote their rows again, and the target commits them."""
    for plan in PLANS:
        program = fuse_step(plan, {"target": 1}, block_size=BLOCK)
        names = {
            node.target for node in program.stages["accept_commit"].find_nodes(op="placeholder")
        }
        assert not {name for name in names if "self" in name}
