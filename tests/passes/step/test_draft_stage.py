"""Draft stages grow the trees that a plain description of them grows, from the same rows.

Fake models give logits by the whole text that they attend to, and a reference in plain Python
grows the trees of one sequence after the other. Several steps follow on each other, so that what
one commits is what the next one reads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from specc.drafters.registry import drafter_of, drafters_of
from specc.passes.step.draft_stage import num_levels
from specc.passes.step.fuse_step import fuse_step
from specc.passes.step.step_graph import (
    HISTORY,
    PROPOSALS,
    STEP_INPUTS,
    TARGET,
    VOTE_WEIGHTS,
    slab_name,
    slots_name,
)
from specc.runtime.backends.captured.step_buffers import PADDING
from specc.sampling.rows import Rule
from specc.speculation.dynamic_tree import BudgetTree, DynamicTree
from specc.speculation.plans import MERGE, OFF, VOTE, SpecPlan
from specc.speculation.sharpness import sharpened
from specc.speculation.tree import TokenTree
from tests.passes.step.grown_trees import Proposed, Request, drawn_from, look_up, propose
from tests.passes.step.reading_models import NOTHING
from tests.passes.step.stepped_plan import Stepped, accept_alone, requests_of
from tests.tiers import only

PAIR, THREE = ("draft_0", "draft_1"), ("draft_2", "draft_0", "draft_1")
# later nodes have more children than earlier ones
UNEVEN = TokenTree((-1, 0, 0, 0, 1, 3, 3, 6))


def widths(*counts: int, drafts: tuple[str, ...] = ("draft_0",), combine: str = "") -> SpecPlan:
    return SpecPlan.from_widths(counts, drafts, combine)


def dynamic(*sizes: int) -> SpecPlan:
    return SpecPlan.from_dynamic(DynamicTree(*sizes))


def budget(*levels: int, draft: str = "draft_0") -> SpecPlan:
    return SpecPlan.from_dynamic(BudgetTree.of(levels), draft)


PLANS = [
    widths(1),
    widths(1, 1, 1),
    widths(3, 2, 1),
    SpecPlan.from_tree(UNEVEN),
    widths(2, 2, drafts=("draft_1",)),
    dynamic(3, 4, 1),
    dynamic(4, 2, 2),
    dynamic(4, 1, 4),
    dynamic(6, 2, 3),
    dynamic(16, 3, 4),
    # all candidates
    dynamic(22, 3, 3),
    budget(1, 1, 1),
    budget(3),
    budget(2, 4, 3, draft="draft_1"),
    budget(4, 6, 6, 2),
    widths(1, 1, 1, 1, drafts=("lookup-1",)),
    widths(1, 1, 1, drafts=("lookup-2",)),
    widths(1, 1, 1, drafts=("suffix",)),
    widths(1, 1, drafts=PAIR, combine=MERGE),
    widths(2, 2, 1, drafts=PAIR, combine=MERGE),
    widths(2, 1, drafts=("lookup-3", "draft_1", "suffix", "draft_0"), combine=MERGE),
    SpecPlan.from_tree(UNEVEN, THREE, MERGE),
    widths(1, 1, 1, drafts=("lookup-2", "suffix"), combine=MERGE),
    widths(1, 1, 1, drafts=PAIR, combine=VOTE),
    widths(1, 1, 1, 1, drafts=("draft_1", "lookup-2", "suffix", "draft_0"), combine=VOTE),
    widths(1, 1, 1, drafts=("lookup-1", "suffix"), combine=VOTE),
]
# drafts whose logits are multiplied, level by level
SHARP = [
    sharpened(widths(3, 2, 1), {"draft_0": [0.5, 1.0, 3.0]}),
    sharpened(dynamic(6, 2, 3), {"draft_0": [2.0, 0.75]}),
    sharpened(
        widths(2, 2, 1, drafts=PAIR, combine=MERGE),
        {"draft_0": [0.5, 1.5], "draft_1": [4.0, 1.0, 0.5]},
    ),
    sharpened(widths(1, 1, 1, drafts=PAIR, combine=VOTE), {"draft_1": [0.25]}),
    sharpened(budget(3, 4), {"draft_0": [0.5, 2.0]}),
    replace(sharpened(widths(3, 2, 1), {"draft_0": [0.75]}), tile=4),
]
# tiles of one node, of parts of levels, and of more nodes than the tree has
TILES = [
    (widths(1, 1, 1), 2),
    (widths(3, 2, 1), 1),
    (widths(3, 2, 1), 4),
    (widths(3, 2, 1), 99),
    (SpecPlan.from_tree(UNEVEN), 2),
    (dynamic(3, 4, 1), 3),
    (dynamic(4, 2, 2), 1),
    (dynamic(16, 3, 4), 2),
    (dynamic(22, 3, 3), 5),
    # of the draft's levels alone
    (dynamic(4, 5, 3), 4),
    (budget(4, 6, 2), 3),
    (widths(1, 1, 1, drafts=("lookup-2",)), 3),
    (widths(1, 1, 1, drafts=("suffix",)), 1),
    (widths(2, 2, 1, drafts=PAIR, combine=MERGE), 3),
    (widths(2, 1, drafts=("lookup-3", "draft_1", "suffix", "draft_0"), combine=MERGE), 4),
    (widths(1, 1, 1, drafts=PAIR, combine=VOTE), 2),
]
TILED = [replace(plan, tile=tile) for plan, tile in TILES]


def name_of(plan: SpecPlan) -> str:
    return f"{plan.name}-tile-{plan.tile}" if plan.tile else plan.name


IDS = [name_of(plan) for plan in PLANS + TILED]
STEPPED = [pytest.param(plan, id=name_of(plan)) for plan in PLANS + TILED]
# one of each kind: of a draft, of a lookup, of several, in tiles, and with other logits
QUICK = (
    "tree-3-2-1", "dynamic-4-2-2", "lookup1-chain-4", "suffix-chain-3", "merge-0+1-tree-2-2-1",
    "vote-0+1-chain-3", "tree-n8-d3-9788-tile-2", "tree-3-2-1-sharp-cefa",
    "dynamic-6-2-3-sharp-259f", "budget-4-6-6-2",
)  # fmt: skip


def num_steps(plan: SpecPlan) -> int:
    """More where nothing but lookups proposes: little is found at first."""
    return 5 if plan.models else 12


def check_tree(run: Stepped, env: dict, b: int, wanted: Proposed) -> None:
    """Tokens, topology, and the rows in which each draft holds the nodes."""
    plan, row, tree = run.plan, run.rows[b], wanted.tree
    text, num_nodes = run.requests[b].text, plan.num_nodes
    alive = [i for i, path in enumerate(tree.paths) if path is not None]
    tokens = env["tokens"][row].tolist()
    assert len(tokens) == len(tree.paths) == num_nodes
    assert tokens[0] == text[-1]
    assert [tokens[i] for i in alive[1:]] == [tree.tokens[i] for i in alive[1:]]
    if plan.is_static:
        assert tuple(tree.parents) == plan.tree.parents
        assert not {"parents", "ancestors", "depths"} & (env.keys() - run.constants.keys())
    else:
        assert env["parents"][row].tolist() == tree.parents
        depths = env["depths"].view(-1, num_nodes)[row].tolist()
        assert [depths[i] for i in alive] == [len(tree.paths[i]) for i in alive]
    assert ("image" in env) == (plan.has_image and (plan.combine == MERGE or plan.tile is None))
    if "image" in env:
        assert env["image"][row].tolist() == wanted.image
    assert wanted.slots.keys() == set(plan.model_names)
    for draft, slots in wanted.slots.items():
        found = env[slots_name(draft)]
        found = (found if found.dim() == 1 else found[row]).tolist()
        # nobody reads the entries of dead nodes
        assert [found[i] for i in alive] == [slots[i] for i in alive], draft


def check_passes(run: Stepped, wanted: list[Proposed]) -> None:
    """What each draft was fed, pass by pass: slot, position, and the text up to it."""
    plan = run.plan
    for draft in plan.model_names:
        texts = [request.text for request in run.requests]
        first = [
            (run.rows[b], slot, slot, text[: slot + 1])
            for b, text in enumerate(texts)
            for slot in range(max(0, len(text) - plan.catch_up), len(text))
        ]
        passes = [first]
        for level, frontier in enumerate(wanted[0].drafts[draft].passes):
            for start, stop in plan.tiles(len(frontier)):
                passes.append(
                    [
                        (run.rows[b], len(text) - 1 + slot, len(text) - 1 + len(path), text + path)
                        for b, text in enumerate(texts)
                        for slot, path in wanted[b].drafts[draft].passes[level][start:stop]
                    ]
                )
        assert run.models[draft].fed == passes, draft


def check_verification(run: Stepped, wanted: list[Proposed]) -> None:
    """The target is fed every node once, in the row of its id, as many at a time as a tile has."""
    tiles = run.plan.tiles(run.plan.num_nodes)
    for fed, (start, stop) in zip(run.models[TARGET].fed, tiles, strict=True):
        assert fed == [
            (run.rows[b], len(text) - 1 + i, len(text) - 1 + len(path), (*text, *path))
            for b, text in enumerate(request.text for request in run.requests)
            for i, path in enumerate(wanted[b].tree.paths)
            if path is not None and start <= i < stop
        ]
    for call, (start, stop) in zip(run.models[TARGET].calls, tiles, strict=True):
        slots = call["slot"].view(-1, stop - start).tolist()
        lengths = call["cache_len"].tolist()
        assert lengths[1] == PADDING
        assert slots == [[length + i for i in range(start, stop)] for length in lengths]
        assert int(call["positions"].min()) >= 0
    batch = len(run.rows) + 1
    most = batch * (run.plan.tile or 1 << 20)
    calls = [call for model in run.models.values() for call in model.calls]
    assert all(batch <= len(call["rows"]) <= most for call in calls)


def check_sources(run: Stepped, env: dict, wanted: list[Proposed]) -> None:
    """`q_rows` name the rows of draft logits that each proposal was drawn from."""
    levels = [env[f"q_{i}"] for i in range(num_levels(run.plan))]
    assert f"q_{len(levels)}" not in env or not levels
    if not levels:
        return
    counts = [level.shape[0] // (len(run.rows) + 1) for level in levels]
    places = [(level, f) for level, count in zip(levels, counts, strict=True) for f in range(count)]
    q_rows, counted = (
        run.constants["q_rows"].tolist(),
        dict(zip(map(id, levels), counts, strict=True)),
    )
    for b, row in enumerate(run.rows):
        assert len(q_rows) == len(wanted[b].q)
        for q_row, source in zip(q_rows, wanted[b].q, strict=True):
            if source is None:
                assert q_row == -1
                continue
            level, f = places[q_row]
            draft, text = source
            logits = drawn_from(run.plan, run.requests[b], draft, text)
            assert torch.equal(level[row * counted[id(level)] + f], logits)


def check_outcome(run: Stepped, env: dict, b: int, wanted: Proposed) -> None:
    """Path and output are those of the tree that was wanted, and caches hold the text."""
    row, request = run.rows[b], run.requests[b]
    path, output = accept_alone(run.plan, wanted, request)
    padding = [-1] * (run.plan.max_depth + 1 - len(path))
    assert env["path"][row].tolist() == path + padding
    assert env["num_accepted"][row] == len(path) - 1
    assert env["output_tokens"][row].tolist() == output + padding
    text, length = (*request.text, *output), len(request.text) - 1
    assert env["next_last_tokens"][row].tolist() == list(
        ((0,) * run.num_last + text)[-run.num_last :]
    )
    assert env["next_cache_len"][row] == length + len(path) == len(text) - 1
    for name, model in run.models.items():
        slots = list(range(len(path))) if name == TARGET else [wanted.slots[name][n] for n in path]
        held = next((i for i, slot in enumerate(slots) if slot < 0), len(path))
        found = env["next_cache_len" if name == TARGET else f"{name}_len"][row]
        assert found == length + held, name
        committed = model.read(run.blocks_of(b), list(range(length + held)))
        assert committed == text[: length + held], name
        # the next first level reads the rest
        assert length + held >= len(text) - run.plan.catch_up
    assert run.recorded(b, len(text)) == text
    assert run.recorded(b, len(text) + 1)[-1] == NOTHING


def decode_plainly(request: Request, count: int) -> list[int]:
    """Tokens without any draft."""
    proposed = propose(OFF_TREE, request)
    tokens: list[int] = []
    while len(tokens) < count:
        at = Request((*request.text, *tokens), request.values, request.words)
        tokens += accept_alone(OFF, proposed, at)[1]
    return tokens


# nothing is proposed
OFF_TREE = SpecPlan("off", drafters=drafters_of("suffix"))


def check_step(run: Stepped, plan: SpecPlan) -> None:
    """One step, against the reference."""
    env = run.step()
    wanted = [propose(plan, request) for request in run.requests]
    check_passes(run, wanted)
    check_verification(run, wanted)
    check_sources(run, env, wanted)
    for b, one in enumerate(wanted):
        check_tree(run, env, b, one)
        check_outcome(run, env, b, one)
    run.take(env)


@pytest.mark.default(
    "lookup1-chain-4", "merge-0+1-tree-2-2-1", "tree-3-2-1-sharp-cefa", "dynamic-6-2-3-sharp-259f",
    "budget-4-6-6-2",
)  # fmt: skip
@pytest.mark.parametrize(
    "plan",
    only(QUICK, [*STEPPED, *(pytest.param(x, id=name_of(x)) for x in SHARP)]),
)
def test_steps(plan):
    run = Stepped(plan, requests_of(plan, seed=1), seed=2)
    begin = list(run.requests)
    # the first reads prompts, the others what was accepted; more of them are counted below
    for _ in range(3 if plan.models else 6):
        check_step(run, plan)
    for first, last in zip(begin, run.requests, strict=True):
        if first.values[0] == 0 or first.words[2] in (Rule.COUPLED, Rule.DELTA):
            output = last.text[len(first.text) :]
            assert list(output) == decode_plainly(first, len(output))


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(dynamic(70, 9, 3), id="dynamic-nodes"),
        pytest.param(dynamic(5, 8, 10), id="dynamic-rows", marks=pytest.mark.slow),
        pytest.param(widths(3, 3, 2, drafts=THREE, combine=MERGE), id="merged"),
        pytest.param(
            replace(dynamic(70, 9, 3), tile=30), id="dynamic-nodes-in-tiles", marks=pytest.mark.slow
        ),
        pytest.param(
            replace(dynamic(5, 8, 10), tile=3), id="dynamic-rows-in-tiles", marks=pytest.mark.slow
        ),
        pytest.param(
            replace(widths(3, 3, 2, drafts=THREE, combine=MERGE), tile=17),
            id="merged-in-tiles",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            replace(widths(4, 4, 4), tile=40), id="static-in-tiles", marks=pytest.mark.slow
        ),
    ],
)
def test_more_than_64_nodes(plan):
    """A node's ancestors take more than one word: of those verified, or of those drafted."""
    assert plan.num_rows > 64
    run = Stepped(plan, requests_of(plan, seed=3)[1:4], seed=4)
    for _ in range(2):
        check_step(run, plan)


