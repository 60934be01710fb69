"""Checks of `accept` on any device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from specc.kernels.cuda import accept_walk, node_best, row_filters, row_noise, tree_context
from specc.kernels.cuda.accept import accept
from specc.kernels.cuda.sampling import gumbel_of_bits
from specc.kernels.reference.accept import accept_reference
from specc.kernels.reference.processing import penalize_reference, process_reference
from specc.sampling.rows import Rule
from tests.kernels.cuda.near_ties import check_equal_or_near, is_permitted_cut, permitted_walks
from tests.kernels.cuda.typed_trees import Forest, Row, inside, options_of, sizes, spoil_padding

# several blocks a part, a pass and a search, in vocabularies that an interpreter gets through
SMALL = {
    "MAX_PROGRAMS": (node_best, 8),
    "LOADS": (row_filters, 64),
    "MAX_PARTS": (row_filters, 2),
    "LISTED": (row_filters, 16),
    "SLICE": (tree_context, 64),
}
SMALL_WALK = {
    "BLOCK": (accept_walk, 256),
    "COUNTERS": (accept_walk, 128),
    "NODES": (accept_walk, 4),
}


def run(inputs: Forest, device: torch.device, *, is_small: bool = False) -> list[Tensor]:
    """The operator's outputs; beyond rows of its inputs lies what would win."""
    dense = [inside(inputs.logits, float("nan"), device), inside(inputs.tokens, 0, device)]
    before = dense[0].clone()
    shared = inputs.parents.stride(0) == 0
    parents = inputs.parents.to(device) if shared else inside(inputs.parents, 0, device)
    image = None if inputs.image is None else inside(inputs.image, 1, device)
    q_rows = None if inputs.q_rows is None else inputs.q_rows.to(device)
    drafts = [inside(level, float("nan"), device) for level in inputs.draft_logits]
    rows = (inside(inputs.values, 0.5, device), inside(inputs.words, 1, device))
    paged = [inside(inputs.history, 1, device), inside(inputs.block_table, 0, device)]
    with sizes(**(SMALL if is_small else {})), sizes(**(SMALL_WALK if is_small else {})):
        outputs = accept(
            dense[0], dense[1], parents, inputs.max_depth, image, q_rows, drafts, *rows,
            inputs.cache_len.to(device), *paged,
        )  # fmt: skip
    assert torch.equal(before.nan_to_num(7.0), dense[0].nan_to_num(7.0))
    return [output.cpu() for output in outputs]


@contextlib.contextmanager
def counted_launches() -> Iterator[list[str]]:
    """Names of the kernels that `accept` launches meanwhile, in their order."""
    names: list[str] = []
    modules = (accept_walk, node_best, row_filters, tree_context)
    kernels = {
        (module, name): kernel
        for module in modules
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    }

    class Counted:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            names.append(self._kernel.fn.__name__)
            return self._kernel[grid]

    try:
        for (module, name), kernel in kernels.items():
            setattr(module, name, Counted(kernel))
        yield names
    finally:
        for (module, name), kernel in kernels.items():
            setattr(module, name, kernel)


