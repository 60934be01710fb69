"""Drafts that obey grammars in pieces of a captured stage: what eager ones propose."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from specc.artifact.graph_io import graph_from_json
from specc.drafters.block import RNN, BlockDraft
from specc.drafters.medusa import MedusaHeads
from specc.errors import EngineError
from specc.passes.step.fuse_step import fuse_step
from specc.runtime.backends.captured.bound_step import BoundStage
from specc.runtime.backends.captured.masked_draft import MaskedDraft
from specc.runtime.backends.step_constants import step_constants
from specc.runtime.constraints.draft_masks import DraftMasks
from specc.runtime.constraints.grammar import GrammarState
from specc.runtime.constraints.grammars import Grammars
from specc.sampling.structured import StructuredOutputsParams
from specc.speculation.plans import MERGE, VOTE, DynamicTree, SpecPlan
from specc.speculation.tree import TokenTree
from tests.mixed_sampling import mixed_sampling
from tests.runtime.backends.captured.simulated_device import LateDevice, SimulatedDevice
from tests.runtime.constraints.test_grammar_masks import EOS, VOCAB, byte_tokenizer

BOTH = ("draft_0", "draft_1")
PLANS = {
    "chain": SpecPlan.from_widths((1, 1, 1)),
    "tree": SpecPlan.from_widths((2, 2)),
    "irregular": SpecPlan.from_tree(TokenTree((-1, 0, 0, 2, 3))),
    "dynamic": SpecPlan.from_dynamic(DynamicTree(6, 2, 3)),
    "merge": SpecPlan.from_widths((2, 1), BOTH, MERGE),
    "vote": SpecPlan.from_widths((1, 1), BOTH, VOTE),
}
# what follows a node depends on its depth, and on its parent; the last one leaves no choice
GRAMMARS = [
    StructuredOutputsParams(regex="([a-c][d-f][g-i]){4,9}"),
    StructuredOutputsParams(regex="(a[0-4]|b[5-9]|c[a-z]){4,9}"),
    StructuredOutputsParams(choice=["nothing else but this one"]),
]
# rows of the graph: the last ones are padding
BUCKET = 4
SLABS = dict.fromkeys(("target", *BOTH), 1)
HEADS = 4
OUTPUT = re.compile(r"tokens|parents|q_\d+")


class Table(nn.Module):
    """A draft whose logits follow from the token and its depth; it lacks half of the letters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = 3 * torch.randn(VOCAB, VOCAB, generator=generator)
        letters = byte_tokenizer().encode("aceghiknoty 13579").ids
        self.table[:, letters] = -torch.inf
        self.by_depth = torch.randn(8, VOCAB, generator=generator)

    def forward(self, tokens: Tensor, positions: Tensor, *others: Tensor | None) -> Tensor:
        rows = others[5]
        assert rows is not None
        return self.table[tokens[rows]] + self.by_depth[positions[rows].clamp(0) % 8]


class Heads(Table):
    """Medusa heads: `HEADS` rows of logits of each row that they are fed."""

    def forward(self, tokens: Tensor, *others: Tensor | None) -> Tensor:
        rows = others[6]
        assert rows is not None
        of_heads = self.table[tokens[rows]].unsqueeze(1) + self.by_depth[:HEADS]
        return of_heads.flatten(0, 1)


class Asked(nn.Module):
    """A draft as eager steps call it."""

    def __init__(self, draft: nn.Module, masks: list[DraftMasks]) -> None:
        super().__init__()
        self._draft, self._masks = [draft], masks

    def forward(self, *inputs: Tensor | None) -> Tensor:
        logits = self._draft[0](*inputs)
        for masks in self._masks:
            logits = masks(inputs, logits)
        return logits


