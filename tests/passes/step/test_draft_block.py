"""The draft stage of a block drafter: what its one pass reads, and the trees that it becomes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specc.artifact.graph_io import graph_from_json
from specc.cost.draft_levels import draft_levels
from specc.drafters.block import BIAS_TENSORS, BlockDraft
from specc.drafters.medusa import MedusaHeads
from specc.errors import ConfigError, EngineError
from specc.kernels import ops as _ops  # noqa: F401
from specc.kernels.reference.accept import draft_children_reference
from specc.passes.step.fuse_step import fuse_step
from specc.passes.step.tiles import logit_rows, pass_rows, tile_plan
from specc.runtime.backends.captured.step_buffers import PADDING
from specc.runtime.backends.step_constants import drafter_tensors, step_constants
from specc.sampling.params import SamplingParams
from specc.sampling.rows import Rule, Value, Word
from specc.speculation.plan_json import plan_from_json, plan_to_json
from specc.speculation.plans import MERGE, DynamicTree, SpecPlan
from tests.passes.step.reading_models import NAMES, VOCAB

MASK, SIZE = 6, 5
BLOCK = BlockDraft(SIZE, MASK)
# DSpark, of all ids, and of all but four
BIASED = replace(BLOCK, is_biased=True)
PARTIAL = replace(BIASED, is_partial=True)
ABSENT = (0, 3, 4, 8)
# Medusa
FLAT = MedusaHeads(SIZE)


def drawn(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def columns() -> Tensor:
    """[V] of the partial head."""
    kept = [x for x in range(VOCAB) if x not in ABSENT]
    return torch.tensor([kept.index(x) if x in kept else len(kept) for x in range(VOCAB)])


WEIGHTS = {
    BIAS_TENSORS["bias_in"]: drawn(VOCAB, 3),
    BIAS_TENSORS["bias_out"]: drawn(VOCAB, 3, seed=6),
    BIAS_TENSORS["bias_columns"]: columns(),
}


def bias_after(tokens: Tensor, block: BlockDraft) -> Tensor:
    """[n, V] that is added to logits after tokens [n]."""
    known, out = WEIGHTS[BIAS_TENSORS["bias_in"]][tokens], WEIGHTS[BIAS_TENSORS["bias_out"]]
    if not block.is_partial:
        return known @ out.T
    wide = torch.cat([out[: VOCAB - len(ABSENT)], torch.zeros(1, 3)])
    return known @ wide[columns()].T


def plan_of(shape: tuple[int, ...] | DynamicTree, block: BlockDraft = BLOCK) -> SpecPlan:
    plan = SpecPlan.from_dynamic(shape) if isinstance(shape, DynamicTree) else None
    plan = plan or SpecPlan.from_widths(shape)  # type: ignore[arg-type]
    return plan.with_drafters({"draft_0": block})


class Noted(nn.Module):
    """Keeps what it is called with; its logits, and what comes after them, are drawn.

    Args:
        ties: logits are whole numbers.
        width: columns.
        rows_each: rows for each that has any.
        lacks: tokens of `ABSENT` have logits of -inf.
    """

    def __init__(
        self, ties: bool, width: int = VOCAB, rows_each: int = 1, lacks: bool = False
    ) -> None:
        super().__init__()
        self.ties, self.width, self.rows_each, self.lacks = ties, width, rows_each, lacks
        self.calls: list[dict[str, Tensor]] = []

    def forward(self, *inputs: Tensor) -> Tensor:
        names = (*NAMES[:-1], "logit_rows", "feature_rows")
        self.calls.append(dict(zip(names, inputs, strict=True)))
        logits = drawn(len(inputs[7]) * self.rows_each, self.width, seed=4)
        logits = logits.round() if self.ties else logits
        if self.lacks:
            logits[:, list(ABSENT)] = -torch.inf
        return logits


def run(
    plan: SpecPlan,
    lengths: tuple[int, ...],
    rule: Rule | None = None,
    ties: bool = False,
    weights: dict[str, Tensor] = WEIGHTS,
    lacks: bool = False,
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]:
    """The one call of the drafter, what the stage makes, and its environment."""
    step = json.loads(json.dumps(fuse_step(plan, {"target": 1, "draft_0": 1}).to_json()))
    (block,), batch = plan.drafters, len(lengths)
    drafter = Noted(ties, VOCAB + block.hidden_columns, block.size if block.is_flat else 1, lacks)
    torch.manual_seed(0)
    values = torch.zeros(batch, len(Value))
    words = torch.zeros(batch, len(Word), dtype=torch.int64)
    for b in range(batch) if rule is not None else ():
        options = SamplingParams(temperature=0.9, seed=40 + b)
        values[b, Value.TEMPERATURE] = options.temperature
        values[b, Value.TOP_P] = 1.0
        words[b, Word.SEED], words[b, Word.RULE] = 40 + b, int(rule or 0)
    environment = {
        "last_tokens": torch.randint(0, VOCAB, (batch, plan.catch_up)),
        "cache_len": torch.tensor(lengths, dtype=torch.int32),
        "block_table": torch.arange(batch * 4).view(batch, 4).int(),
        "sampling_values": values,
        "sampling_words": words,
        **step_constants(step, plan),
        **drafter_tensors(plan, {"draft_0": SimpleNamespace(weights=weights)}),
    }
    graph = graph_from_json(step["stages"][0]["graph"], {"draft_0": drafter})
    inputs = [environment[node.target] for node in graph.graph.find_nodes(op="placeholder")]
    made = graph(*inputs)
    (call,) = drafter.calls
    return call, made, environment


@pytest.mark.parametrize(
    "block", [BLOCK, BlockDraft(4, MASK, from_anchor=True), BlockDraft(SIZE, MASK, is_causal=True)]
)
def test_what_the_pass_reads(block: BlockDraft) -> None:
    """Context that the last step can have accepted, the root, masks; nothing of padding."""
    plan, lengths = plan_of((2, 1, 1), block), (9, 2, PADDING)
    call, _, environment = run(plan, lengths)
    before, count = 4, 4 + block.size
    assert call["q_start"].tolist() == [0, count, 2 * count, 3 * count]
    assert call["cache_len"].tolist() == list(lengths)
    for b, length in enumerate(lengths[:2]):
        own = slice(b * count, (b + 1) * count)
        slots = call["slot"][own].tolist()
        assert slots == list(range(length - before, length + block.size))
        assert call["positions"][own].tolist() == [max(slot, 0) for slot in slots]
        root = int(environment["last_tokens"][b, -1])
        assert call["tokens"][own].tolist()[before:] == [root] + [MASK] * (block.size - 1)
        rows = call["feature_rows"][own]
        assert rows[:before, 0].tolist() == slots[:before]
        assert rows[before:, 0].tolist() == [-1] * block.size
        # in which the drafter's own program reads where in the block a row is
        assert rows[:, 1].tolist() == [-1] * before + [-1 - j for j in range(block.size)]
        seen = call["ancestors"][own, 0].tolist()
        assert seen[:before] == [0] * before
        for j, bits in enumerate(seen[before:]):
            assert bits == ((2 << j) - 1 if block.is_causal else (1 << block.size) - 1)
    assert (call["slot"][2 * count :] < 0).all()
    # one depth after the other
    first = before + (not block.from_anchor)
    wanted = [b * count + first + depth for depth in range(3) for b in range(3)]
    assert call["logit_rows"].tolist() == wanted


def test_what_medusa_heads_read() -> None:
    """The row before the root's, of the target; nothing of padding."""
    plan, lengths = plan_of((2, 1, 1), FLAT), (9, 1, PADDING)
    assert (plan.catch_up, plan.draft_lens, plan.num_rows) == (1, {}, plan.num_nodes)
    call, _, environment = run(plan, lengths)
    assert call["feature_rows"][:2].tolist() == [[8, -1], [0, -1]]
    assert (call["feature_rows"][2] < 0).all()
    assert call["tokens"].tolist() == environment["last_tokens"][:, -1].tolist()
    assert call["positions"].tolist()[:2] == call["slot"].tolist()[:2] == [9, 1]
    assert int(call["slot"][2]) < 0
    assert call["q_start"].tolist() == [0, 1, 2, 3]
    assert call["logit_rows"].tolist() == [0, 1, 2]
    assert call["ancestors"] is None


