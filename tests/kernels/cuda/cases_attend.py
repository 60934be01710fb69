"""Cases of `attend` and how one is checked, without pytest.

A case is a batch over a paged cache in which everything that no live token may see is NaN: rows of
other layers, unused blocks, prefix rows outside of all windows, siblings, and the queries of dead
tokens. Unused entries of the block table name blocks that do not exist.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specc.artifact.kv_rows import AUTO, stored_row
from specc.kernels.cuda.attend import attend
from specc.kernels.reference.core import attend_reference
from specc.kernels.reference.kv_rows import store_rows

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.cuda.interpreted_calls import patch_calls

    patch_calls()

NAN = float("nan")
BAD_BLOCKS = (1_000_000_000, -7)
# relative error of a row, and of the whole result
TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (4e-3, 3e-3),
}


@dataclass(frozen=True)
class Case:
    """A call of `attend`.

    Args:
        seqs: (tokens, cache_len) of each sequence; in a tree, its nodes.
        heads: query heads and KV heads.
        sizes: head size of keys and of values.
        block_size: rows of a block; 0 is dense.
        first_node: nodes before the first token, in the cache already (a draft level).
        num_words: words of ancestors; 0 as many as the nodes need.
        dead: tokens (flat) that are dead; a sequence may be dead as a whole.
        tail: tokens after those of the last sequence.
        splits: None is the choice of the operator.
    """

    seqs: tuple[tuple[int, int], ...]
    is_tree: bool = True
    dtype: torch.dtype = torch.float32
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (64, 64)
    block_size: int = 16
    first_node: int = 0
    num_words: int = 0
    window: int = 0
    sink: int = 0
    dead: tuple[int, ...] = ()
    tail: int = 0
    splits: int | None = 1
    slopes: float = 0.0  # of the first head; 0 is none
    rounds: bool = False
    chunk: int = 0  # positions; 0 is no chunks
    sinks: float = 0.0  # score of the first head's; 0 is none
    softcap: float = 0.0  # 0 is none
    rows: str = AUTO  # how caches hold rows, see `specc.artifact.kv_rows`


F16, BF16 = torch.float16, torch.bfloat16
CASES = {
    "plain-decode": Case(((1, 40), (1, 0), (1, 33)), False, splits=2),
    "two-tokens-catch-up": Case(((2, 127), (2, 62)), False, BF16, (8, 1), block_size=32, splits=2),
    "tree": Case(((7, 40), (1, 10), (5, 32)), splits=2),
    "tree-odd-pages": Case(((5, 70), (0, 12), (9, 130)), True, F16, (6, 2), (80, 80), 7, splits=2),
    "tree-dense": Case(((6, 70), (3, 101)), True, BF16, (2, 2), (96, 96), 0),
    "tree-whole-pages": Case(((9, 100), (3, 63)), True, F16, block_size=64, splits=2),
    "tree-of-64": Case(((64, 5),), heads=(1, 1), sizes=(16, 16), num_words=2),
    "tree-of-3-words": Case(((65, 61),), True, F16, (1, 1), (16, 16), first_node=65),
    "tree-of-1024": Case(((20, 3),), True, F16, (1, 1), (16, 16), 0, 1004),
    "tree-tiles-of-128": Case(((37, 90), (2, 5)), True, BF16, (7, 1), (32, 32), splits=2),
    "tree-aligned": Case(((8, 128), (8, 64)), True, BF16),
    "draft-level": Case(((4, 70), (4, 31)), first_node=9, splits=2),
    "tree-window": Case(((5, 90), (3, 10)), heads=(2, 1), window=20, splits=3),
    "tree-window-sink": Case(((7, 200), (3, 10)), True, F16, window=20, sink=5),
    "tree-window-of-1": Case(((3, 40),), window=1, splits=2),
    "sink-beyond-window": Case(((2, 50), (2, 20)), window=8, sink=70),
    # key blocks that the first row of a tile sees whole, and the last one does not
    "tree-wide-window": Case(((7, 300),), True, F16, (2, 1), (16, 16), window=237),
    "prefill-wide-window": Case(((64, 200),), False, F16, (2, 1), (16, 16), window=150),
    "level-beyond-window": Case(
        ((2, 3),), True, heads=(1, 1), sizes=(16, 16), first_node=140, window=2
    ),
    "tree-in-window": Case(((30, 60),), True, heads=(1, 1), window=9, sink=33, splits=3),
    "prefill": Case(((40, 0), (23, 50)), False, F16),
    "prefill-fp32": Case(((19, 30), (1, 77)), False, heads=(2, 1), sizes=(32, 32), splits=2),
    "prefill-window": Case(((40, 60), (1, 100), (9, 0)), False, BF16, window=20, splits=2),
    "prefill-window-sink": Case(((70, 130),), False, F16, window=33, sink=5),
    "prefill-window-of-2": Case(((20, 5),), False, heads=(1, 1), sizes=(16, 16), window=2),
    "dead-tokens": Case(((5, 70), (2, 9), (4, 20)), dead=(1, 5, 6, 10), tail=3, splits=2),
    "dead-first": Case(((5, 70),), False, F16, dead=(0, 1), tail=2),
    "dead-batch": Case(((2, 7), (1, 3)), dead=(0, 1, 2), splits=2),
    "value-size": Case(((5, 70),), True, F16, (4, 1), (64, 40), splits=2),
    "head-192": Case(((3, 40),), True, BF16, (2, 1), (192, 128), 0),
    "head-128": Case(((4, 70),), True, F16, (8, 2), (128, 128)),
    "head-256": Case(((4, 70),), True, BF16, (2, 1), (256, 256), splits=2),
    "head-256-fp32": Case(((3, 40),), True, sizes=(256, 256), heads=(1, 1)),
    "head-8": Case(((3, 20),), True, heads=(4, 2), sizes=(8, 8)),
    "many-splits": Case(((5, 200),), True, heads=(4, 1), sizes=(16, 16), splits=6),
    "empty-splits": Case(((3, 40), (2, 0)), True, heads=(2, 1), splits=8),
    "chosen-splits": Case(((2, 150),), heads=(2, 1), splits=None),
    "no-prefix": Case(((5, 0), (3, 0)), True, BF16, splits=2),
    "many-sequences": Case(
        ((0, 5),) * 255 + ((2, 9), (3, 20), (0, 0)), heads=(2, 1), sizes=(16, 16)
    ),
    "far-window": Case(((1, 99_000),), False, F16, (2, 1), (16, 16), 0, window=50, sink=3),
}
# sizes that only a GPU computes in time
GPU_CASES = {
    "long-tree": Case(((32, 131_000),), True, BF16, (32, 8), (128, 128), splits=None),
    "batch-16": Case(((32, 16_000),) * 16, True, BF16, (32, 8), (128, 128), splits=None),
    "chunk": Case(((512, 3000), (1, 17)), False, BF16, (32, 8), (128, 128), splits=None),
    "chunk-window": Case(((700, 900),), False, F16, (8, 2), (96, 96), window=256, sink=4),
    "nodes-1024": Case(((1024, 500),), True, BF16, (8, 2), (80, 80), splits=None),
    # Llama 4 Scout: tokens on both sides of a chunk's end, far after it, and before all of them
    "chunks-tree": Case(
        ((32, 8180), (32, 20_000), (32, 40)), True, BF16, (40, 8), (128, 128), chunk=8192
    ),
    "chunks-prefill": Case(
        ((512, 8000), (1, 17)), False, BF16, (40, 8), (128, 128), splits=None, chunk=8192
    ),
    "chunks-decode": Case(
        ((1, 8191), (1, 8192), (1, 30_000)), False, BF16, (40, 8), (128, 128), chunk=8192
    ),
    "batch-1024": Case(((1, 40),) * 1024, False, BF16, (4, 1), (64, 64), splits=None),
}


@dataclass
class Call:
    args: tuple[Tensor | None, ...]
    options: dict[str, Any]

    def reference(self) -> Tensor:
        """What the oracle makes of the same values in float32."""
        wide = [_widened(x) for x in self.args]
        return attend_reference(*wide, **{k: _widened(x) for k, x in self.options.items()})


def _widened(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


def make_call(case: Case, device: torch.device) -> Call:
    rng = random.Random(repr(case))
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    num_heads, num_kv_heads = case.heads
    nodes = [tokens + case.first_node for tokens, _ in case.seqs]
    num_words = case.num_words or max(1, -(-max(nodes) // 64))
    rows = max(length + count for (_, length), count in zip(case.seqs, nodes, strict=True))
    block_size = case.block_size or rows + 5
    num_pages = -(-rows // block_size) + (case.block_size > 0)
    num_live = sum(tokens for tokens, _ in case.seqs)
    num_tokens = num_live + case.tail

    positions, slots, words = [], [], []
    seen = torch.zeros(len(case.seqs), num_pages * block_size, dtype=torch.bool)
    for b, (_, length) in enumerate(case.seqs):
        parents = [-1] + [rng.randrange(max(0, j - 6), j) for j in range(1, nodes[b])]
        for node in range(case.first_node, nodes[b]):
            path = set()
            while case.is_tree and node >= 0 and node not in path:
                path.add(node)
                node = parents[node]
            is_dead = len(slots) in case.dead
            own = max(path) if case.is_tree else len(slots) - sum(t for t, _ in case.seqs[:b])
            position = length + (len(path) - 1 if case.is_tree else own)
            positions.append(0 if is_dead else position)
            slots.append(-1 if is_dead else length + own)
            # a dead token's words allow everything
            bits = (1 << 64 * num_words) - 1 if is_dead else sum(1 << j for j in path)
            words.append([_signed(bits >> 64 * w) for w in range(num_words)])
            if is_dead:
                continue
            last = length if case.is_tree else position + 1
            cut = max(0, position - case.window + 1) if case.window else 0
            cut = min(cut, last)
            begin = position - position % case.chunk if case.chunk else 0
            seen[b, cut:last] = seen[b, cut:last] | (torch.arange(cut, last) >= begin)
            seen[b, begin : min(case.sink, last)] = True
            for depth, j in enumerate(sorted(path)):
                if not case.is_tree or length + depth >= begin:
                    seen[b, length + j] = True
    positions += [3] * case.tail
    slots += [2] * case.tail
    words += [[-1] * num_words] * case.tail

    table = torch.tensor(
        [[BAD_BLOCKS[i % 2] for i in range(num_pages)] for _ in case.seqs], dtype=torch.int32
    )
    used = seen.view(len(case.seqs), num_pages, block_size).any(dim=2)
    for b in range(len(case.seqs)):
        # pages before a window are allocated too, and the oracle reads them
        used[b, : max(used[b].nonzero().flatten().tolist(), default=-1) + 1] = True
    blocks = torch.randperm(int(used.sum()) + 2, generator=generator)[2:].int()
    table[used] = blocks
    caches = []
    for size in case.sizes:
        # gigabytes of it on a GPU, where one thread of the host would take seconds
        shape = (2, 2, len(blocks) + 2, block_size, num_kv_heads, size)
        cache = torch.full(shape, NAN, dtype=case.dtype, device=device)[1, len(caches)]
        b, slot = seen.nonzero(as_tuple=True)
        shape = (len(b), num_kv_heads, size)
        if device.type == "cpu":
            values = torch.randn(shape, generator=generator)
        else:
            values = torch.randn(shape, device=device)
        place = table[b, slot // block_size].long(), slot % block_size
        cache[tuple(index.to(device) for index in place)] = values.to(case.dtype)
        # what is not there has a scale that is NaN
        caches.append(store_rows(cache, stored_row(size, case.dtype, case.rows)[1]))

    # queries as a slice of one fused projection; those of dead tokens are NaN
    width = num_heads * case.sizes[0]
    fused = torch.randn(num_tokens, width + 16, generator=generator).to(case.dtype)
    is_dead = torch.tensor([slot < 0 for slot in slots])
    is_dead[num_live:] = True
    fused[is_dead] = NAN
    q = fused.to(device)[:, :width].view(num_tokens, num_heads, -1).transpose(0, 1)
    starts = [sum(t for t, _ in case.seqs[:b]) for b in range(len(case.seqs) + 1)]
    args = (
        q, *caches,
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor([n for _, n in case.seqs], dtype=torch.int32, device=device),
        torch.tensor(words, dtype=torch.int64, device=device) if case.is_tree else None,
        table.to(device),
    )  # fmt: skip
    options = {"scale": case.sizes[0] ** -0.5, "window": case.window, "sink": case.sink}
    if case.slopes:
        slopes = case.slopes * 0.6 ** torch.arange(num_heads, dtype=torch.float32)
        slopes = slopes.bfloat16().float() if case.rounds else slopes
        options |= {"slopes": slopes.to(device), "rounds_bias": case.rounds}
    if case.chunk:
        options["chunk"] = case.chunk
    if case.sinks:
        # falling from head to head, and none of the last one
        sinks = case.sinks - 0.7 * torch.arange(num_heads, dtype=torch.float32)
        sinks[-1] = sinks[-1] if num_heads == 1 else -math.inf
        options["sink_logits"] = sinks.to(case.dtype).to(device)
    if case.softcap:
        options["softcap"] = case.softcap
    return Call(args, options)


def run(call: Call, splits: int | None) -> Tensor:
    return attend(*call.args, **call.options, num_splits=splits)


def check_attend(case: Case, device: torch.device) -> None:
    """Compare a case with the oracle; raises AssertionError."""
    check_call(case, make_call(case, device), run)


def check_call(case: Case, call: Call, run: Callable[[Call, int | None], Tensor]) -> None:
    """Compare a call of a case with the oracle; raises AssertionError.

    Args:
        run: calls an operator so, with a number of splits.
    """
    before = [x.clone() for x in call.args[:3]]
    out = run(call, case.splits)
    want = call.reference()
    assert out.dtype == case.dtype
    assert out.shape == want.shape
    assert out.transpose(0, 1).is_contiguous()
    row_tolerance, tolerance = TOLERANCE[case.dtype]
    error = (out.float() - want).norm(dim=-1)
    # rows of dead tokens are zero, exactly
    assert bool((error <= row_tolerance * want.norm(dim=-1)).all()), f"rows differ by {error.max()}"
    assert bool(error.norm() <= tolerance * want.norm())
    for tensor, old in zip(call.args[:3], before, strict=True):
        torch.testing.assert_close(tensor, old, rtol=0, atol=0, equal_nan=True)


# three sequences, of which `check_bad_call` breaks all but the second
BAD_CASE = Case(((2, 40), (3, 30), (2, 20)), True, F16, (2, 1), (16, 16), splits=2)


def check_bad_data(device: torch.device, chunk: int = 0) -> None:
    """`attend` over broken lengths and blocks."""
    check_bad_call(make_call(replace(BAD_CASE, chunk=chunk), device), run)


def check_bad_call(call: Call, run: Callable[[Call, int | None], Tensor]) -> None:
    """Lengths beyond the table and blocks beyond the cache stay inside of the tensors.

    The second sequence is sound, and its result is not touched by that of the others.

    Args:
        call: of `BAD_CASE`, or of one with other heads.
        run: as of `check_call`.
    """
    for is_tree in (True, False):
        args = list(call.args)
        args[7] = args[7] if is_tree else None
        want = run(replace(call, args=tuple(args)), 2)
        args[8] = args[8].clone()
        args[8][0] = torch.tensor([BAD_BLOCKS[0], BAD_BLOCKS[1]] * 9)[: args[8].shape[1]]
        args[4], args[5], args[6] = (x.clone() for x in args[4:7])
        args[4][5:] = 1 << 30
        args[5][5:] = 1 << 30
        args[6][2] = 1 << 29
        got = run(replace(call, args=tuple(args)), 2)
        torch.testing.assert_close(got[:, 2:5], want[:, 2:5], rtol=0, atol=0)


def run_broken(call: Call, is_tree: bool, run: Callable[[Call, int | None], Tensor] = run) -> None:
    """Call `attend` with lengths beyond the table, blocks beyond the cache and starts elsewhere.

    Args:
        is_tree: with its ancestors, or without any.
        run: as of `check_call`.
    """
    whole = list(call.args)
    whole[7] = whole[7] if is_tree else None
    for places, lengths in ((1 << 30, 1 << 29), (-(1 << 30), -5), (1 << 30, 0), (3, 1 << 30)):
        args = whole[:]
        args[4] = torch.full_like(args[4], places)
        args[5] = torch.full_like(args[5], places)
        args[6] = torch.full_like(args[6], lengths)
        args[8] = torch.tensor([BAD_BLOCKS * 9], dtype=torch.int32, device=args[8].device)
        args[8] = args[8][:, : call.args[8].shape[1]]
        run(replace(call, args=tuple(args)), 2)
    whole[3] = torch.tensor([-7, 99], dtype=torch.int32, device=whole[3].device)
    run(replace(call, args=tuple(whole)), 2)


def _signed(bits: int) -> int:
    bits &= (1 << 64) - 1
    return bits - (1 << 64) if bits >= 1 << 63 else bits
