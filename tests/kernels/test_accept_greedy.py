"""`specc::accept_greedy` against a walk over Python lists."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.usefixtures("poisoned_memory")

VOCAB = 11
ROOT = [-1]
CHAIN = [-1, 0, 1, 2, 3]
STAR = [-1, 0, 0, 0, 0]
BUSHY = [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9]
UNEVEN = [-1, 0, 1, 0, 3, 4, 1, 6, 5]
TREES = {"root": ROOT, "chain": CHAIN, "star": STAR, "bushy-3-2-1": BUSHY, "uneven": UNEVEN}


@pytest.fixture(scope="module")
def accept_greedy(implementation):
    return implementation.accept_greedy.default


def depth_of(parents: list[int]) -> int:
    depths = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return max(depths)


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def walk(
    best: list[int], tokens: list[int], parents: list[int], max_depth: int
) -> tuple[list[int], int, list[int]]:
    """One sequence: `best` is the target's token after each node."""
    node, path = 0, [0]
    while True:
        following = [
            child
            for child in range(1, len(parents))
            if parents[child] == node and tokens[child] == best[node]
        ]
        if not following:
            break
        node = following[0]
        path.append(node)
    emitted = [tokens[accepted] for accepted in path[1:]] + [best[node]]
    padding = [-1] * (max_depth + 1 - len(path))
    return path + padding, len(path) - 1, emitted + padding


def distinct_siblings(parents: list[int]) -> list[int]:
    """Siblings count up from 0, so that cousins carry equal tokens; the root carries 0."""
    return [parents[:node].count(parent) for node, parent in enumerate(parents)]


def peaked(best: list[int], vocab: int = VOCAB) -> torch.Tensor:
    logits = torch.rand(len(best), vocab)
    logits[range(len(best)), best] += 2.0
    return logits


def run(
    accept_greedy: torch._ops.OpOverload,
    best: list[list[int]],
    tokens: list[list[int]],
    parents: list[list[int]],
    max_depth: int,
    logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run the operator on a batch, check it against the walk, return (path, accepted, output)."""
    if logits is None:
        logits = torch.cat([peaked(row) for row in best])
    inputs = (logits, torch.tensor(tokens), torch.tensor(parents, dtype=torch.int32))
    copies = [tensor.clone() for tensor in inputs]
    path, accepted, output = accept_greedy(*inputs, max_depth)
    walks = [walk(*row, max_depth) for row in zip(best, tokens, parents, strict=True)]
    assert (path.dtype, accepted.dtype, output.dtype) == (torch.int32, torch.int32, torch.int64)
    assert path.tolist() == [row[0] for row in walks]
    assert accepted.tolist() == [row[1] for row in walks]
    assert output.tolist() == [row[2] for row in walks]
    for tensor, copy in zip(inputs, copies, strict=True):
        assert torch.equal(tensor, copy)
    return path, accepted, output


@pytest.mark.parametrize(
    ("parents", "last"),
    [
        pytest.param(parents, node, id=f"{name}-ends-at-{node}")
        for name, parents in TREES.items()
        for node in range(len(parents))
    ],
)
def test_walk_ends_at_each_node(accept_greedy, parents, last):
    """The target agrees up to `last` and then wants a token that no child carries."""
    tokens = distinct_siblings(parents)
    best = [VOCAB - 1] * len(parents)
    path = path_to(parents, last)
    for node, child in itertools.pairwise(path):
        best[node] = tokens[child]
    got, accepted, output = run(accept_greedy, [best], [tokens], [parents], depth_of(parents))
    assert got[0, : len(path)].tolist() == path
    assert accepted.item() == len(path) - 1
    assert output[0, len(path) - 1].item() == VOCAB - 1


def test_every_sequence_walks_its_own_tree(accept_greedy):
    """One batch: other shapes, other tokens, walks of 0 to 4 nodes, dead nodes behind the tree."""
    parents, tokens, best = [], [], []
    width = len(BUSHY)
    for tree in (BUSHY, CHAIN, STAR, ROOT, UNEVEN):
        for last in (0, len(tree) // 2, len(tree) - 1):
            labels = distinct_siblings(tree)
            wanted = [VOCAB - 1] * len(tree)
            path = path_to(tree, last)
            for node, child in itertools.pairwise(path):
                wanted[node] = labels[child]
            dead = width - len(tree)
            parents.append(tree + [-1] * dead)
            tokens.append(labels + [VOCAB - 1] * dead)
            best.append(wanted + [VOCAB - 1] * dead)
    run(accept_greedy, best, tokens, parents, 4)


def test_same_tokens_under_another_parent_are_not_followed(accept_greedy):
    """Node 1 wants 5; only node 2, its sibling, has a child with 5."""
    path, accepted, output = run(accept_greedy, [[3, 5, 9, 9]], [[0, 3, 4, 5]], [[-1, 0, 0, 2]], 2)
    assert path.tolist() == [[0, 1, -1]]
    assert accepted.tolist() == [1]
    assert output.tolist() == [[3, 5, -1]]


def test_root_token_is_no_candidate(accept_greedy):
    """The target repeats the root's token: the root is no child of itself."""
    run(accept_greedy, [[7, 7]], [[7, 1]], [[-1, 0]], 1)


def test_levels_that_the_tree_lacks_stay_empty(accept_greedy):
    path, accepted, output = run(accept_greedy, [[1, 2]], [[0, 1]], [[-1, 0]], 5)
    assert path.tolist() == [[0, 1, -1, -1, -1, -1]]
    assert accepted.tolist() == [1]
    assert output.tolist() == [[1, 2, -1, -1, -1, -1]]


def test_full_acceptance_of_a_chain(accept_greedy):
    _, accepted, output = run(accept_greedy, [[1, 2, 3, 4, 5]], [[9, 1, 2, 3, 4]], [CHAIN], 4)
    assert accepted.tolist() == [4]
    assert output.tolist() == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [[2, 5], [5, 9], [0, 10], [2, 5, 9]], ids=str)