@pytest.mark.parametrize("block", [BLOCK, FLAT], ids=["masks", "heads"])
@pytest.mark.parametrize("rule", [None, *Rule])
@pytest.mark.parametrize("widths", [(1, 1, 1, 1), (3, 2, 1)])
def test_trees_are_products_of_levels(
    widths: tuple[int, ...], rule: Rule | None, block: BlockDraft
) -> None:
    """Children of every node of a depth are drawn once, from one row of logits."""
    plan, lengths = plan_of(widths, block), (9, 2)
    _, made, environment = run(plan, lengths, rule)
    tree, depth = plan.tree, len(widths)
    if block.is_flat:
        # a row of each head, of one sequence after the other
        logits = drawn(2 * SIZE, VOCAB, seed=4).view(2, SIZE, VOCAB).transpose(0, 1)
    else:
        logits = drawn(depth * 2, VOCAB, seed=4).view(depth, 2, VOCAB)
    options = environment["sampling_values"], environment["sampling_words"]
    for d in range(depth):
        column = torch.tensor([tree.levels[d + 1][0]], dtype=torch.int32)
        lens = environment["cache_len"]
        best, _ = draft_children_reference(logits[d], widths[d], lens, column, d, *options)
        torch.testing.assert_close(made[f"q_{d}"], logits[d])
        for b, node in itertools.product(range(2), tree.levels[d]):
            own = [int(made["tokens"][b, child]) for child in tree.children(node)]
            assert own == best[b].tolist()
    assert environment["q_rows"].tolist() == [depth - 1 for depth in tree.depths]


