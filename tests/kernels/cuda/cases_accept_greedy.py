"""Checks of `accept_greedy` on any device."""

from __future__ import annotations

import random

import torch

from specc.kernels.cuda import accept_greedy as kernels
from specc.kernels.reference import accept_greedy_reference

NUM_LABELS = 3


def random_trees(
    generator: random.Random, batch: int, num_nodes: int, shape: str
) -> tuple[list[list[int]], list[list[int]]]:
    """(tokens, parents); siblings carry 0, 1, …, so that cousins carry equal tokens."""
    tokens, parents = [], []
    for b in range(batch):
        row, above = [generator.randrange(NUM_LABELS)], [-1]
        width = {"chain": 1, "star": num_nodes}.get(shape, NUM_LABELS)
        # sequences of a batch have trees of other sizes; the rest of a row is dead
        live = num_nodes if b == 0 else generator.randrange(1, num_nodes + 1)
        for node in range(1, num_nodes):
            free = [p for p in range(node) if above.count(p) < width and p < live]
            parent = node - 1 if shape == "chain" else generator.choice(free[:4])
            row.append(above.count(parent))
            above.append(parent if node < live else -1)
        tokens.append(row)
        parents.append(above)
    return tokens, parents


def check_accept_greedy(
    batch: int,
    num_nodes: int,
    vocab: int,
    max_depth: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    shape: str = "random",
    kind: str = "random",
    max_programs: int = kernels.MAX_PROGRAMS,
) -> int:
    """Walks of every length; returns how many draft tokens were accepted in all.

    What lies behind a row of logits would be its argmax.
    """
    generator = random.Random(batch * num_nodes + vocab)
    tokens, parents = random_trees(generator, batch, num_nodes, shape)
    logits = torch.randn(batch * num_nodes, vocab, generator=torch.Generator().manual_seed(vocab))
    # nodes want what one of their children carries, or now and then what none does; labels spread
    # over the vocabulary, so that every part of a row wins somewhere
    most = max(NUM_LABELS, *(max(row, default=0) for row in tokens), 0)
    spread = [[label * (vocab - 1) // most for label in row] for row in tokens]
    for row in range(batch * num_nodes):
        b, node = divmod(row, num_nodes)
        carried = [spread[b][child] for child in range(num_nodes) if parents[b][child] == node]
        wanted = generator.choice(carried) if carried else 0
        logits[row, generator.randrange(vocab) if generator.random() < 0.15 else wanted] = 9.0
        if kind == "ties":
            # the lowest of the tied wins, in whichever part it lies
            logits[row, max(wanted, vocab // 2)] = 9.0
            logits[row, vocab - 1] = 9.0
    if kind == "masked":
        logits[logits < 9.0] = float("-inf")
    elif kind == "nan":
        # the lower NaN wins, over infinity as well
        logits[logits == 9.0] = float("nan")
        logits[::2, vocab - 1] = float("nan")
        logits[::3, 1] = float("inf")
    inputs = (
        logits.to(dtype),
        torch.tensor(spread).view(batch, num_nodes).long(),
        torch.tensor(parents, dtype=torch.int32).view(batch, num_nodes),
    )
    wanted = accept_greedy_reference(*inputs, max_depth)
    buffer = torch.full((batch * num_nodes, vocab + 16), float("nan"), dtype=dtype, device=device)
    buffer[:, :vocab] = inputs[0]
    wide = torch.zeros(batch, num_nodes + 3, dtype=torch.int64, device=device)
    wide[:, :num_nodes] = inputs[1]
    most, kernels.MAX_PROGRAMS = kernels.MAX_PROGRAMS, max_programs
    try:
        outputs = kernels.accept_greedy(
            buffer[:, :vocab], wide[:, :num_nodes], inputs[2].to(device), max_depth
        )
    finally:
        kernels.MAX_PROGRAMS = most
    for got, want in zip(outputs, wanted, strict=True):
        assert got.dtype == want.dtype
        assert got.tolist() == want.tolist()
    return int(outputs[1].sum())


def check_argmax(vocab: int, max_programs: int, value: float, device: torch.device) -> None:
    """Bonus tokens of roots alone; the best comes twice, whole blocks or single tokens apart."""
    pairs = [(0, 256), (3, 4), (255, 257), (255, 511), (600, 1112), (1023, 1024), (1024, 1280)]
    pairs.append((vocab - 300, vocab - 1))
    logits = torch.randn(len(pairs), vocab, generator=torch.Generator().manual_seed(vocab))
    for row, (first, second) in enumerate(pairs):
        logits[row, [first, second]] = value
    most, kernels.MAX_PROGRAMS = kernels.MAX_PROGRAMS, max_programs
    try:
        outputs = kernels.accept_greedy(
            logits.to(device),
            torch.zeros(len(pairs), 1, dtype=torch.int64, device=device),
            torch.full((len(pairs), 1), -1, dtype=torch.int32, device=device),
            0,
        )
    finally:
        kernels.MAX_PROGRAMS = most
    assert outputs[2].flatten().tolist() == [first for first, _ in pairs]


def check_equal_siblings(device: torch.device) -> None:
    """The first of siblings with one token is followed."""
    parents = torch.tensor([[-1, 0, 0, 1, 2]], dtype=torch.int32, device=device)
    tokens = torch.tensor([[0, 3, 3, 1, 2]], device=device)
    wants = torch.tensor([3, 1, 2, 2, 2], device=device)
    logits = torch.nn.functional.one_hot(wants, 4).float()
    path, _, output = kernels.accept_greedy(logits, tokens, parents, 2)
    assert path.tolist() == [[0, 1, 3]]
    assert output.tolist() == [[3, 1, 2]]


def check_shared_parents(device: torch.device) -> None:
    """One row of parents for all sequences, as a static tree gives it; a label under a sibling."""
    parents = torch.tensor([-1, 0, 0, 2], dtype=torch.int32, device=device).expand(3, 4)
    tokens = torch.tensor([[0, 3, 4, 5], [7, 3, 4, 5], [0, 1, 2, 3]], device=device)
    wants = torch.tensor([3, 5, 9, 9, 7, 4, 4, 4, 2, 0, 3, 8], device=device)
    logits = torch.nn.functional.one_hot(wants, 11).float()
    path, accepted, output = kernels.accept_greedy(logits, tokens, parents, 2)
    # the root's own token is no child; node 1 wants what node 2's child carries
    assert path.tolist() == [[0, 1, -1], [0, -1, -1], [0, 2, 3]]
    assert accepted.tolist() == [1, 0, 2]
    assert output.tolist() == [[3, 5, -1], [7, -1, -1], [2, 3, 8]]


def check_cyclic_parents(device: torch.device) -> None:
    """Parents in a cycle end at max_depth: a walk never hangs."""
    parents = torch.tensor([[1, 0]], dtype=torch.int32, device=device)
    tokens = torch.tensor([[2, 2]], device=device)
    logits = torch.nn.functional.one_hot(torch.tensor([2, 2], device=device), 4).float()
    _, accepted, output = kernels.accept_greedy(logits, tokens, parents, 5)
    assert accepted.tolist() == [5]
    assert output.tolist() == [[2] * 6]