def test_tied_logits_mean_the_lower_token(accept_greedy, tied, dtype):
    """Tokens 2, 5 and 9 are children; the target's argmax at a tie is the lowest of the tied."""
    parents, tokens = [-1, 0, 0, 0], [0, 9, 5, 2]
    logits = torch.zeros(4, VOCAB, dtype=dtype)
    logits[0, tied] = 3.0
    logits[1:, 7] = 1.0
    run(accept_greedy, [[min(tied), 7, 7, 7]], [tokens], [parents], 1, logits)


def test_all_logits_equal(accept_greedy):
    run(accept_greedy, [[0] * 5], [[3, 0, 0, 0, 0]], [CHAIN], 4, torch.zeros(5, VOCAB))


def test_masked_logits(accept_greedy):
    logits = torch.full((5, VOCAB), float("-inf"))
    logits[range(5), [1, 2, 3, 4, 5]] = -100.0
    run(accept_greedy, [[1, 2, 3, 4, 5]], [[9, 1, 2, 3, 8]], [CHAIN], 4, logits)


@st.composite
def batches(draw):
    """Trees of one width with distinct siblings; few tokens, so that walks go deep."""
    width = draw(st.integers(1, 9))
    best, tokens, parents = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        num_nodes = draw(st.integers(1, width))
        tree, labels = [-1], [draw(st.integers(0, 4))]
        for node in range(1, num_nodes):
            parent = draw(st.integers(0, node - 1))
            taken = {labels[i] for i in range(1, node) if tree[i] == parent}
            labels.append(draw(st.sampled_from([t for t in range(12) if t not in taken])))
            tree.append(parent)
        dead = width - num_nodes
        parents.append(tree + [-1] * dead)
        tokens.append(labels + [draw(st.integers(0, 11)) for _ in range(dead)])
        best.append([draw(st.sampled_from([*labels, 0, 1])) for _ in range(width)])
    max_depth = max(map(depth_of, parents)) + draw(st.integers(0, 2))
    return best, tokens, parents, max_depth


@settings(max_examples=80, deadline=None)
@given(batches())
def test_any_batch_equals_the_walk(accept_greedy, batch):
    best, tokens, parents, max_depth = batch
    run(
        accept_greedy,
        best,
        tokens,
        parents,
        max_depth,
        torch.cat([peaked(row, 12) for row in best]),
    )


def plain_inputs() -> tuple:
    return (
        torch.randn(10, VOCAB),
        torch.tensor([distinct_siblings(CHAIN), distinct_siblings(STAR)]),
        torch.tensor([CHAIN, STAR], dtype=torch.int32),
        4,
    )


def test_opcheck(accept_greedy):
    torch.library.opcheck(accept_greedy, plain_inputs())


def test_fake_shapes(accept_greedy):
    logits, tokens, parents, max_depth = plain_inputs()
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (logits, tokens, parents)]
        outs = accept_greedy(*fakes, max_depth)
    for got in (outs, accept_greedy(*plain_inputs())):
        assert [(tuple(o.shape), o.stride(), o.dtype) for o in got] == [
            ((2, 5), (5, 1), torch.int32),
            ((2,), (1,), torch.int32),
            ((2, 5), (5, 1), torch.int64),
        ]