@pytest.mark.parametrize("block", [BIASED, PARTIAL], ids=["all", "some"])
@pytest.mark.parametrize("rule", [None, *Rule])
@pytest.mark.parametrize("widths", [(1, 1, 1, 1), (3, 2, 1)])
def test_trees_of_dspark(widths: tuple[int, ...], rule: Rule | None, block: BlockDraft) -> None:
    """Children of each node are drawn from the row of its depth, and what its token adds."""
    plan, lengths = plan_of(widths, block), (9, 2)
    weights = WEIGHTS
    if block.is_partial:
        out = BIAS_TENSORS["bias_out"]
        weights = {**WEIGHTS, out: WEIGHTS[out][: VOCAB - len(ABSENT)]}
    _, made, environment = run(plan, lengths, rule, weights=weights)
    tree, depth = plan.tree, len(widths)
    base = drawn(depth * 2, VOCAB, seed=4).view(depth, 2, VOCAB)
    options = environment["sampling_values"], environment["sampling_words"]
    tokens, row, rows = made["tokens"], 0, {}
    for d in range(depth):
        level = tree.levels[d]
        own = torch.cat([bias_after(tokens[b, list(level)], block) for b in range(2)])
        logits = base[d].repeat_interleave(len(level), 0) + own
        torch.testing.assert_close(made[f"q_{d}"], logits)
        firsts = torch.tensor([tree.children(node)[0] for node in level], dtype=torch.int32)
        lens = environment["cache_len"]
        best, _ = draft_children_reference(logits, widths[d], lens, firsts, d, *options)
        best = best.view(2, len(level), -1)
        for b, (place, node) in itertools.product(range(2), enumerate(level)):
            assert tokens[b, list(tree.children(node))].tolist() == best[b, place].tolist()
            rows |= dict.fromkeys(tree.children(node), row + place)
        row += len(level)
    assert environment["q_rows"].tolist() == [-1, *(rows[node] for node in sorted(rows))]


def named_levels(plan: SpecPlan) -> dict[str, tuple[int, ...]]:
    return {draft.name: rows for draft, rows in draft_levels(plan)}