def events_of(plan: SpecPlan) -> Counter[str]:
    """What happens in the steps of a plan above, by the reference alone."""
    run = Stepped(plan, requests_of(plan, seed=1), seed=2)
    found: Counter[str] = Counter()
    for _ in range(num_steps(plan)):
        run.draw_extra()
        for b, request in enumerate(run.requests):
            wanted = propose(plan, request)
            path, output = accept_alone(plan, wanted, request)
            run.requests[b] = replace(request, text=(*request.text, *output))
            alive = [node for node in wanted.tree.paths if node is not None]
            found["whole path"] += len(path) == plan.max_depth + 1
            found["part of a path"] += 1 < len(path) <= plan.max_depth
            found["no node"] += len(path) == 1
            found["dead nodes"] += len(alive) < plan.num_nodes
            found["nothing proposed"] += len(alive) == 1
            found["ties"] += wanted.tree.num_ties
            for slots in wanted.slots.values():
                rows = [slots[node] >= 0 for node in path]
                found["leaf without a row"] += rows[:-1] == [True] * len(path[1:]) and not rows[-1]
                found["rows of others alone"] += len(path) > 2 and not any(rows[1:-1])
                found["row moved"] += any(0 <= slots[n] != i for i, n in enumerate(path))
            for draft, one in wanted.drafts.items():
                own = [path for path in one.paths if path is not None]
                found["equal siblings"] += len(set(own)) < len(own)
                if (ngram := getattr(drafter_of(draft), "ngram", None)) is not None:
                    depth, text = plan.max_depth, request.text
                    more = look_up(text, ngram + 1, depth)
                    found["a longer suffix"] += more != look_up(text, ngram, depth)
    return found


