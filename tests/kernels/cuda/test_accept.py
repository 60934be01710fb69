"""`accept` in Triton against its oracle."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map_only

from specc.kernels.cuda import accept_pass, accept_walk, node_best, tree_context
from specc.kernels.cuda.accept import accept
from specc.kernels.cuda.launch import unfiltered
from specc.kernels.reference.processing import are_unfiltered
from specc.sampling.rows import Rule
from tests.kernels.cuda import cases_accept as cases
from tests.kernels.cuda.typed_trees import GREEDY, MIXED, PADDING, PLAIN, Row, forest, options_of

# the interpreter takes logarithms of 0
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

slow = pytest.mark.slow
# rows whose walks make passes
TRIED = (
    Row(Rule.MSS, length=23),
    Row(Rule.SWOR, 1.1),
    Row(Rule.SWOR, 0.9, min_p=0.02, presence=0.6, num_prompt=40, length=30),
)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("rows", "widths", "vocab", "dtype", "is_small", "options"),
    [
        pytest.param(MIXED, (2, 1), 592, F32, False, {}, id="mixed-v592"),
        pytest.param(
            MIXED, (3,), 37, BF16, False, {"kind": "some"}, id="mixed-bf16-v37-some", marks=slow
        ),
        pytest.param(
            MIXED,
            (2,),
            528,
            F16,
            True,
            {"num_sources": 2, "seed": 1},
            id="mixed-fp16-v528-merged",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            MIXED,
            (1, 2),
            7,
            F32,
            False,
            {"kind": "given", "seed": 2},
            id="mixed-v7-given",
            marks=slow,
        ),
        pytest.param(PLAIN, (2, 2), 1300, BF16, True, {"kind": "holes"}, id="bf16-v1300-holes"),
        pytest.param(PLAIN, (1, 1, 1), 40, F32, False, {"max_depth": 1}, id="walk-is-cut"),
        pytest.param(PLAIN, (2,), 50, F16, False, {"max_depth": 0}, id="fp16-no-level"),
        pytest.param(PLAIN, (), 70, BF16, False, {}, id="bf16-roots-alone"),
        pytest.param(PLAIN, (1, 1), 1, F32, False, {}, id="v1"),
        pytest.param(
            MIXED, (1, 1), 12, F32, False, {"num_sources": 3}, id="merged-3-v12", marks=slow
        ),
    ],
)
def test_accept(rows, widths, vocab, dtype, is_small, options, device):
    inputs = forest(rows, widths, vocab, dtype, **options)
    _, accepted = cases.check_accept(inputs, device, is_small=is_small)
    # cases in which nothing is accepted, or nothing rejected, would show little
    if inputs.max_depth and vocab > 1:
        assert len(accepted[inputs.cache_len >= 0].unique()) > 1


def test_a_bound_of_noise_passes_over_no_best(device):
    cases.check_bound(device)


# blocks are larger, and a thread draws more noise at a time, where a vocabulary is large
@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab", "num_blocks"), [pytest.param(3000, 8, marks=pytest.mark.slow), (6500, 4)]
)
def test_the_best_of_a_row_in_any_of_its_blocks(vocab, num_blocks, device):
    cases.check_many_blocks(vocab, num_blocks, device)


@pytest.mark.slow
def test_tree_of_1024_nodes(device):
    """A few of them live, the last one too; the oracle walks all levels of the chain."""
    rows = [Row(Rule.COUPLED, 0.3)]
    inputs = forest(rows, (1, 1, 1, 1, 1, 1), 11, F32, noise=0.2)
    batch, few, num_nodes = len(rows), inputs.tokens.shape[1], 1024
    places = torch.tensor([0, 1, 300, 301, 700, 900, 1023])
    for name, fill in (("tokens", 3), ("parents", -1)):
        wide = torch.full((batch, num_nodes), fill, dtype=getattr(inputs, name).dtype)
        wide[:, places] = getattr(inputs, name)
        setattr(inputs, name, wide)
    inputs.parents[:, places[1:]] = places[:-1].int()
    logits = torch.full((batch, num_nodes, 11), float("nan"))
    logits[:, places] = inputs.logits.view(batch, few, -1)
    inputs.logits, inputs.q_rows, inputs.draft_logits = logits.flatten(0, 1), None, []
    _, accepted = cases.check_accept(inputs, device)
    assert int(accepted.max()) >= 4


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "row",
    [
        Row(temperature=0.0, repetition=1.3, length=14, num_prompt=6),
        Row(temperature=0.0, repetition=0.8, presence=0.25, length=11, num_prompt=12),
        Row(temperature=0.0, presence=-0.5, frequency=0.375, length=0, num_prompt=2),
        Row(temperature=0.0, repetition=1.7, frequency=-0.25, length=16, num_prompt=0),
        Row(temperature=0.0, frequency=0.125, length=9, num_prompt=2**40),
    ],
    ids=["repetition", "prompt-in-tree", "no-history", "negative", "all-prompt"],
)
def test_penalties_count_history_root_and_path(row, dtype, device):
    cases.check_penalties(row, device, dtype)


def log(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_each_proposal_of_a_merged_node_takes_its_q_from_the_target(device):
    """Both drafts propose token 1: what is left of P after one try and after two differs."""
    target = log([0.25] * 4, [0.25] * 4)
    drafts = [log([0.1, 0.7, 0.1, 0.1]), log([0.4, 0.4, 0.1, 0.1])]
    counts = []
    for image in ([0, 1, -1], [0, 1, 1]):
        inputs = cases.given_tree(Rule.MSS, [0, 1], [-1, 0], target, drafts, [-1, 0, 1], 14, image)
        _, accepted = cases.check_accept(inputs, device)
        counts.append(int(accepted.sum()))
    assert 0 < counts[0] == counts[1] < 14


@pytest.mark.slow
def test_swor_takes_its_tried_tokens_from_its_own_row_alone(device):
    """The second proposal of a sure row is dead, another row's and one of no row are not."""
    inf = float("inf")
    target = torch.tensor([[0.0, -inf, 0.0, -inf]]).repeat(4, 1)
    sure = torch.tensor([[-inf, 0.0, -inf, -inf], [0.0, 0.0, 0.0, -inf]])
    entered = set()
    for q_rows in ([-1, 0, 0, 1], [-1, 1, 1, 1], [-1, 0, -1, 1]):
        tokens, parents = [0, 1, 2, 0], [-1, 0, 0, 0]
        inputs = cases.given_tree(Rule.SWOR, tokens, parents, target, [sure], q_rows, 4)
        path, _ = cases.check_accept(inputs, device)
        entered |= set(path[:, 1].tolist())
    assert entered == {2, 3}


