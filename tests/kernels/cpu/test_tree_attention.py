"""The C++ kernel of `specc::tree_attention` against the oracle, on random poisoned problems.

Rows that nobody wrote hold NaN, blocks that no sequence owns a canary. The oracle runs on copies of
the caches; outputs agree to rounding, caches bit by bit.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specc.artifact.kv_rows import SCALE_BYTES
from specc.kernels.reference.core import tree_attention_reference
from specc.kernels.reference.kv_rows import store_rows

NAN = float("nan")
CANARY = 12345.0
# the oracle computes in float32 and rounds the output, as the kernel does
TOLERANCE = {torch.float32: (1e-5, 2e-6), torch.bfloat16: (1e-2, 1e-3)}
# queries and weights of int8 caches have 15 and 16 bits, see int8_tile.h
INT8_TOLERANCE = (2e-4, 2e-4)
FREE_BLOCKS = 2


pytestmark = pytest.mark.usefixtures("native_operators", "one_thread_afterwards")


@dataclass(frozen=True)
class Problem:
    """A call: its shapes and each sequence's tokens; `seed` draws the numbers and the table."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    block_size: int  # 0: dense
    lengths: tuple[int, ...]  # committed rows; of a causal call, rows that were written before
    parents: tuple[tuple[int, ...], ...]  # tree of each sequence; a causal call takes its size
    dead: float = 0.0  # share of tokens that are dead
    causal: bool = False
    window: int = 0
    sink: int = 0
    strided: bool = False
    dtype: torch.dtype = torch.float32
    unowned: int = 0  # dead tokens after those of the last sequence
    threads: int = 1
    seed: int = 0
    poison_what_is_cut: bool = False  # by the window or the chunk, for all tokens
    int8: bool = False  # what caches hold
    sinks: float | None = None  # what the sinks of heads are around
    softcap: float = 0.0
    slopes: float = 0.0  # the largest of the heads
    rounds_bias: bool = False
    chunk: int = 0

    def check(self) -> None:
        """Call the kernel and the oracle; compare outputs and caches."""
        torch.manual_seed(self.seed)
        chooser = random.Random(self.seed)
        inputs = self._inputs(chooser)
        caches, table = self._caches(chooser)
        expected_caches = [cache.clone() for cache in caches]
        q, k, v, *rest = inputs
        options = {"scale": self.dim**-0.5, "window": self.window, "sink": self.sink}
        options |= {"softcap": self.softcap, "chunk": self.chunk}
        sinks = None
        if self.sinks is not None:
            sinks = (torch.randn(self.heads) + self.sinks).to(self.dtype)
        slopes = None
        if self.slopes:
            slopes = self.slopes * 0.7 ** torch.arange(self.heads, dtype=torch.float32)
            options["rounds_bias"] = self.rounds_bias
        table = (table, sinks, slopes)
        expected = tree_attention_reference(q, k, v, *expected_caches, *rest, *table, **options)
        torch.set_num_threads(self.threads)
        out = torch.ops.specc_cpu.tree_attention(q, k, v, *caches, *rest, *table, **options)
        assert out.shape == expected.shape
        assert out.dtype == self.dtype
        for cache, wanted in zip(caches, expected_caches, strict=True):
            assert torch.equal(cache.view(torch.int8), wanted.view(torch.int8))
        rtol, atol = TOLERANCE[self.dtype]
        if self.int8:
            rtol, atol = max(rtol, INT8_TOLERANCE[0]), max(atol, INT8_TOLERANCE[1])
        torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)
        if (
            self.dtype == torch.bfloat16 and not self.int8
        ):  # almost all outputs round to the same number
            assert (out != expected).sum() <= 2 + 0.02 * out.numel()
        dead = rest[2] < 0
        assert not out[:, dead].any()

    def _inputs(self, chooser: random.Random) -> list[Tensor | None]:
        slots, positions, words, starts = [], [], [], [0]
        num_words = max([1] + [-(-len(tree) // 64) for tree in self.parents])
        for length, tree in zip(self.lengths, self.parents, strict=True):
            order = list(range(len(tree)))
            if not self.causal:
                chooser.shuffle(order)
            alive = {node: chooser.random() >= self.dead for node in order}
            for node in order:
                path = [node]
                while tree[path[-1]] >= 0:
                    path.append(tree[path[-1]])
                depth = node if self.causal else len(path) - 1
                slots.append(length + node if alive[node] else -1)
                positions.append(length + depth)
                # a dead ancestor has no row: what it would hold is poison
                seen = [0] * num_words
                for ancestor in path:
                    if alive[ancestor]:
                        seen[ancestor // 64] |= 1 << ancestor % 64
                words.append([w - 2**64 if w >= 2**63 else w for w in seen])
            starts.append(len(slots))
        slots += [-1] * self.unowned
        positions += [0] * self.unowned
        words += [[0] * num_words] * self.unowned
        count = len(slots)
        if self.causal:  # a chunk has no gaps: its dead tokens are at its end
            for first, last in itertools.pairwise(starts):
                live = sum(slot >= 0 for slot in slots[first:last])
                for i in range(first, last):
                    slots[i] = positions[i] if i - first < live else -1
        tensors = []
        for heads, dim in (
            (self.heads, self.dim),
            (self.kv_heads, self.dim),
            (self.kv_heads, self.value_dim),
        ):
            if self.strided:  # heads of one row beside each other, in the middle of wider rows
                buffer = torch.randn(count, heads * dim + 5)
                tensor = buffer[:, 3 : 3 + heads * dim].view(count, heads, dim).transpose(0, 1)
            else:
                tensor = torch.randn(heads, count, dim)
            tensor[:, torch.tensor(slots, dtype=torch.int64) < 0] = NAN
            tensors.append(tensor.to(self.dtype))
        return [
            *tensors,
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(positions, dtype=torch.int64),
            torch.tensor(slots, dtype=torch.int32),
            torch.tensor(self.lengths, dtype=torch.int32),
            None if self.causal else torch.tensor(words, dtype=torch.int64).view(-1, num_words),
        ]

    def _caches(self, chooser: random.Random) -> tuple[list[Tensor], Tensor]:
        capacity = max(n + len(tree) for n, tree in zip(self.lengths, self.parents, strict=True))
        block_size = self.block_size or capacity + 1
        per_sequence = -(-capacity // block_size) or 1
        blocks = list(range(len(self.lengths) * per_sequence + FREE_BLOCKS))
        chooser.shuffle(blocks)
        free, owned = blocks[:FREE_BLOCKS], torch.tensor(blocks[FREE_BLOCKS:])
        table = owned.view(len(self.lengths), -1)
        caches = []
        for dim in (self.dim, self.value_dim):
            cache = torch.full((len(blocks), block_size, self.kv_heads, dim), NAN)
            cache[free] = CANARY
            for b, length in enumerate(self.lengths):
                slots = torch.arange(length)
                blocks_of = table[b][slots // block_size]
                rows = torch.randn(length, self.kv_heads, dim)
                if self.poison_what_is_cut:
                    first = length % self.chunk if self.chunk else self.window - 1
                    rows[self.sink : length - first] = NAN
                cache[blocks_of, slots % block_size] = rows
            caches.append(self._stored(cache))
        return caches, table.int()

    def _stored(self, cache: Tensor) -> Tensor:
        """Rows as the cache holds them; poison keeps its codes, not only its scale."""
        if not self.int8:
            return cache.to(self.dtype)
        rows = store_rows(cache, torch.int8)
        is_poison = cache.isnan().all(dim=-1)
        rows[..., :-SCALE_BYTES][is_poison] = 101
        return rows


def random_tree(num_nodes: int, seed: int = 0) -> tuple[int, ...]:
    chooser = random.Random(seed)
    return tuple(chooser.randrange(max(0, i - 9), i) if i else -1 for i in range(num_nodes))


@st.composite
def problems(draw) -> Problem:
    kv_heads, group = draw(
        st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 2), (2, 3), (1, 7), (5, 2)])
    )
    causal = draw(st.booleans())
    sizes = st.sampled_from([0, 1, 1, 2, 5, 8, 13, 33, 40])
    lengths = st.sampled_from([0, 1, 15, 63, 64, 65, 100, 130, 200])
    batch = draw(st.integers(1, 4))
    dims = st.sampled_from([1, 3, 8, 15, 16, 17, 32, 33, 48, 64, 80])
    dim = draw(dims)
    seed = draw(st.integers(0, 2**16))
    parents = tuple(random_tree(draw(sizes), seed=seed + b) for b in range(batch))
    return Problem(
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=dim,
        value_dim=draw(st.one_of(st.just(dim), dims)),
        block_size=draw(st.sampled_from([0, 1, 3, 16, 64, 100])),
        lengths=tuple(draw(lengths) for _ in range(batch)),
        parents=parents,
        dead=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        causal=causal,
        # at least as deep as a tree, as the compiler sees to
        window=draw(st.sampled_from([0, 0, 1 if causal else 40, 41, 64, 70, 150])),
        sink=draw(st.sampled_from([0, 1, 4, 70])),
        strided=draw(st.booleans()),
        unowned=draw(st.sampled_from([0, 0, 3])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        int8=draw(st.booleans()),
        sinks=draw(st.sampled_from([None, None, 0.0, 60.0, -60.0])),
        softcap=draw(st.sampled_from([0.0, 0.0, 0.5, 20.0])),
        slopes=draw(st.sampled_from([0.0, 0.0, 0.5, 0.01])),
        rounds_bias=draw(st.booleans()),
        chunk=draw(st.sampled_from([0, 0, 0, 1, 7, 64, 100])),
        seed=seed,
    )


@settings(max_examples=500, deadline=None, derandomize=True)
@given(problems())
def test_any_problem(problem):
    problem.check()


@pytest.mark.parametrize(
    "threads",
    [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "lengths", [(3000,), (0, 2500, 64, 700), (900, 900, 900)], ids=["one", "ragged", "even"]
)
def test_threads_share_sequences(threads, dtype, lengths):
    """Large enough for all threads; their shares begin and end within a sequence."""
    parents = tuple(random_tree(8, seed=b) for b in range(len(lengths)))
    Problem(4, 1, 64, 64, 16, lengths, parents, dtype=dtype, threads=threads).check()
    Problem(4, 2, 64, 48, 16, lengths, parents, dtype=dtype, threads=threads, dead=0.3).check()
    Problem(4, 2, 64, 48, 16, lengths, parents, dtype=dtype, threads=threads, int8=True).check()


@pytest.mark.parametrize(
    "threads",
    [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("sinks", [0.0, 6.0])
def test_threads_share_sequences_with_sinks(threads, sinks):
    """Pieces of a sequence are merged; its sinks count once, whoever has which piece."""
    for lengths in ((3000,), (0, 2500, 64, 700)):
        parents = tuple(random_tree(8, seed=b) for b in range(len(lengths)))
        options = {"threads": threads, "sinks": sinks, "softcap": 5.0}
        Problem(4, 1, 64, 48, 16, lengths, parents, **options).check()
        Problem(4, 2, 64, 64, 16, lengths, parents, int8=True, **options).check()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rounds_bias", [False, True], ids=["", "rounded"])
@pytest.mark.parametrize("int8", [False, True], ids=["rows", "int8"])
def test_threads_share_sequences_with_slopes(int8, rounds_bias, threads):
    """Distances are those of a tile's own keys, whoever has which piece."""
    lengths = (0, 2500, 64, 700)
    parents = tuple(random_tree(70, seed=b) for b in range(len(lengths)))
    for slopes in (0.5, 0.004):
        options = {"threads": threads, "slopes": slopes, "rounds_bias": rounds_bias, "int8": int8}
        Problem(4, 2, 64, 48, 16, lengths, parents, **options).check()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("int8", [False, True], ids=["rows", "int8"])
def test_threads_share_sequences_with_chunks(int8, threads):
    """Tiles before the chunk of a sequence's first token are not read, nor counted as work."""
    lengths = (0, 2500, 64, 700)
    parents = tuple(random_tree(70, seed=b) for b in range(len(lengths)))
    for chunk in (5, 640, 2504):
        options = {"threads": threads, "chunk": chunk, "int8": int8}
        Problem(4, 2, 64, 48, 16, lengths, parents, **options).check()
        Problem(4, 2, 64, 48, 16, lengths, parents, causal=True, **options).check()


def test_rows_before_a_chunk_may_be_anything():
    """The chunk of all tokens begins at 640: rows before it are poison, and not read."""
    options = {"poison_what_is_cut": True, "chunk": 640}
    Problem(4, 2, 16, 16, 16, (700,), (random_tree(8),), **options).check()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("window", [0, 100, 256])
def test_prefill_of_long_chunks(threads, window):
    parents = (random_tree(300), (), random_tree(200), (-1,))
    Problem(
        6, 2, 40, 40, 16,
        lengths=(0, 10, 333, 700),
        parents=parents,
        causal=True,
        window=window,
        sink=4,
        threads=threads,
    ).check()  # fmt: skip


@pytest.mark.parametrize("count", [63, 64, 65, 128, 130, 200])
@pytest.mark.parametrize("length", [0, 1, 40, 64])
def test_trees_of_several_words(count, length):
    Problem(2, 1, 16, 16, 16, (length, 5), (random_tree(count), random_tree(3))).check()
    chain = tuple(range(-1, count - 1))
    Problem(2, 1, 16, 16, 16, (length, 5), (chain, random_tree(3))).check()


@pytest.mark.parametrize("dim", [31, 100, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_head_sizes(dim, dtype):
    for int8 in (False, True):
        trees = (random_tree(5), random_tree(1))
        Problem(8, 2, dim, dim, 16, (70, 3), trees, dtype=dtype, int8=int8).check()


@pytest.mark.parametrize("int8", [False, True])
def test_more_query_heads_than_an_item_has_rows(int8):
    Problem(260, 1, 8, 8, 16, (70, 3), (random_tree(5), random_tree(2)), int8=int8).check()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("kv_heads", "count"), [(5, 60), (8, 8), (7, 40), (12, 1)])
def test_units_of_several_heads(kv_heads, count, dtype, threads):
    """A tile serves one KV head after another; their number need not divide into equal units."""
    trees = (random_tree(count), random_tree(3))
    for int8 in (False, True):
        sizes = (2 * kv_heads, kv_heads, 64, 96, 16, (700, 65))
        Problem(*sizes, trees, dtype=dtype, threads=threads, int8=int8).check()


@pytest.mark.parametrize("int8", [False, True], ids=["rows", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(8, 8, 64), (8, 2, 128), (8, 1, 80), (6, 2, 33)]
)
def test_bits_of_a_token_do_not_depend_on_the_pass(heads, kv_heads, dim, dtype, int8):
    """Eight tokens in one pass and one after the other: one thread gives the same bits."""
    torch.manual_seed(0)
    length, count, block_size = 301, 8, 16
    blocks = -(-(length + count) // block_size)
    table = torch.randperm(blocks).int()[None]
    caches = torch.randn(2, blocks, block_size, kv_heads, dim).to(dtype)
    if int8:
        caches = store_rows(caches, torch.int8)
    q = torch.randn(heads, count, dim).to(dtype)
    k, v = torch.randn(2, kv_heads, count, dim).to(dtype)
    slots = torch.arange(length, length + count)

    def attend(first: int, last: int) -> Tensor:
        words = torch.tensor([[(1 << node + 1) - 1] for node in range(last - first)])
        return torch.ops.specc_cpu.tree_attention(
            q[:, first:last], k[:, first:last], v[:, first:last], *caches,
            torch.tensor([0, last - first], dtype=torch.int32),
            slots[first:last], slots[first:last].int(),
            torch.tensor([length + first], dtype=torch.int32),
            words, table, scale=dim**-0.5,
        )  # fmt: skip

    together = attend(0, count)
    alone = torch.cat([attend(i, i + 1) for i in range(count)], dim=1)
    pairs = torch.cat([attend(i, i + 2) for i in range(0, count, 2)], dim=1)
    assert torch.equal(together, alone)
    assert torch.equal(together, pairs)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("window", [64, 70, 500])
@pytest.mark.parametrize("sink", [0, 4, 64, 65])
def test_window_never_reads_what_it_cuts(window, sink, threads):
    """A row that the window cuts for all tokens may be anything."""
    Problem(
        4, 1, 32, 32, 16, (2000,), (random_tree(6),),
        window=window,
        sink=sink,
        threads=threads,
        poison_what_is_cut=True,
    ).check()  # fmt: skip


@pytest.mark.parametrize("slope", [1 / 40, -1 / 40], ids=["rising", "falling"])
def test_scores_that_move_the_maximum(slope):
    """Each tile has larger, or smaller, scores than those before: what was summed is rescaled."""
    length = 640
    columns = torch.arange(length + 1)[:, None, None]
    keys, values = columns * slope + torch.randn(length + 1, 1, 16), torch.randn(length + 1, 1, 16)
    inputs = (
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([length]),
        torch.tensor([length], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
        torch.tensor([[1]]),
        torch.tensor([[0]], dtype=torch.int32),
    )
    q, k, v = torch.ones(2, 1, 16), keys[-1:].transpose(0, 1), values[-1:].transpose(0, 1)
    out, expected = (
        function(q, k, v, keys[None].clone(), values[None].clone(), *inputs, scale=0.25)
        for function in (torch.ops.specc_cpu.tree_attention, tree_attention_reference)
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bytes_of_rows(dtype):
    """Codes and scales of any row are those of the oracle: ties, zeros, tiny, huge and bad ones."""
    torch.manual_seed(5)
    rows = torch.randn(400, 33) * torch.logspace(-38, 38, 400)[:, None]
    rows[:40] = torch.randint(-127, 128, (40, 33)) / 2  # ties where the largest is 127 / 2 or 127
    rows[:20, 0], rows[20:40, 0] = 63.5, 127.0
    rows[40], rows[41, 3], rows[42, 4], rows[43, 5] = 0, NAN, float("inf"), -float("inf")
    rows[44] = -rows[45]
    rows = rows.to(dtype)
    k = rows[None].contiguous()
    caches = [torch.full((25, 16, 1, 33 + SCALE_BYTES), 7, dtype=torch.int8) for _ in range(2)]
    wanted = [cache.clone() for cache in caches]
    slots = torch.arange(400)
    rest = (
        torch.tensor([0, 400], dtype=torch.int32), slots, slots.int(),
        torch.zeros(1, dtype=torch.int32), None, torch.arange(25).int()[None],
    )  # fmt: skip
    torch.ops.specc_cpu.tree_attention(k, k, k, *caches, *rest, scale=1.0)
    tree_attention_reference(k, k, k, *wanted, *rest, scale=1.0)
    scales = [c[..., 33:].contiguous().view(torch.float32) for c in (caches[0], wanted[0])]
    torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(caches[0][..., :33], wanted[0][..., :33])
    assert torch.equal(caches[0][..., :33], caches[1][..., :33])
    # a row with NaN or infinity reads as such
    assert not scales[0].flatten()[41:44].isfinite().any()
