"""A step feeds its models what a plain description of speculative decoding feeds them.

The models are fakes: their logits are a function of (token, position), they record every input,
and they write the token of each row to the cache, so that a cache can be read as text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from specc.artifact.graph_io import graph_from_json
from specc.kernels import ops as _ops  # noqa: F401
from specc.passes.step.fuse_step import STEP_OUTPUTS, fuse_step
from specc.passes.step.step_graph import HISTORY, STEP_INPUTS, slab_name, slots_name
from specc.speculation.plans import OFF, SpecPlan
from specc.speculation.tree import TokenTree
from tests.passes.step.stepped_plan import Stepped, requests_of
from tests.tiers import every

VOCAB, BLOCK, ROWS = 31, 4, 96
NAMES = ("tokens", "positions", "q_start", "slot", "cache_len", "ancestors", "block_table", "rows")


def ranking(model: str, token: int, position: int) -> list[int]:
    """All tokens, the most likely first. At one place of three the draft puts the target's best
    token second, so that a chain is rejected there and a wider tree accepts a second child.
    """
    first = 0 if model == "target" or (token + position) % 3 else -1
    return [(token * 3 + position + 7 * i) % VOCAB for i in range(first, first + VOCAB)]


class Fake(nn.Module):
    def __init__(self, name: str, slab: torch.Tensor) -> None:
        super().__init__()
        self.name, self.slab, self.calls = name, slab, []

    def forward(self, *inputs):
        call = dict(zip(NAMES, inputs, strict=True))
        self.calls.append({k: None if v is None else v.clone() for k, v in call.items()})
        for b, table in enumerate(call["block_table"].tolist()):
            for i in range(int(call["q_start"][b]), int(call["q_start"][b + 1])):
                slot = int(call["slot"][i])
                if slot >= 0:
                    self.slab[:, :, table[slot // BLOCK], slot % BLOCK] = int(call["tokens"][i])
        logits = torch.zeros(len(call["rows"]), VOCAB)
        for row, i in zip(logits, call["rows"].tolist(), strict=True):
            order = ranking(self.name, int(call["tokens"][i]), int(call["positions"][i]))
            row[torch.tensor(order)] = -torch.arange(float(VOCAB))
        return logits


@dataclass
class Run:
    """A step that was executed: its environment before and after, and the fakes."""

    env: dict
    fakes: dict[str, Fake]
    stages: list[str]
    histories: list[list[int]]
    tree: TokenTree
    before: dict = field(default_factory=dict)

    def rows(self, model: str, b: int, count: int) -> list[int]:
        """First rows of a sequence's cache, read as tokens."""
        slab, table = self.fakes[model].slab, self.before["block_table"][b].tolist()
        return [int(slab[0, 0, table[s // BLOCK], s % BLOCK]) for s in range(count)]

    def recorded(self, b: int, count: int) -> list[int]:
        """First tokens of a sequence in the paged history."""
        history, table = self.env[HISTORY], self.before["block_table"][b].tolist()
        return [int(history[table[s // BLOCK], s % BLOCK]) for s in range(count)]


def step(
    widths: tuple[int, ...],
    histories: list[list[int]],
    stale_draft: bool = True,
    num_last: int = 2,
) -> Run:
    """Run one greedy step; a history ends with the root, whose row is in no cache.

    An engine's steps read as many last tokens, `num_last`, as the one of its plans that needs most.
    """
    plan = SpecPlan.from_widths(widths)
    names = ["target", "draft_0"] if widths else ["target"]
    program = json.loads(json.dumps(fuse_step(plan, dict.fromkeys(names, 1)).to_json()))
    batch, width = len(histories), ROWS // BLOCK
    # blocks in no order, so that a slot that is taken for a row shows
    table = torch.randperm(batch * width).view(batch, width).to(torch.int32)
    fakes = {}
    for name in names:
        slab = torch.full((2, 2, batch * width, BLOCK, 1, 1), -7.0)
        fakes[name] = Fake(name, slab)
        for b, history in enumerate(histories):
            # the draft may lack the row before the root: its first level writes that
            count = len(history) - 1 - (name != "target" and stale_draft)
            for slot in range(max(count, 0)):
                slab[:, :, table[b, slot // BLOCK], slot % BLOCK] = history[slot]
    recorded = torch.full((batch * width, BLOCK), -7, dtype=torch.int32)
    for b, history in enumerate(histories):
        for position in range(len(history) - 1):
            recorded[table[b, position // BLOCK], position % BLOCK] = history[position]
    env = {
        "last_tokens": torch.tensor([last(h, num_last) for h in histories]),
        "cache_len": torch.tensor([len(h) - 1 for h in histories], dtype=torch.int32),
        "block_table": table,
        "sampling_values": torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]] * batch),
        "sampling_words": torch.tensor([[91, 0, 0, 1]] * batch),
        HISTORY: recorded,
    }
    env |= {slab_name(name, 0): fake.slab for name, fake in fakes.items()}
    before = dict(env)
    for name, value in program["constants"].items():
        env[name] = torch.tensor(value["values"], dtype=getattr(torch, value["dtype"]))
    for stage in program["stages"]:
        graph = graph_from_json(stage["graph"], fakes)
        env |= graph(*(env[n.target] for n in graph.graph.find_nodes(op="placeholder")))
    stages = [stage["name"] for stage in program["stages"]]
    return Run(env, fakes, stages, histories, plan.tree, before)


def last(tokens: list[int], count: int) -> list[int]:
    """The last tokens of a text, zeros before a short one."""
    return ([0] * count + tokens)[-count:]


def grow(tree: TokenTree, widths: tuple[int, ...], history: list[int]) -> list[int]:
    """Token of every node: each frontier node gets its most likely tokens as children."""
    tokens = [history[-1]]
    for depth, width in enumerate(widths):
        for node in tree.levels[depth]:
            tokens += ranking("draft_0", tokens[node], len(history) - 1 + depth)[:width]
    return tokens


def accept(tree: TokenTree, tokens: list[int], position: int) -> tuple[list[int], int]:
    """Path of accepted nodes, root first, and the bonus token."""
    path = [0]
    while True:
        depth = len(path) - 1
        best = ranking("target", tokens[path[-1]], position + depth)[0]
        children = [c for c in tree.children(path[-1]) if tokens[c] == best]
        if not children:
            return path, best
        path.append(children[0])


HISTORIES = [[5, 9, 2], [3], [1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 30]]
TREES = [(1,), (1, 1, 1, 1), (3,), (2, 2, 1), (3, 2, 1, 1)]


@pytest.fixture(params=TREES, ids=str, scope="module")
def run(request):
    torch.manual_seed(3)
    return step(request.param, HISTORIES)


@pytest.fixture(params=TREES, ids=str, scope="module")
def run_of_wide_rows(request):
    """Of an engine with a plan whose drafts read further back."""
    torch.manual_seed(3)
    return step(request.param, HISTORIES, num_last=6)


def test_stages(run):
    assert run.stages == ["draft", "verify", "accept_commit"]
    assert set(STEP_OUTPUTS) | {"draft_0_len"} <= set(run.env)


def test_first_draft_level_feeds_the_last_two_tokens(run):
    call = run.fakes["draft_0"].calls[0]
    lens = [len(h) - 1 for h in HISTORIES]
    assert call["tokens"].tolist() == [t for h in HISTORIES for t in [0, *h][-2:]]
    assert call["slot"].tolist() == [s for n in lens for s in (n - 1, n)]
    assert call["positions"].tolist() == [p for n in lens for p in (max(n - 1, 0), n)]
    assert call["q_start"].tolist() == [0, 2, 4, 6, 8]
    assert call["cache_len"].tolist() == lens
    assert call["rows"].tolist() == [1, 3, 5, 7]
    assert call["ancestors"] is None
    assert torch.equal(call["block_table"], run.before["block_table"])


def test_later_draft_levels_feed_one_level_each(run):
    tree, calls = run.tree, run.fakes["draft_0"].calls
    assert len(calls) == tree.max_depth
    for depth, call in enumerate(calls[1:], start=1):
        nodes = tree.levels[depth]
        lens = [len(h) - 1 for h in HISTORIES]
        grown = [grow(tree, tree.widths, h) for h in HISTORIES]
        assert call["tokens"].tolist() == [tokens[n] for tokens in grown for n in nodes]
        assert call["slot"].tolist() == [length + n for length in lens for n in nodes]
        assert call["positions"].tolist() == [length + depth for length in lens for _ in nodes]
        assert call["q_start"].tolist() == [len(nodes) * b for b in range(5)]
        assert call["rows"].tolist() == list(range(4 * len(nodes)))
        want = tree.ancestor_words()[list(nodes)].repeat(4, 1)
        assert torch.equal(call["ancestors"], want)


def test_target_verifies_all_nodes_in_one_pass(run):
    (call,) = run.fakes["target"].calls
    tree, count = run.tree, run.tree.num_nodes
    lens = [len(h) - 1 for h in HISTORIES]
    grown = [grow(tree, tree.widths, h) for h in HISTORIES]
    assert run.env["tokens"].tolist() == grown
    assert call["tokens"].tolist() == [token for tokens in grown for token in tokens]
    assert call["slot"].tolist() == [n + i for n in lens for i in range(count)]
    assert call["positions"].tolist() == [n + d for n in lens for d in tree.depths]
    assert call["q_start"].tolist() == [count * b for b in range(5)]
    assert call["cache_len"].tolist() == lens
    assert call["rows"].tolist() == list(range(4 * count))
    assert torch.equal(call["ancestors"], tree.ancestor_words().repeat(4, 1))


def test_dtypes(run):
    for call in run.fakes["target"].calls + run.fakes["draft_0"].calls:
        assert call["tokens"].dtype == call["positions"].dtype == call["rows"].dtype == torch.int64
        assert call["q_start"].dtype == call["slot"].dtype == torch.int32
    wanted = {"tokens": "int64", "path": "int32", "num_accepted": "int32"}
    wanted |= {"output_tokens": "int64", "next_cache_len": "int32", "next_last_tokens": "int64"}
    for name, dtype in (wanted | {"draft_0_len": "int32"}).items():
        assert run.env[name].dtype == getattr(torch, dtype), name


def test_outputs_and_caches(run):
    tree, env = run.tree, run.env
    for b, history in enumerate(HISTORIES):
        length, tokens = len(history) - 1, grow(tree, tree.widths, history)
        path, bonus = accept(tree, tokens, length)
        text = [*history, *(tokens[n] for n in path[1:]), bonus]
        padding = [-1] * (tree.max_depth + 1 - len(path))
        assert env["path"][b].tolist() == path + padding
        assert env["num_accepted"][b] == len(path) - 1
        assert env["output_tokens"][b].tolist() == text[len(history) :] + padding
        assert env["next_cache_len"][b] == length + len(path) == len(text) - 1
        assert env["next_last_tokens"][b].tolist() == text[-2:]
        # the target has a row for every token but the new root
        assert run.rows("target", b, len(text) - 1) == text[:-1]
        # the draft has none for an accepted leaf, which was never fed to it
        fed = [node for node in path if node not in tree.leaves]
        assert env["draft_0_len"][b] == length + len(fed)
        assert run.rows("draft_0", b, length + len(fed)) == text[: length + len(fed)]
        assert env["draft_0_len"][b] >= env["next_cache_len"][b] - 1
        # the new root is known, too, though it has no row yet
        assert run.recorded(b, len(text)) == text
        assert run.recorded(b, len(text) + 1)[-1] == -7


def test_more_last_tokens_than_the_plan_reads(run_of_wide_rows):
    """They change nothing but the last tokens that come out."""
    wide = run_of_wide_rows
    torch.manual_seed(3)
    run = step(wide.tree.widths, HISTORIES)
    for name in wide.fakes:
        calls, wanted = wide.fakes[name].calls, run.fakes[name].calls
        assert [c.keys() for c in calls] == [c.keys() for c in wanted]
        for call, other in zip(calls, wanted, strict=True):
            for key, value in other.items():
                assert call[key] is value is None or torch.equal(call[key], value), key
    for name in {*STEP_OUTPUTS, "draft_0_len", HISTORY} - {"next_last_tokens"}:
        assert torch.equal(wide.env[name], run.env[name]), name
    for b, history in enumerate(HISTORIES):
        output = run.env["output_tokens"][b, : run.env["num_accepted"][b] + 1].tolist()
        assert wide.env["next_last_tokens"][b].tolist() == last([*history, *output], 6)


def test_histories_cover_rejection_and_acceptance():
    """Of the trees above, some path ends at the root, some within, some at a leaf."""
    lengths = {
        len(accept(plan.tree, grow(plan.tree, w, h), len(h) - 1)[0]) - 1 - plan.tree.max_depth
        for w in TREES
        for h in HISTORIES
        for plan in [SpecPlan.from_widths(w)]
    }
    assert 0 in lengths
    assert {-1, -2, -3} & lengths
    assert min(lengths) == -4


def test_steps_chain_into_plain_decoding():
    """Outputs of one step are inputs of the next; the text is the target's own."""
    torch.manual_seed(3)
    histories = [[5, 9, 2], [3]]
    for _ in range(6):
        run = step((2, 2, 1), histories)
        histories = [
            h + run.env["output_tokens"][b, : run.env["num_accepted"][b] + 1].tolist()
            for b, h in enumerate(histories)
        ]
    for start, history in zip((3, 1), histories, strict=True):
        for i in range(start, len(history)):
            assert history[i] == ranking("target", history[i - 1], i - 1)[0]


def test_off_feeds_the_root_alone():
    run = step((), HISTORIES)
    assert run.stages == ["verify", "accept_commit"]
    (call,) = run.fakes["target"].calls
    lens = [len(h) - 1 for h in HISTORIES]
    assert call["tokens"].tolist() == [h[-1] for h in HISTORIES]
    assert call["slot"].tolist() == call["positions"].tolist() == lens
    assert call["q_start"].tolist() == [0, 1, 2, 3, 4]
    assert call["rows"].tolist() == [0, 1, 2, 3]
    assert call["ancestors"] is None
    for b, history in enumerate(HISTORIES):
        bonus = ranking("target", history[-1], lens[b])[0]
        assert run.env["output_tokens"][b].tolist() == [bonus]
        assert run.env["next_last_tokens"][b].tolist() == [history[-1], bonus]
        assert run.env["next_cache_len"][b] == lens[b] + 1
        assert run.env["num_accepted"][b] == 0
        assert run.rows("target", b, lens[b] + 1) == history
        assert run.recorded(b, lens[b] + 3) == [*history, bonus, -7]
    assert "draft_0_len" not in run.env


def test_off_ignores_drafts():
    program = fuse_step(OFF, {"target": 1, "draft_0": 2})
    assert list(program.stages) == ["verify", "accept_commit"]
    names = {n.target for g in program.stages.values() for n in g.find_nodes(op="placeholder")}
    assert not any("draft" in name for name in names)


def test_constants_of_a_tree():
    plan = SpecPlan.from_widths((2, 1))
    constants = fuse_step(plan, {"target": 1, "draft_0": 1}).constants
    assert constants["parents"].tolist() == [-1, 0, 0, 1, 2]
    assert constants["depths"].tolist() == [0, 1, 1, 2, 2]
    # leaves are never fed to the draft; the others lie in the rows of their ids
    assert constants[slots_name("draft_0")].tolist() == [0, 1, 2, -1, -1]
    assert constants[slots_name("target")].tolist() == [0, 1, 2, 3, 4]
    # which row of draft logits a node was drawn from: of the root, of node 1, of node 2
    assert constants["q_rows"].tolist() == [-1, 0, 0, 1, 2]
    assert constants["ancestors"].tolist() == [[1], [3], [5], [11], [21]]


def test_every_slab_is_committed():
    program = fuse_step(SpecPlan.from_widths((2,)), {"target": 2, "draft_0": 3})
    commits = program.stages["accept_commit"].find_nodes(
        op="call_function", target=torch.ops.specc.commit_kv.default
    )
    slabs = [node.args[0].target for node in commits]
    assert slabs == [slab_name("target", i) for i in (0, 1)] + [
        slab_name("draft_0", i) for i in (0, 1, 2)
    ]


CHAINS = (
    OFF,
    SpecPlan.from_widths((1,)),
    SpecPlan.from_widths((1, 1, 1, 1)),
    SpecPlan.from_widths((1, 1, 1), ("lookup-2",)),
    SpecPlan.from_widths((1, 1, 1), ("suffix",)),
    SpecPlan.from_widths((1, 1, 1, 1), ("draft_0", "draft_1", "lookup-2"), "vote"),
)
NO_CHAINS = (
    SpecPlan.from_widths((2, 1)),
    SpecPlan.from_widths((1, 2)),
    SpecPlan.from_widths((1, 1), ("draft_0", "draft_1"), "merge"),
)


class Moves(TorchDispatchMode):
    """Counts the commits of a step, and how many of them change a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.commits = self.changes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_commit = func is torch.ops.specc.commit_kv.default
        before = args[0].clone() if is_commit else None
        result = func(*args, **(kwargs or {}))
        if is_commit:
            self.commits += 1
            self.changes += not torch.equal(args[0], before)
        return result


def moves_of(plan: SpecPlan, seed: int, steps: int = 2) -> Moves:
    stepped = Stepped(plan, requests_of(plan, seed), seed)
    with Moves() as moves:
        for _ in range(steps):
            stepped.take(stepped.step())
    return moves


@pytest.mark.parametrize("plan", every(2, CHAINS, first=1), ids=lambda plan: plan.name)
def test_a_chain_has_nothing_to_move(plan, monkeypatch):
    """With its commits left in, no step of it changes a cache by them; so none are made."""
    assert moves_of(plan, 1).commits == 0
    monkeypatch.setattr(SpecPlan, "is_in_place", property(lambda plan: False))
    moves = moves_of(plan, 1)
    assert moves.commits == 2 * (1 + len(plan.models))
    assert moves.changes == 0


@pytest.mark.parametrize("plan", NO_CHAINS, ids=lambda plan: plan.name)
def test_other_plans_move_rows(plan):
    found = [moves_of(plan, seed) for seed in (1, 2)]
    assert all(moves.commits == 2 * (1 + len(plan.models)) for moves in found)
    assert sum(moves.changes for moves in found) > 0


def test_stages_read_documented_names_only():
    program = fuse_step(SpecPlan.from_widths((2, 1)), {"target": 1, "draft_0": 1})
    known = {*STEP_INPUTS, *program.constants, HISTORY}
    known |= {slab_name("target", 0), slab_name("draft_0", 0)}
    for graph in program.stages.values():
        assert {n.target for n in graph.find_nodes(op="placeholder")} <= known
        (output,) = graph.find_nodes(op="output")
        known |= output.args[0].keys()


@pytest.mark.parametrize("widths", [(4, 4, 4)])
def test_trees_of_more_than_64_nodes(widths):
    torch.manual_seed(3)
    run = step(widths, [[5]])
    tree = run.tree
    assert tree.num_nodes == 85
    assert run.fakes["target"].calls[0]["ancestors"].shape == (85, 2)
    path, _ = accept(tree, grow(tree, widths, [5]), 0)
    assert run.env["path"][0, : len(path)].tolist() == path