@pytest.mark.default("lookup2-chain-3-", "merge-lookup3+1+suffix+0-tree-2-1-")
@pytest.mark.parametrize(
    ("plan", "events"),
    [
        pytest.param(
            widths(3, 2, 1), "equal siblings,leaf without a row,row moved", marks=pytest.mark.slow
        ),
        (SpecPlan.from_tree(UNEVEN), "leaf without a row,row moved"),
        (dynamic(3, 4, 1), "ties,leaf without a row"),
        (budget(4, 6, 6, 2), "ties,equal siblings,leaf without a row,row moved"),
        pytest.param(
            dynamic(16, 3, 4), "ties,leaf without a row,row moved", marks=pytest.mark.slow
        ),
        (widths(1, 1, 1, 1, drafts=("lookup-1",)), "dead nodes,nothing proposed,a longer suffix"),
        (widths(1, 1, 1, drafts=("lookup-2",)), "dead nodes,nothing proposed,a longer suffix"),
        pytest.param(
            widths(2, 2, 1, drafts=PAIR, combine=MERGE),
            "dead nodes,equal siblings,leaf without a row,rows of others alone,row moved",
            marks=pytest.mark.slow,
        ),
        (
            widths(2, 1, drafts=("lookup-3", "draft_1", "suffix", "draft_0"), combine=MERGE),
            "dead nodes,leaf without a row,row moved",
        ),
        (widths(1, 1, 1, drafts=PAIR, combine=VOTE), "ties,rows of others alone"),
        (
            widths(1, 1, 1, drafts=("lookup-1", "suffix"), combine=VOTE),
            "ties,dead nodes,nothing proposed",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, SpecPlan) else "",
)
def test_what_happens_in_these_steps(plan, events):
    """Else a wrong stage could hide."""
    found = events_of(plan)
    # the deepest leaf of the uneven tree hangs below a third sibling, which is rarely taken
    is_uneven = plan.is_static and plan.tree == UNEVEN
    for event in ["no node", *events.split(","), *["whole path"][is_uneven:]]:
        assert found[event] > 0, event
    assert found["part of a path"] > 0 or plan.max_depth == 1


@pytest.mark.parametrize("plan", PLANS + TILED, ids=IDS)
def test_stages_read_documented_names_only(plan):
    """What a runner brings: rows, caches, history, and what the plan's drafts need of the host."""
    models = (TARGET, *plan.model_names)
    program = fuse_step(plan, dict.fromkeys((*models, "draft_9"), 2))
    assert list(program.stages) == ["draft", "verify", "accept_commit"]
    known = {*STEP_INPUTS, *program.constants, HISTORY}
    known |= {slab_name(model, i) for model in models for i in (0, 1)}
    known |= {PROPOSALS} if "suffix" in plan.drafts else set()
    known |= {VOTE_WEIGHTS} if plan.combine == VOTE else set()
    read: set[str] = set()
    for graph in program.stages.values():
        names = {node.target for node in graph.find_nodes(op="placeholder")}
        assert names <= known, names - known
        read |= names
        (output,) = graph.find_nodes(op="output")
        known |= output.args[0].keys()
    assert {PROPOSALS, VOTE_WEIGHTS} & read == {PROPOSALS, VOTE_WEIGHTS} & known
    assert {f"{model}_len" for model in plan.model_names} <= known
    # no stage carries what no stage reads
    assert program.constants.keys() <= read


def test_levels_of_logits_that_rules_look_at():
    """None where a plan serves no rule that does."""
    counts = {plan.name: num_levels(plan) for plan in PLANS}
    assert counts["chain-3"] == counts["tree-n8-d3-9788"] == 3
    assert counts["merge-0+1-chain-2"] == 2 + 2
    assert counts["merge-2+0+1-tree-n8-d3-9788"] == 3 + 3 + 3
    assert counts["merge-lookup3+1+suffix+0-tree-2-1"] == 2 + 2
    assert counts["budget-4-6-6-2"] == 4
    for name, count in counts.items():
        has_none = name.startswith(("dynamic", "vote", "lookup", "suffix", "merge-lookup2+suffix"))
        assert (count == 0) == has_none, name
