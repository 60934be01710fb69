"""`node_winners` in Triton against its oracle, in tiles of every size."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from specc.kernels.cuda import node_best
from specc.kernels.cuda.node_winners import node_winners
from specc.kernels.reference.accept import node_winners_reference
from specc.sampling.rows import Rule
from tests.kernels.cuda.cases_accept import SMALL
from tests.kernels.cuda.near_ties import check_equal_or_near, permitted_winners
from tests.kernels.cuda.typed_trees import (
    MIXED,
    PADDING,
    PLAIN,
    Forest,
    Row,
    forest,
    inside,
    options_of,
    sizes,
    spoil_padding,
)

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def check_node_winners(
    inputs: Forest, tile: int, device: torch.device, *, is_small: bool = False
) -> Tensor:
    """Tile by tile equal to the oracle, on a GPU but for near ties; returns winners [B, N]."""
    batch, num_nodes = inputs.tokens.shape
    by_node = inputs.logits.view(batch, num_nodes, -1)
    rows = ("values", "words", "cache_len", "history", "block_table")
    tiles = [(first, by_node[:, first : first + tile]) for first in range(0, num_nodes, tile)]
    wanted = [
        node_winners_reference(
            logits.flatten(0, 1), inputs.tokens, inputs.parents, first,
            *(getattr(inputs, name) for name in rows),
        )
        for first, logits in tiles
    ]  # fmt: skip
    before = copy.deepcopy(inputs)
    spoil_padding(inputs)
    shared = inputs.parents.stride(0) == 0
    parents = inputs.parents.to(device) if shared else inside(inputs.parents, 0, device)
    options = (inside(inputs.values, 0.5, device), inside(inputs.words, 1, device))
    paged = (inside(inputs.history, 1, device), inside(inputs.block_table, 0, device))
    by_node = inputs.logits.view(batch, num_nodes, -1)
    for (first, logits), want in zip(tiles, wanted, strict=True):
        # beyond a row lies what would win
        own = inside(by_node[:, first : first + logits.shape[1]].flatten(0, 1), torch.nan, device)
        with sizes(**(SMALL if is_small else {})):
            found = node_winners(
                own, inside(inputs.tokens, 0, device), parents, first,
                *options, inputs.cache_len.to(device), *paged,
            )  # fmt: skip
        assert found.dtype == want.dtype
        width = logits.shape[1]
        check_equal_or_near(
            found.tolist(), want.tolist(), device,
            lambda r, found=found, first=first, width=width: (
                int(found[r]) in permitted_winners(before, r // width, first + r % width)
            ),
        )  # fmt: skip
    return torch.cat([want.view(batch, -1) for want in wanted], dim=1)


def check_best(vocab: int, max_programs: int, value: float, device: torch.device) -> None:
    """Greedy roots; the best comes twice, whole blocks or single tokens apart: the lower wins."""
    pairs = [(0, 256), (3, 4), (255, 257), (255, 511), (600, 1112), (1023, 1024), (1024, 1280)]
    pairs.append((vocab - 300, vocab - 1))
    logits = torch.randn(len(pairs), vocab, generator=torch.Generator().manual_seed(vocab))
    for row, (first, second) in enumerate(pairs):
        logits[row, [first, second]] = value
    inputs = roots_of([Row(temperature=0.0)] * len(pairs), logits)
    with sizes(MAX_PROGRAMS=(node_best, max_programs)):
        winners = check_node_winners(inputs, 1, device)
    assert winners.flatten().tolist() == [first for first, _ in pairs]


def roots_of(rows: list[Row], logits: Tensor) -> Forest:
    """Trees of one node."""
    count = len(rows)
    return Forest(
        logits, torch.zeros(count, 1).long(), torch.full((count, 1), -1).int(),
        0, None, None, [], *options_of(rows, 3),
        torch.zeros(1, 4).int(), torch.zeros(count, 1).int(),
    )  # fmt: skip


# the interpreter takes logarithms of 0


slow = pytest.mark.slow
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.default("one-tile", "bf16-roots-alone")
@pytest.mark.parametrize(
    ("rows", "widths", "vocab", "dtype", "tile", "is_small", "options"),
    [
        pytest.param(MIXED, (2, 1), 300, F32, 2, False, {}, id="mixed-v300-tiles-of-2", marks=slow),
        pytest.param(
            MIXED, (3,), 37, BF16, 1, False, {}, id="mixed-bf16-v37-tiles-of-1", marks=slow
        ),
        pytest.param(
            MIXED, (2,), 528, F16, 3, True, {"num_sources": 2, "seed": 1},
            id="mixed-fp16-v528-merged",
            marks=slow,
        ),
        pytest.param(PLAIN, (2, 2), 700, BF16, 4, True, {"kind": "holes"}, id="bf16-v700-holes"),
        pytest.param(PLAIN, (1, 1, 1), 40, F32, 9, False, {}, id="one-tile"),
        pytest.param(PLAIN, (), 70, BF16, 1, False, {}, id="bf16-roots-alone"),
        pytest.param(PLAIN, (1, 1), 1, F32, 2, False, {}, id="v1"),
    ],
)  # fmt: skip
def test_node_winners(rows, widths, vocab, dtype, tile, is_small, options, device):
    inputs = forest(rows, widths, vocab, dtype, **options)
    winners = check_node_winners(inputs, tile, device, is_small=is_small)
    assert vocab == 1 or len(winners.unique()) > 3


@pytest.mark.default("masked-bf16")
@pytest.mark.parametrize("dtype", [pytest.param(F32, marks=slow), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["ties", "masked", "nan"])
def test_greedy_rows_of_all_kinds(kind, dtype, device):
    """Ties go to the lower token, NaN wins, masked tokens lose."""
    inputs = forest([Row(temperature=0.0), Row(Rule.DELTA, 0.0, frequency=0.5)], (2, 2), 300, F32)
    logits = torch.round(inputs.logits)
    if kind == "masked":
        logits[logits < 2.0] = -torch.inf
    elif kind == "nan":
        logits[torch.rand_like(logits) < 0.01] = torch.nan
        logits[::2, 7] = torch.inf
    inputs.logits = logits.to(dtype)
    check_node_winners(inputs, 3, device)


@pytest.mark.parametrize("tile", [1, pytest.param(3, marks=slow)])
def test_penalties_of_the_path_decide(tile, device):
    """In later tiles, too: of the best token, and of what filters leave."""
    rows = [
        Row(temperature=0.0, repetition=3.0, presence=2.0, num_prompt=4),
        Row(temperature=0.0, frequency=-1.5, length=3),
        Row(Rule.DELTA, 0.8, top_k=1, frequency=2.0, length=2),
        Row(top_k=2, presence=-3.0, num_prompt=2, length=5),
        Row(top_p=0.3, repetition=0.2, length=1),
    ]
    inputs = forest(rows, (2, 2, 1), 9, F32, seed=5)
    # close to each other
    inputs.logits *= 0.1
    found = check_node_winners(inputs, tile, device)
    for column in (3, 4, 5):
        inputs.values[:, column] = float(column == 3)
    plain = check_node_winners(inputs, tile, device)
    assert (found != plain).float().mean() > 0.3


@pytest.mark.default("4-blocks-inf")
@pytest.mark.parametrize(
    ("max_programs", "value"),
    [
        pytest.param(1, 9.0, marks=pytest.mark.slow),
        (1, float("nan")),
        (20, float("inf")),
        pytest.param(2048, 9.0, marks=pytest.mark.slow),
    ],
    ids=["8-blocks", "8-blocks-nan", "4-blocks-inf", "1-block"],
)
def test_the_lower_of_equal_tokens_wins(max_programs, value, device):
    check_best(1900, max_programs, value, device)


def test_nodes_that_hang_below_no_root_have_no_winner(device):
    """Cycles, parents beyond the tree, nodes below dead ones, and padding have no winner."""
    rows = [Row(), Row(temperature=0.0), Row(length=PADDING)]
    inputs = roots_of(rows, torch.randn(3 * 7, 9))
    inputs.tokens = torch.randint(9, (3, 7))
    inputs.parents = torch.tensor([[-1, 0, 3, 2, 9, -1, 5]] * 3, dtype=torch.int32)
    inputs.cache_len = torch.tensor([0, 1, PADDING], dtype=torch.int32)
    for tile in (7, 2):
        winners = check_node_winners(inputs, tile, device)
        assert (winners >= 0).tolist() == [[True] * 2 + [False] * 5] * 2 + [[False] * 7]


def test_no_sequence(device):
    inputs = forest(PLAIN, (2,), 9, F32)
    empty = [
        getattr(inputs, name)[:0]
        for name in ("values", "words", "cache_len", "history", "block_table")
    ]
    found = node_winners(inputs.logits[:0], inputs.tokens[:0], inputs.parents[:0], 0, *empty)
    assert found.shape == (0,)


def inputs_of(**change) -> dict:
    inputs = vars(forest(PLAIN[:2], (2,), 5, F32))
    names = ("tokens", "parents", "values", "words", "cache_len", "history", "block_table")
    given = {name: inputs[name] for name in names}
    return given | {"logits": torch.zeros(4, 5), "first_node": 1} | change


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"logits": torch.zeros(4, 5, dtype=torch.float64)}, "torch.float64"),
        ({"logits": torch.zeros(5, 5)}, "5 rows of logits"),
        ({"first_node": 2}, "from node 2 on"),
        ({"first_node": -1}, "from node -1 on"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.int32)}, "torch.int32"),
        ({"parents": torch.zeros(2, 4, dtype=torch.int32)}, r"parents \[2, 4\]"),
        ({"parents": torch.zeros(3, 2, dtype=torch.int32).T}, "strides"),
        ({"values": torch.zeros(2, 5)}, r"values \[2, 5\]"),
        ({"cache_len": torch.zeros(2, dtype=torch.int64)}, "cache_len .* torch.int64"),
        ({"history": torch.zeros(2, 4, dtype=torch.int64)}, "history .* torch.int64"),
        ({"block_table": torch.zeros(3, 1, dtype=torch.int32)}, r"block_table \[3, 1\]"),
    ],
    ids=lambda x: "" if isinstance(x, dict) else None,
)
def test_bad_inputs_are_refused_with_their_values(change, found):
    with pytest.raises(ValueError, match=found):
        node_winners(**inputs_of(**change))