@pytest.mark.parametrize(
    ("rounds", "widths", "vocab", "options"),
    [
        pytest.param(1, (3, 1), 1100, {"noise": 3.0}, id="tree-1"),
        pytest.param(9, (3, 1), 1100, {"noise": 3.0}, id="tree-9", marks=slow),
        pytest.param(1, (1, 1, 1), 1700, {"noise": 2.0}, id="chain-1", marks=slow),
        pytest.param(9, (2,), 530, {"num_sources": 2, "noise": 2.0}, id="merged-9"),
        pytest.param(1, (2,), 530, {"num_sources": 2, "noise": 2.0}, id="merged-1", marks=slow),
    ],
)
def test_passes_of_parts_and_those_of_one_program(
    rounds, widths, vocab, options, device, monkeypatch
):
    """Walks that need more passes than programs share, and walks that need fewer."""
    monkeypatch.setattr(accept_walk, "rounds_of", lambda num_columns, max_depth: rounds)
    inputs = forest(TRIED, widths, vocab, F32, **options)
    _, accepted = cases.check_accept(inputs, device, is_small=True)
    assert len(accepted.unique()) > 1


def test_a_pass_is_shared_until_rounds_run_out(device, monkeypatch):
    """What rows wait for after each launch: what a rejection leaves, a draw, nothing."""
    target = log([0.5, 0.05, 0.45], [0.9, 0.05, 0.05])
    drafts = [log([0.98, 0.01, 0.01])]
    inputs = cases.given_tree(Rule.MSS, [0, 0], [-1, 0], target, drafts, [-1, 0], 9)
    found = cases.states_after_launches(inputs, device, monkeypatch)
    _, accepted = cases.check_accept(inputs, device)
    rejected, entered = accepted == 0, accepted == 1
    assert rejected.any()
    assert entered.any()
    for states, after_rejection, after_entry in zip(
        found,
        (accept_pass.REST, accept_pass.DRAW, accept_pass.DONE),
        (accept_pass.DRAW, accept_pass.DONE, accept_pass.DONE),
        strict=True,
    ):
        assert (states[rejected] == after_rejection.value).all()
        assert (states[entered] == after_entry.value).all()