def test_rows_of_passes_and_of_logits() -> None:
    plan = plan_of((3, 2, 1))
    # of a step that accepts all: its tokens and the bonus token, then the block
    assert named_levels(plan) == {"draft_0": (4 + SIZE,)}
    merged = SpecPlan.from_widths((3, 2, 1), ("draft_0", "draft_1"), MERGE)
    merged = merged.with_drafters({"draft_0": BLOCK})
    # a draft model beside it has lacked rows since the block did
    levels = {"draft_0": (4 + SIZE,), "draft_1": (merged.catch_up, 3, 6)}
    assert named_levels(merged) == levels
    assert pass_rows(plan, "draft_0") == 4 + SIZE
    assert logit_rows(plan, "draft_0") == 3
    assert plan_of((1,)).num_rows == SIZE
    assert plan_of((1,)).num_reached_rows == SIZE
    assert plan.catch_up == 5
    # what one pass has made, what is added to it, and what children were drawn from
    biased = plan_of((3, 2, 1), BIASED)
    assert named_levels(biased) == named_levels(plan)
    assert pass_rows(biased, "draft_0") == 4 + SIZE
    assert logit_rows(biased, "draft_0") == 3 + 6 + (1 + 3 + 6)


def test_a_bit_for_every_row_of_a_pass() -> None:
    """Kernels refuse fewer; rows of the context are in none of them."""
    for before, size in ((4, 5), (30, 34), (30, 35), (60, 63)):
        words = BlockDraft(size, MASK, is_causal=True).rows_seen(before)
        assert words.shape == (before + size, -(-(before + size) // 64))
        assert not words[:before].any()
        assert words[before:, 0].tolist() == [(2 << j) - 1 for j in range(size)]
        assert not words[:, 1:].any()


def test_plans_are_written_and_read() -> None:
    plan = plan_of((2, 1), replace(BLOCK, causal_layers=(0, 2)))
    data = json.loads(json.dumps(plan_to_json(plan)))
    assert plan_from_json(data) == plan
    assert "in both directions (in layers 0, 2 up to itself)" in plan.drafters[0].describe()
    assert "blocks" not in plan_to_json(SpecPlan.from_widths((2, 1)))
    assert plan_from_json(plan_to_json(plan_of((1,), PARTIAL))) == plan_of((1,), PARTIAL)
    for change in ({"size": 0}, {"size": "5"}, {"mask_token_id": -1}, {"other": 1}, {"size": True}):
        broken = {**data, "blocks": [{**data["blocks"][0], **change}]}
        with pytest.raises(EngineError, match="a block"):
            plan_from_json(broken)
    with pytest.raises(EngineError, match="a block 'x'"):
        plan_from_json({**data, "blocks": ["x"]})


def test_rules_of_merged_trees() -> None:
    """Two siblings that MSS drew alike become one, and what it drew after them counts twice."""

    def rules(widths: tuple[int, ...], *drafts: str) -> tuple[Rule, ...]:
        plan = SpecPlan.from_widths(widths, ("draft_0", *drafts), MERGE if drafts else "")
        return plan.with_drafters({"draft_0": BLOCK}).rules

    without = (Rule.COUPLED, Rule.DELTA, Rule.SWOR)
    assert rules((2, 1), "lookup-3") == rules((1, 2, 1), "draft_1") == without
    assert rules((2, 1)) == rules((1, 3), "lookup-3") == rules((1, 1, 1), "draft_1") == tuple(Rule)
    assert SpecPlan.from_widths((2, 1), ("draft_0", "draft_1"), MERGE).rules == tuple(Rule)
    biased = SpecPlan.from_widths((2, 1), ("draft_0", "lookup-3"), MERGE)
    assert biased.with_drafters({"draft_0": BIASED}).rules == tuple(Rule)


def test_logits_of_a_block_have_no_tiles() -> None:
    """One pass makes all of them: what does not fit is said, not exceeded."""
    rows = {"target": 1 << 19, "draft_0": 1 << 19}
    assert tile_plan(plan_of((2, 2, 2, 1)), rows, 2, 64).tile is None
    assert tile_plan(plan_of((2, 2, 2, 1)), rows, 2, 4).tile is not None
    with pytest.raises(ConfigError, match=r"4 tokens of a block for each of 2 .* take 4(\.0)? MiB"):
        tile_plan(plan_of((2, 2, 2, 1)), rows, 2, 3)


def test_trees_deeper_than_a_block() -> None:
    plan_of((1, 1, 1, 1))
    with pytest.raises(ConfigError, match="chain-5 of depth 5, and draft_0, which proposes 4"):
        plan_of((1,) * 5)
    plan_of((1,) * 5, BlockDraft(SIZE, MASK, from_anchor=True))
