"""`specc::invariant_attend` in Triton: its oracle, and a row's bits of plain decoding alone."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.kernels.cuda import invariant_attend as module
from specc.kernels.cuda.attend_call import AttendCall
from specc.kernels.cuda.invariant_attend import invariant_attend, splits_of
from specc.kernels.cuda.invariant_attend_kernels import FIRST_KEYS, MOST_SPLITS, SPLITS
from specc.kernels.cuda.launch import even_tokens
from tests.kernels.cuda.cases_attend import (
    BAD_CASE,
    BF16,
    CASES,
    F16,
    Call,
    Case,
    check_bad_call,
    check_call,
    make_call,
    run_broken,
)
from tests.kernels.cuda.cases_scores import CHUNKED_CASES, SINK_CASES, SLOPED_CASES, SOFTCAP_CASES

pytestmark = pytest.mark.usefixtures("poisoned_memory")
F32 = torch.float32
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCORED = {
    f"{what}-{name}": case
    for what, cases in (
        ("chunk", CHUNKED_CASES), ("sink", SINK_CASES), ("slope", SLOPED_CASES),
        ("softcap", SOFTCAP_CASES),
    )
    for name, case in cases.items()
}  # fmt: skip
# one program for each split of these would be thousands
LONG = {"far-window", "many-sequences"}
ALL = CASES | SCORED


def run(is_split: bool, call: Call, splits: int | None = None) -> Tensor:
    q, k_cache, v_cache, *places = call.args
    options = {"window": 0, "sink": 0, "num_splits": None} | call.options
    made = AttendCall(q, k_cache, v_cache, v_cache.shape[3], *places, **options)  # type: ignore
    return module.run(made, is_split)


@pytest.mark.default(
    "plain-decode", "tree", "tree-odd-pages", "tree-of-3-words", "tree-window-sink", "prefill",
    "prefill-window", "dead-tokens", "head-128", "value-size", "far-window",
    "chunk-tree-of-several-chunks", "sink-tree", "slope-tree-of-3-words", "softcap-tree",
)  # fmt: skip
@pytest.mark.parametrize("name", ALL)
def test_the_oracle(name: str, device: torch.device) -> None:
    for is_split in (False, True)[: 1 if name in LONG else 2]:
        check_call(ALL[name], make_call(ALL[name], device), functools.partial(run, is_split))


@pytest.mark.parametrize("is_split", [False, True])
def test_bad_data_stays_inside(is_split: bool, device: torch.device) -> None:
    check_bad_call(make_call(BAD_CASE, device), functools.partial(run, is_split))
    call = make_call(Case(((2, 40),), True, F16, (2, 1), (16, 16)), device)
    for is_tree in (True, False):
        run_broken(call, is_tree, functools.partial(run, is_split))


def test_splits_follow_from_places_alone() -> None:
    """Sixteen of 128 keys, sixteen of 256, and so on, whatever capacity a cache has."""
    first, count = FIRST_KEYS.value, SPLITS.value
    assert [splits_of(keys) for keys in (0, 1, first, first + 1)] == [0, 1, 1, 2]
    assert [splits_of((2**i - 1) * count * first) for i in range(1, 9)] == [
        count * i for i in range(1, 9)
    ]
    # as many as the device looks at
    assert splits_of(2**26) <= MOST_SPLITS.value


@dataclass(frozen=True)
class Heads:
    """What all sequences of a call have in common.

    Args:
        sizes: query heads, KV heads, columns of keys and of values.
        options: of the operator.
    """

    dtype: torch.dtype
    sizes: tuple[int, int, int, int]
    options: dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """Tokens of one sequence.

    Args:
        keys: [S, HK, D] of all slots; values likewise.
        q: [T, H, D].
        position: of the tokens; slots likewise.
        length: committed keys.
        words: ancestors of each token as an integer; None where each sees what lies before it.
    """

    keys: Tensor
    values: Tensor
    q: Tensor
    position: list[int]
    slot: list[int]
    length: int
    words: list[int] | None


def attended(
    heads: Heads, batch: list[Rows], is_split: bool, block_size: int = 16, dead: bool = False
) -> list[Tensor]:
    """[H, T, DV] of each sequence, over a cache whose blocks lie anywhere.

    Args:
        dead: a sequence of padding comes first.
    """
    dice = random.Random(len(batch) * 31 + block_size)
    num_pages = max(-(-len(rows.keys) // block_size) for rows in batch) + 1
    blocks = list(range(num_pages * len(batch)))
    dice.shuffle(blocks)
    table = torch.tensor(blocks, dtype=torch.int32).view(len(batch), num_pages)
    caches = []
    for name in ("keys", "values"):
        like = getattr(batch[0], name)
        cache = like.new_full((len(blocks), block_size, *like.shape[1:]), float("nan"))
        for b, rows in enumerate(batch):
            slots = torch.arange(len(rows.keys))
            cache[table[b, slots // block_size].long(), slots % block_size] = getattr(rows, name)
        caches.append(cache)
    words = None
    if batch[0].words is not None:
        num_words = max(-(-bits.bit_length() // 64) for rows in batch for bits in rows.words or ())
        words = [_words(bits, num_words) for rows in batch for bits in rows.words or ()]
    counts = [len(rows.q) for rows in batch]
    lengths = [rows.length for rows in batch]
    if dead:
        counts, lengths = [0, *counts], [-1, *lengths]
        table = torch.cat((table[:1], table))
    starts = [sum(counts[:b]) for b in range(len(counts) + 1)]
    args = (
        torch.cat([rows.q for rows in batch]).transpose(0, 1), *caches,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([x for rows in batch for x in rows.position]),
        torch.tensor([x for rows in batch for x in rows.slot], dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        None if words is None else torch.tensor(words), table,
    )  # fmt: skip
    args = tuple(x if x is None else x.to(DEVICE) for x in args)
    options = {
        name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in heads.options.items()
    }
    out = run(is_split, Call(args, options)).cpu()
    return list(out.split([len(rows.q) for rows in batch], dim=1))


def _words(bits: int, count: int) -> list[int]:
    found = [(bits >> 64 * i) & ((1 << 64) - 1) for i in range(count)]
    return [word - (1 << 64) if word >> 63 else word for word in found]


def made(heads: Heads, length: int, parents: list[int], seed: int) -> Rows:
    """A tree after so many committed keys."""
    num_heads, num_kv_heads, *columns = heads.sizes
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        torch.randn(length + len(parents), num_kv_heads, size, generator=generator).to(heads.dtype)
        for size in columns
    )
    q = torch.randn(len(parents), num_heads, columns[0], generator=generator).to(heads.dtype)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), node])
    return Rows(
        keys, values, q,
        [length + len(path) - 1 for path in paths], [length + i for i in range(len(parents))],
        length, [sum(1 << i for i in path) for path in paths],
    )  # fmt: skip


def plain(rows: Rows, node: int, as_tree: bool) -> Rows:
    """A node of a tree as plain decoding comes to it: what lies on its path is committed."""
    path = [i for i in range(len(rows.q)) if rows.words and rows.words[node] >> i & 1]
    slots = [*range(rows.length), *(rows.length + i for i in path)]
    return replace(
        rows,
        keys=rows.keys[slots], values=rows.values[slots], q=rows.q[node : node + 1],
        position=[len(slots) - 1], slot=[len(slots) - 1], length=len(slots) - 1,
        words=[1] if as_tree else None,
    )  # fmt: skip


def options_of(heads: int, dtype: torch.dtype, **given: Any) -> dict[str, Any]:
    options = {"scale": 0.3, **given}
    if "slopes" in options:
        options["slopes"] = options["slopes"] * 0.5 ** torch.arange(heads, dtype=torch.float32)
    if "sink_logits" in options:
        options["sink_logits"] = torch.full((heads,), options["sink_logits"], dtype=dtype)
    return options


def heads_of(dtype: torch.dtype, *sizes: int, **given: Any) -> Heads:
    return Heads(dtype, sizes, options_of(sizes[0], dtype, **given))  # type: ignore[arg-type]


# a chain over two splits' end, and trees whose branches lie anywhere in a block of keys, also one
# of more than 64 nodes, over that block's end
CHAIN = [-1, 0, 1, 2, 3, 4]
TREE = [-1, 0, 0, 1, 1, 2, 3, 5, 5, 6, 0, 9]
WIDE = [-1, *(max(0, i // 2 - 1) for i in range(1, 70))]
KINDS = {
    "float32": heads_of(F32, 4, 2, 16, 16),
    "bfloat16": heads_of(BF16, 8, 2, 64, 64),
    "one-head-each": heads_of(F16, 2, 2, 32, 32),
    "24-heads-share": heads_of(BF16, 24, 1, 16, 16),
    "two-widths": heads_of(F16, 4, 2, 40, 24),
    "window": heads_of(F32, 4, 2, 16, 16, window=21),
    "window-and-sink": heads_of(BF16, 4, 2, 16, 16, window=50, sink=3),
    "chunk": heads_of(F16, 4, 2, 16, 16, chunk=62),
    "sinks-and-softcap": heads_of(BF16, 4, 2, 16, 16, sink_logits=0.5, softcap=3.0),
    "slopes": heads_of(F32, 4, 2, 16, 16, slopes=0.3),
    "rounded-slopes": heads_of(BF16, 4, 2, 16, 16, slopes=0.3, rounds_bias=True),
}


@pytest.mark.default("bfloat16", "two-widths", "window-and-sink", "slopes")
@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("name", KINDS)
def test_nodes_have_the_bits_of_plain_decoding(name: str) -> None:
    """Whatever tree they are in, whatever else is in the batch, and however keys are split."""
    heads = KINDS[name]
    batch = [made(heads, 126, CHAIN, 1), made(heads, 45, TREE, 2), made(heads, 58, WIDE, 3)]
    found = attended(heads, batch, False)
    for is_split, block_size, dead in ((True, 16, True), (True, 64, False)):
        again = attended(heads, batch, is_split, block_size, dead)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), block_size
    for rows, out in zip(batch, found, strict=True):
        for node in sorted({*range(0, len(rows.q), 5), len(rows.q) - 1}):
            is_split, as_tree = bool(node % 2), bool(node % 3)
            (alone,) = attended(heads, [plain(rows, node, as_tree)], is_split, 7)
            assert torch.equal(alone[:, 0], out[:, node]), (len(rows.q), node)


@pytest.mark.usefixtures("products_in_order")
def test_splits_are_merged_in_their_order() -> None:
    """Two may be added either way; these are four, of which a row alone has the first three."""
    heads = KINDS["float32"]
    rows = made(heads, 382, CHAIN, 7)
    (found,), (again,) = (attended(heads, [rows], is_split) for is_split in (False, True))
    assert torch.equal(found, again)
    for node in (1, 5):
        (alone,) = attended(heads, [plain(rows, node, False)], bool(node % 2))
        assert torch.equal(alone[:, 0], found[:, node])


@pytest.mark.default("float32", "one-head-each", "chunk", "sinks-and-softcap")
@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("name", KINDS)
def test_prompts_have_the_bits_of_plain_decoding(name: str) -> None:
    """In one pass or in several, beside others."""
    heads = KINDS[name]
    whole = made(heads, 0, list(range(-1, 139)), 4)
    beside = replace(made(heads, 3, CHAIN, 5), words=None)
    out, _ = attended(heads, [replace(whole, words=None), beside], True)
    for first, last in ((0, 1), (30, 31), (63, 70), (126, 131), (139, 140)):
        part = replace(
            whole,
            keys=whole.keys[:last], values=whole.values[:last], q=whole.q[first:last],
            position=whole.position[first:last], slot=whole.slot[first:last], length=first,
            words=None,
        )  # fmt: skip
        for is_split in (False, True):
            (alone,) = attended(heads, [part], is_split, 32)
            assert torch.equal(alone, out[:, first:last]), (first, last)


@pytest.mark.usefixtures("products_in_order")
def test_what_others_see_does_not_reach_a_row() -> None:
    """A node's siblings may hold anything."""
    heads = KINDS["bfloat16"]
    rows = made(heads, 61, TREE, 6)
    (wanted,) = attended(heads, [rows], False)
    for name in ("keys", "values"):
        spoiled = getattr(rows, name).clone()
        spoiled[61 + 10] = float("nan")
        (found,) = attended(heads, [replace(rows, **{name: spoiled})], True)
        assert found[:, 10].isnan().any()
        assert torch.equal(found[:, :10], wanted[:, :10])