class Toy:
    """The draft stage of a plan twice: in captured pieces, and as a whole on the host."""

    def __init__(self, plan: SpecPlan, device: SimulatedDevice) -> None:
        self.device = device
        program = json.loads(json.dumps(fuse_step(plan, SLABS).to_json()))
        (stage,) = (one["graph"] for one in program["stages"] if one["name"] == "draft")
        flat = [x.name for x in plan.models if not x.has_rows]
        drafts = {name: (Heads if name in flat else Table)(i) for i, name in enumerate(BOTH)}
        self.masks: list[DraftMasks] = []
        asked = {name: Asked(draft, self.masks) for name, draft in drafts.items()}
        self.eager = graph_from_json(stage, modules=asked)
        self.names = [node.target for node in self.eager.graph.find_nodes(op="placeholder")]
        (output,) = self.eager.graph.find_nodes(op="output")
        self.outputs = [name for name in output.args[0] if OUTPUT.fullmatch(name)]
        constants = step_constants(program, plan)
        table = torch.zeros(BUCKET, 8, dtype=torch.int32)
        values, words = mixed_sampling(BUCKET, first=1, rules=plan.rules)
        self.inputs = {
            "last_tokens": torch.zeros(BUCKET, 8, dtype=torch.int64),
            "cache_len": torch.zeros(BUCKET, dtype=torch.int32),
            "block_table": table,
            "sampling_values": values,
            "sampling_words": words,
            "vote_weights": torch.tensor([[0.5, 0.6]] * BUCKET),
        }
        self.environment: dict[str, Any] = {**constants, **self.inputs}
        with torch.inference_mode():
            graph = graph_from_json(stage, modules=drafts)
            bound = BoundStage(graph, self.environment, set(constants), set(self.inputs))
        self.draft = MaskedDraft(device, BUCKET, plan, bound)
        with device.active(), torch.inference_mode():
            for piece in self.draft.pieces:
                piece()
            self.graphs = []
            for piece in self.draft.pieces:
                if self.graphs:
                    self.graphs[-1].replay()
                self.graphs.append(device.capture(piece))

    def fill(self, roots: Sequence[int], lengths: Sequence[int]) -> None:
        """Other sequences; those after them are padding."""
        count = len(roots)
        self.device.record_event().synchronize()
        self.inputs["last_tokens"][:count, -1] = torch.tensor(roots)
        self.inputs["cache_len"].fill_(-(1 << 30))
        self.inputs["cache_len"][:count] = torch.tensor(lengths, dtype=torch.int32)

    @torch.inference_mode()
    def drafted(self, grammars: Sequence[GrammarState | None]) -> dict[str, Tensor]:
        """What the replayed pieces leave."""
        masks = DraftMasks([*grammars, *[None] * (BUCKET - len(grammars))])
        with self.device.active():
            for number, graph in enumerate(self.graphs):
                self.draft.expect(number)
                graph.replay()
                if number < self.draft.num_passes:
                    self.draft.fill(number, masks)
            self.device.record_event().synchronize()
        return self._of(len(grammars), self.environment)

    @torch.inference_mode()
    def wanted(self, grammars: Sequence[GrammarState | None]) -> dict[str, Tensor]:
        self.masks[:] = [DraftMasks([*grammars, *[None] * (BUCKET - len(grammars))])]
        found = self.eager(*(self.environment[name] for name in self.names))
        return self._of(len(grammars), found)

    def _of(self, count: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Trees of the first sequences, and what they were drawn from."""
        found = {name: values[name] for name in self.outputs}
        return {
            name: value[: len(value) // BUCKET * count].clone() for name, value in found.items()
        }


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(byte_tokenizer(["<|end|>", "<|eot|>"]), VOCAB, EOS)


DEVICES = {"at once": SimulatedDevice, "late": LateDevice}
# each plan, and each device with every other one; all of them in the slow tier
CASES = [
    pytest.param(
        plan, made, id=f"{plan}-{name}", marks=[] if (i + j) % 2 == 0 else [pytest.mark.slow]
    )
    for i, plan in enumerate(PLANS)
    for j, (name, made) in enumerate(DEVICES.items())
]


@pytest.mark.default("chain-at once", "tree-late", "merge-at once")
@pytest.mark.parametrize(("plan", "device"), CASES)
def test_pieces_draft_what_a_whole_stage_does(grammars, plan, device) -> None:
    """Of three sequences, who have grammars or none in turn; of a smaller batch; and of nobody."""
    toy = Toy(PLANS[plan], device())
    assert toy.draft.num_passes > 1
    check_pieces(toy, grammars)


def check_pieces(toy: Toy, grammars: Grammars) -> None:
    """Compare the pieces with the whole stage, of sequences that come and go."""
    own = [*(grammars.start(one) for one in GRAMMARS), None, None]
    assert toy.draft.num_passes == len(toy.graphs) - 1
    seen = set()
    for turn in range(5):
        state = [own[(b + turn) % len(own)] for b in range(3 - turn % 2)]
        roots = [97 + 3 * turn + b for b in range(len(state))]
        toy.fill(roots, [9 + 5 * b + turn for b in range(len(state))])
        wanted = toy.wanted(state)
        marks = {id(grammar): grammar.mask() for grammar in state if grammar is not None}
        found = toy.drafted(state)
        for name, value in found.items():
            assert torch.equal(value, wanted[name]), (turn, name)
        seen.add(torch.equal(found["tokens"], toy.wanted([None] * len(state))["tokens"]))
        for grammar in state:
            # it is where it was
            assert grammar is None or grammar.mask() == marks[id(grammar)]
    assert False in seen


MEDUSA = MedusaHeads(HEADS, draft="draft_0")
HEADED = ("chain", "tree", "dynamic", "merge", "vote")
# of heads alone, and beside a draft that is asked level by level
CHEAP = [("tree", "late"), ("merge", "at once")]


@pytest.mark.parametrize(
    ("plan", "device"),
    [
        pytest.param(
            plan, device, marks=[] if (plan, device) in CHEAP else pytest.mark.slow,
            id=f"{plan}-{device}",
        )
        for plan in HEADED
        for device in DEVICES
    ],
)  # fmt: skip
def test_pieces_of_medusa_heads(grammars, plan, device) -> None:
    """One pass, of which the first row of each sequence obeys; the others stay."""
    headed = PLANS[plan].with_drafters({"draft_0": MEDUSA})
    toy = Toy(headed, DEVICES[device]())
    alone = headed.model_names == (MEDUSA.draft,)
    assert (toy.draft.num_passes == 1) == alone
    check_pieces(toy, grammars)


def test_padding_and_free_requests_stay_as_they_are(grammars) -> None:
    """After a step in which every row had a mask."""
    toy = Toy(PLANS["tree"], SimulatedDevice())
    toy.fill([97, 98, 99], [9, 14, 19])
    toy.drafted([grammars.start(GRAMMARS[0]) for _ in range(3)])
    free = toy.drafted([None] * 3)
    for name, value in toy.wanted([None] * 3).items():
        assert torch.equal(free[name], value), name


def test_what_has_not_come_is_no_pass(grammars) -> None:
    """An event that is still that of the replay before: an error, and no masks of its tokens."""
    toy = Toy(PLANS["chain"], LateDevice())
    toy.fill([97, 98, 99], [9, 14, 19])
    state = [grammars.start(GRAMMARS[0]) for _ in range(3)]
    toy.drafted(state)
    with torch.inference_mode():
        toy.draft.expect(0)
    with pytest.raises(EngineError, match="plan chain-3 that is not there"):
        toy.draft.fill(0, DraftMasks([*state, None]))


class WithHidden(Table):
    """A draft that puts out hidden states after its logits."""

    def forward(self, *inputs: Tensor | None) -> Tensor:
        logits = super().forward(*inputs)  # type: ignore[arg-type]
        return torch.cat([logits, logits[:, :HIDDEN].clamp(min=-9) + 1], 1)


HIDDEN = 5
PLAIN_BLOCK = BlockDraft(4, 1, draft="draft_0")
READ_BLOCK = replace(PLAIN_BLOCK, is_biased=True, bias_kind=RNN, hidden_columns=HIDDEN)


@pytest.mark.parametrize(
    ("block", "own"),
    [(PLAIN_BLOCK, Table(0)), (READ_BLOCK, WithHidden(0))],
    ids=["logits", "logits-and-hidden-states"],
)
def test_the_first_depth_of_a_block_obeys(grammars, block, own) -> None:
    """One pass, whose rows of the block read no hidden states; the others of it stay."""
    plan = PLANS["chain"].with_drafters({"draft_0": block})
    names = "tokens", "q_start", "slots", "cache_len", "ancestors", "rows", "features"
    slots = torch.tensor([3, 4, 5, 6, 1, 2, 3, 4])
    features = torch.tensor([[3, -1], [-1, -1], [-1, -2], [-1, -3]] * 2)
    starts, lengths = torch.tensor([0, 4, 8]), torch.tensor([4, 2])
    words, rows = torch.tensor([[0], [7], [7], [7]] * 2), torch.tensor([2, 6, 3, 7])
    values = [torch.full((8,), 97), starts, slots, lengths, words, rows, features]
    environment: dict[str, Any] = dict(zip(names, values, strict=True))
    graph = fx.Graph()
    tokens, start, slot, length, above, row, read = (graph.placeholder(name) for name in names)
    given = tokens, tokens, start, slot, length, above, None, row, read
    drawn = graph.call_function(torch.ops.aten.mul.Scalar, (graph.call_module("draft_0", given), 2))
    graph.output({"drawn": drawn})
    stage = fx.GraphModule({"draft_0": own}, graph)
    device, state = SimulatedDevice(), [None, grammars.start(GRAMMARS[0])]
    with torch.inference_mode():
        draft = MaskedDraft(device, 2, plan, BoundStage(stage, environment, set(), {*names}))
        for piece in draft.pieces:
            piece()
        first, rest = (device.capture(piece) for piece in draft.pieces)
        draft.expect(0)
        first.replay()
        draft.fill(0, DraftMasks(state))
        rest.replay()
    inputs = [values[i] for i in (0, 0, 1, 2, 3, 4, 0, 5, 6)]
    assert torch.equal(environment["drawn"], 2 * DraftMasks(state)(inputs, own(*inputs)))
    assert not torch.equal(environment["drawn"], 2 * own(*inputs))