def test_swor_renormalizes_q_after_each_rejection(device):
    """A sibling of the same row has twice its probability once half of the mass was tried."""
    target = log([0.02, 0.4, 0.2, 0.38]).repeat(3, 1)
    drafts = [log([0.5, 0.3, 0.1, 0.1])]
    inputs = cases.given_tree(Rule.SWOR, [0, 0, 1], [-1, 0, 0], target, drafts, [-1, 0, 0], 24)
    path, _ = cases.check_accept(inputs, device)
    entered = path[:, 1].tolist()
    assert entered.count(2) > 4
    assert entered.count(-1) > 4


def test_swor_keeps_sums_of_rows_apart(device):
    """A proposal that is left out was to be tried next: the sum that is there is of its row."""
    target = log([0.02, 0.3, 0.2, 0.48]).repeat(4, 1)
    drafts = [log([0.5, 0.3, 0.1, 0.1], [0.04, 0.32, 0.32, 0.32])]
    inputs = cases.given_tree(
        Rule.SWOR, [0, 0, 0, 2], [-1, 0, 0, 0], target, drafts, [-1, 0, 0, 1], 24
    )
    path, _ = cases.check_accept(inputs, device)
    entered = path[:, 1].tolist()
    assert entered.count(3) > 4
    assert entered.count(-1) > 4
    assert 2 not in entered


@pytest.mark.parametrize("batch", [1, 3, 300, 5000])
@pytest.mark.parametrize("vocab", [1, 4097, 128256, 151936, 262144])
def test_parts_of_a_pass_tile_the_vocabulary(batch, vocab):
    num_parts, num_blocks, total = accept_walk.parts_of(batch, vocab)
    block = 4 * accept_walk.COUNTERS
    assert (num_parts - 1) * num_blocks * block < vocab <= num_parts * num_blocks * block
    assert (total - 1) * block < vocab <= total * block
    assert num_parts <= accept_walk.MAX_PARTS
    assert num_parts == 1 or batch * num_parts <= accept_walk.MAX_PROGRAMS


def test_chains_share_two_passes():
    assert accept_walk.rounds_of(5, 4) == 2
    assert accept_walk.rounds_of(16, 3) == accept_walk.TREE_ROUNDS == 4


@pytest.mark.parametrize(
    "widths", [(), pytest.param((2, 1), marks=pytest.mark.slow)], ids=["root", "tree"]
)
def test_unfiltered_rows_need_three_launches(widths, device):
    """The same as with all launches, whatever lies in memory that none of them has written."""
    rows = [Row(Rule.COUPLED, **GREEDY), Row(), Row(Rule.DELTA, 0.8, repetition=1.3, presence=0.4)]
    rows += [
        Row(Rule.SWOR, 0.0, top_p=0.3, top_k=2),
        Row(Rule.DELTA, length=PADDING),
        Row(Rule.MSS, 0.0),
    ]
    inputs = forest(rows, widths, 600, BF16, noise=0.6)
    assert are_unfiltered(inputs.values, inputs.words)
    wanted = cases.run(inputs, device)
    with cases.counted_launches() as names, unfiltered():
        found = cases.run(inputs, device)
    assert names == ["tree_context_kernel", "node_best_kernel", "accept_walk_kernel"]
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    cases.check_accept(inputs, device)