def states_after_launches(
    inputs: Forest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """What each row [B] waits for after every launch of its walk."""
    found: list[Tensor] = []
    kernel = accept_walk.accept_walk_kernel

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                kernel[grid](*args, **options)
                place = kernel.arg_names.index("state")
                found.append(args[place][:, 0].cpu().clone())

            return launch

    with monkeypatch.context() as patched:
        patched.setattr(accept_walk, "accept_walk_kernel", Watched())
        run(inputs, device)
    return found


def check_accept(
    inputs: Forest, device: torch.device, *, is_small: bool = False
) -> tuple[Tensor, Tensor]:
    """Equal to the oracle's; returns paths, and how many tokens each sequence has accepted.

    On a GPU a walk that ends differently by a near tie is as good.
    """
    wanted = accept_reference(*inputs.arguments())
    before = copy.deepcopy(inputs)
    spoil_padding(inputs)
    found = run(inputs, device, is_small=is_small)
    for one, other in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
    walks = _walks(*found)

    def is_permitted(b: int) -> bool:
        path, num_accepted, output = walks[b]
        is_counted = num_accepted == sum(node >= 0 for node in path[1:])
        return is_counted and (path, output) in permitted_walks(before, b)

    check_equal_or_near(walks, _walks(*wanted), device, is_permitted)
    return wanted[0], wanted[1]


def _walks(
    path: Tensor, num_accepted: Tensor, output: Tensor
) -> list[tuple[tuple[int, ...], int, tuple[int, ...]]]:
    rows = zip(path.tolist(), num_accepted.tolist(), output.tolist(), strict=True)
    return [(tuple(nodes), count, tuple(tokens)) for nodes, count, tokens in rows]


def check_filters(
    rows: Sequence[Row],
    logits: Tensor,
    device: torch.device,
    *,
    is_small: bool = False,
    listed: int | None = None,
    weighed: tuple[Rule, ...] = tuple(Rule),
) -> int:
    """Best, tokens kept and their mass; returns how many tokens were dropped.

    `listed` is what a program holds at the end of a search: with fewer, rounds and passes follow.
    """
    values, words, cache_len = options_of(rows, 1)
    per_row = len(logits) // len(rows)
    wide = [tensor.repeat_interleave(per_row, 0) for tensor in (values, words)]
    wanted = process_reference(logits, *wide)
    small = SMALL if is_small else {}
    if listed is not None:
        small = {**small, "LISTED": (row_filters, listed)}
    with sizes(**small):
        stats = row_filters.row_filters(
            inside(logits, float("nan"), device),
            values.to(device), words.to(device), cache_len.to(device),
            filtered=tuple(Rule),
            weighed=weighed,
        ).cpu()  # fmt: skip
    num_dropped = 0
    for r, scores in enumerate(wanted):
        row = rows[r // per_row]
        if row.length < 0 or row.temperature == 0.0:
            continue
        factor = 1.0 / torch.tensor(row.temperature)
        plain = logits[r].float() * factor
        best, cut, mass = stats[r]
        assert best == plain.max()
        # what has no probability before it cannot be cut
        kept = (plain >= cut) & (plain > -torch.inf)
        options = [tensor[r] for tensor in wide]
        check_equal_or_near(
            [kept.tolist()], [(scores > -torch.inf).tolist()], device,
            lambda _, args=(kept, logits[r], *options): is_permitted_cut(*args),
        )  # fmt: skip
        if row.rule in weighed:
            exact = (plain[kept] - best).double().exp().sum()
            torch.testing.assert_close(mass.double(), exact, rtol=1e-5, atol=0.0)
        num_dropped += int((scores == -torch.inf).sum())
    return num_dropped


@triton.jit
def _may_win_kernel(scores, bits, out, BN: tl.constexpr):
    """Whether each token may reach what it does reach, and whether it may reach 2 more."""
    o = tl.arange(0, BN)
    b_score = tl.load(scores + o)
    b_bits = tl.load(bits + o).to(tl.uint32)
    b_top = b_score + gumbel_of_bits(b_bits)
    tl.store(out + o, row_noise.may_win(b_score, b_bits, b_top).to(tl.int32))
    tl.store(out + BN + o, row_noise.may_win(b_score, b_bits, b_top + 2.0).to(tl.int32))


def check_bound(device: torch.device) -> None:
    """No token that reaches the best is passed over; of those that are far below, most are."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 2**32, (4096,), generator=generator)
    bits[:512] >>= torch.randint(1, 33, (512,), generator=generator)
    bits[:4] = torch.tensor([0, 1, 2**32 - 1, 2**31])
    scores = torch.randn(4096, generator=generator)
    scores *= 10.0 ** torch.randint(-3, 7, (4096,), generator=generator)
    out = torch.empty(2, 4096, dtype=torch.int32, device=device)
    _may_win_kernel[(1,)](scores.to(device), bits.to(device), out, BN=4096, enable_fp_fusion=False)
    assert (out[0] == 1).all()
    assert (out[1].cpu()[scores.abs() < 1e4] == 1).float().mean() < 0.3


def check_many_blocks(vocab: int, num_blocks: int, device: torch.device) -> None:
    """One program a row: its best lies in any of its blocks, and beats those before by little."""
    rows = [Row(length=length) for length in range(8)]
    values, words, cache_len = options_of(rows, 2)
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(6)) * 0.2
    inputs = Forest(
        logits, torch.zeros(len(rows), 1).long(), torch.full((len(rows), 1), -1).int(),
        0, None, None, [], values, words, cache_len,
        torch.zeros(1, 4).int(), torch.zeros(len(rows), 1).int(),
    )  # fmt: skip
    with sizes(MAX_PROGRAMS=(node_best, 1)):
        assert node_best.config(len(rows), vocab)["num_blocks"] == num_blocks
        check_accept(inputs, device)


def check_penalties(row: Row, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Greedy tokens of a chain in which every node's token and the history's are penalized."""
    vocab, num_nodes = 9, 6
    values, words, cache_len = options_of([row], 0)
    generator = torch.Generator().manual_seed(row.length)
    # close to each other: penalties decide
    logits = (torch.randn(num_nodes, vocab, generator=generator) * 0.3).to(dtype)
    logits[2, 4] = float("nan")
    logits[3, 5] = float("-inf")
    history = torch.randint(-2, vocab + 2, (8, 4), generator=generator).int()
    table = torch.tensor([[5, 2, 7, 1, 99]], dtype=torch.int32)
    flat = history[table[0, :4].long()].flatten()[: row.length].long()
    tokens, context = [int(torch.randint(0, vocab, (1,), generator=generator))], flat
    wanted = []
    for node in range(num_nodes):
        context = torch.cat([context, torch.tensor([tokens[-1]])])
        scores = penalize_reference(logits[node], context, row.num_prompt, values[0])
        wanted.append(int(scores.argmax()))
        tokens.append(wanted[-1])
    parents = torch.arange(-1, num_nodes - 1, dtype=torch.int32)[None]
    inputs = Forest(
        logits, torch.tensor([tokens[:-1]]), parents, num_nodes - 1, None, None, [],
        values, words, cache_len, history, table,
    )  # fmt: skip
    path, accepted, output = run(inputs, device, is_small=True)
    assert output[0].tolist() == wanted
    assert path[0].tolist() == list(range(num_nodes))
    assert accepted.tolist() == [num_nodes - 1]


def given_tree(
    rule: Rule,
    tokens: list[int],
    parents: list[int],
    target: Tensor,
    drafts: list[Tensor],
    q_rows: list[int],
    num_seeds: int,
    image: list[int] | None = None,
) -> Forest:
    """One small tree for many seeds; target [N, V] and drafts [F, V] are log probabilities."""
    rows = [Row(rule, length=5 + seed % 3) for seed in range(num_seeds)]
    values, words, cache_len = options_of(rows, 3)
    parents_ = torch.tensor([parents], dtype=torch.int32).expand(num_seeds, -1)
    return Forest(
        target.repeat(num_seeds, 1),
        torch.tensor([tokens] * num_seeds),
        parents_,
        1,
        None if image is None else torch.tensor([image] * num_seeds, dtype=torch.int32),
        torch.tensor(q_rows, dtype=torch.int32),
        [level.repeat(num_seeds, 1) for level in drafts],
        values, words, cache_len,
        torch.zeros(1, 4, dtype=torch.int32),
        torch.zeros(num_seeds, 1, dtype=torch.int32),
    )  # fmt: skip


def check_safety(device: torch.device) -> None:
    """Columns and parents beyond the tree, rows of drafts beyond the list, cycles: no hang."""
    vocab, num_nodes = 7, 5
    rows = [Row(Rule.MSS), Row(Rule.SWOR), Row(), Row(Rule.DELTA, temperature=0.0)]
    values, words, cache_len = options_of(rows, 0)
    logits = torch.zeros(len(rows) * num_nodes, vocab)
    logits[:, 3] = 40.0
    # 1 is the root's child; 2 and 3 are a cycle, 4 hangs below a node beyond the tree
    parents = torch.tensor([[4, 0, 3, 2, 9]] * len(rows), dtype=torch.int32)
    tokens = torch.tensor([[3] * num_nodes] * len(rows))
    image = torch.tensor([[0, 9, 1, 2, 4, -7]] * len(rows), dtype=torch.int32)
    inputs = Forest(
        logits, tokens, parents, 4, image, torch.tensor([0, 0, 77, 0, 0, 0]).int(),
        [torch.zeros(len(rows), vocab)], values, words, cache_len,
        torch.zeros(1, 4).int(), torch.full((len(rows), 2), 10**6).int(),
    )  # fmt: skip
    path, accepted, output = run(inputs, device)
    assert path.tolist() == [[0, 1, -1, -1, -1]] * len(rows)
    assert output.tolist() == [[3, 3, -1, -1, -1]] * len(rows)
    assert accepted.tolist() == [1] * len(rows)