@pytest.mark.usefixtures("products_in_order")
def test_even_batches_are_the_same() -> None:
    """Where the host says that sequences have equally many tokens."""
    heads = KINDS["bfloat16"]
    batch = [made(heads, length, TREE, length) for length in (30, 62)]
    wanted = attended(heads, batch, False)
    with even_tokens():
        found = attended(heads, batch, True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_parts_have_room(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Splits have programs of their own where memory was planned for what these leave."""
    case = Case(((2, 150), (2, 30)), True, BF16, (2, 1), (16, 16))
    shared: list[int] = []
    counters = module.counters

    def counted(cache: Tensor, count: int) -> Tensor:
        shared.append(count)
        return counters(cache, count)

    monkeypatch.setattr(module, "counters", counted)
    call = make_call(case, device)
    # two splits of each of two tiles of 16 rows
    for rows, wanted in ((2 * 2 * 16, [2]), (2 * 2 * 16 - 1, [])):
        shared.clear()
        monkeypatch.setattr(module, "SPLIT_ROWS", rows)
        check_call(case, call, lambda x, _: invariant_attend(*x.args, **x.options))
        assert shared == wanted


def test_no_tokens(device: torch.device) -> None:
    call = make_call(Case(((2, 5),)), device)
    q, k_cache, v_cache, q_start, position, slot, cache_len, ancestors, table = call.args
    empty = (position[:0], slot[:0], cache_len, ancestors[:0], table)
    out = invariant_attend(q[:, :0], k_cache, v_cache, q_start * 0, *empty, scale=1.0)
    assert out.shape == (4, 0, 64)