@pytest.mark.parametrize(
    ("row", "is_unfiltered"),
    [
        (Row(), True),
        (Row(Rule.DELTA, 0.7, repetition=1.2), True),
        (Row(top_p=0.99), False),
        (Row(min_p=0.01), False),
        (Row(top_k=1000), False),
        (Row(Rule.MSS), False),
        (Row(Rule.SWOR), False),
        (Row(Rule.SWOR, 0.0, top_p=0.5, min_p=0.1, top_k=3), True),
        (Row(temperature=1e-6, top_p=0.5), True),
    ],
)
def test_which_rows_are_unfiltered(row, is_unfiltered):
    values, words, _ = options_of([Row(), row, Row(temperature=0.0)], 0)
    assert are_unfiltered(values, words) == is_unfiltered


def test_parents_that_are_none_are_not_followed(device):
    cases.check_safety(device)


def test_no_sequence(device):
    inputs = forest(PLAIN, (2,), 9, F32)
    empty = [x[:0] if isinstance(x, torch.Tensor) else x for x in inputs.arguments()]
    empty[5] = inputs.q_rows
    path, accepted, output = accept(*empty)
    assert (path.shape, accepted.shape, output.shape) == ((0, 2), (0,), (0, 2))


@pytest.mark.parametrize("num_rows", [1, 32, 1024, 16384], ids="r{}".format)
@pytest.mark.parametrize("vocab", [1, 4097, 151936, 262144], ids="v{}".format)
def test_parts_tile_the_vocabulary(num_rows, vocab):
    c = node_best.config(num_rows, vocab)
    part = c["num_blocks"] * c["BV"]
    assert (c["num_parts"] - 1) * part < vocab <= c["num_parts"] * part
    assert c["num_parts"] == 1 or num_rows * c["num_parts"] <= node_best.MAX_PROGRAMS
    assert c["BV"] % (4 * c["BQ"]) == 0
    slices = tree_context.config(1, vocab)
    assert slices["num_slices"] * slices["slice_size"] >= vocab


def inputs_of(**change) -> dict:
    names = vars(forest(PLAIN[:2], (2,), 5, F32))
    return names | change


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"logits": torch.zeros(6, 5, dtype=torch.float64)}, "torch.float64"),
        ({"logits": torch.zeros(5, 5)}, "5 rows of logits"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.int32)}, "torch.int32"),
        ({"parents": torch.zeros(2, 3, dtype=torch.int64)}, "parents .* of torch.int64"),
        ({"parents": torch.zeros(2, 4, dtype=torch.int32)}, r"parents \[2, 4\]"),
        ({"parents": torch.zeros(3, 2, dtype=torch.int32).T}, "strides"),
        ({"max_depth": -1}, "max_depth -1"),
        ({"max_depth": 1024}, "max_depth 1024"),
        ({"image": torch.zeros(2, 3, dtype=torch.int64)}, r"image \[2, 3\] of torch.int64"),
        ({"image": torch.zeros(1, 3, dtype=torch.int32)}, r"image \[1, 3\]"),
        ({"image": torch.zeros(2, 4097, dtype=torch.int32)}, "4097 columns"),
        ({"q_rows": torch.zeros(4, dtype=torch.int32)}, r"q_rows \[4\]"),
        ({"draft_logits": [torch.zeros(3, 5)]}, r"draft logits \[3, 5\]"),
        ({"draft_logits": [torch.zeros(2, 6)]}, r"draft logits \[2, 6\]"),
        ({"values": torch.zeros(2, 5)}, r"values \[2, 5\]"),
        ({"values": torch.zeros(6, 2).T}, "strides"),
        ({"words": torch.zeros(2, 4)}, "words .* of torch.float32"),
        ({"cache_len": torch.zeros(2, dtype=torch.int64)}, "cache_len .* torch.int64"),
        ({"history": torch.zeros(2, 4, dtype=torch.int64)}, "history .* torch.int64"),
        ({"block_table": torch.zeros(3, 1, dtype=torch.int32)}, r"block_table \[3, 1\]"),
    ],
    ids=lambda x: "" if isinstance(x, dict) else None,
)
def test_bad_inputs_are_refused_with_their_values(change, found, device):
    # some are found only after the first launch
    with pytest.raises(ValueError, match=found):
        accept(**tree_map_only(torch.Tensor, lambda x: x.to(device), inputs_of(**change)))
