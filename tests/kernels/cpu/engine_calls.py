"""Calls of the native operators that an engine could make, of random shapes and values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specc.artifact.quantized_layout import QuantizedLayout

Arguments = dict[str, Any]
Builder = Callable[[random.Random], Arguments]

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
    torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
# a head has no more, so that a word's end, a tile's and a register's are met
_WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 32, 33, 64, 65)


def _i32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _floats(rng: random.Random, *shape: int) -> Tensor:
    return torch.randn(shape).to(rng.choice((torch.float32, torch.bfloat16)))


def _parents(rng: random.Random, batch: int, nodes: int) -> Tensor:
    return _i32([[-1, *(rng.randrange(i) for i in range(1, nodes))] for _ in range(batch)])


def _tokens(rng: random.Random, batch: int, nodes: int, vocab: int = 5) -> Tensor:
    return torch.randint(0, vocab, (batch, nodes))


class _Paged:
    """Blocks of a few sequences, each with room for what a call writes."""

    def __init__(self, rng: random.Random, room: int) -> None:
        self.batch = rng.choice((0, 1, 1, 2, 3))
        self.block_size = rng.choice((1, 3, 8, 16, 70))
        self.lengths = [rng.choice((-1, 0, 1, 5, 64, 130)) for _ in range(self.batch)]
        longest = max([1, *(max(n, 0) + room for n in self.lengths)])
        columns = -(-longest // self.block_size)
        self.num_blocks = max(1, self.batch * columns)
        order = list(range(self.num_blocks))
        rng.shuffle(order)
        self.table = _i32(order[: self.batch * columns]).reshape(self.batch, columns)
        self.cache_len = _i32(self.lengths)

    def history(self) -> Tensor:
        return torch.randint(0, 5, (self.num_blocks, self.block_size), dtype=torch.int32)


def _tree_attention(rng: random.Random) -> Arguments:
    counts = [rng.choice((0, 1, 3, 9)) for _ in range(3)]
    paged = _Paged(rng, 16)
    counts = counts[: paged.batch]
    tokens = sum(counts) + rng.choice((0, 0, 2))
    kv_heads, group = rng.choice((1, 2)), rng.choice((1, 2, 5))
    head_dim, value_dim = rng.choice(_WIDTHS), rng.choice(_WIDTHS)
    dtype = rng.choice((torch.float32, torch.bfloat16))
    slot, position, start = [], [], [0]
    for count, length in zip(counts, paged.lengths, strict=True):
        first = max(length, 0)
        slot += [first + i if length >= 0 else -1 for i in range(count)]
        position += [first + i for i in range(count)]
        start.append(start[-1] + count)
    dead = tokens - start[-1]
    words = rng.choice((None, 0, 1, 2))
    shape = (paged.num_blocks, paged.block_size, kv_heads)
    return {
        "q": torch.randn(kv_heads * group, tokens, head_dim).to(dtype),
        "k": torch.randn(kv_heads, tokens, head_dim).to(dtype),
        "v": torch.randn(kv_heads, tokens, value_dim).to(dtype),
        "k_cache": torch.randn(*shape, head_dim).to(dtype),
        "v_cache": torch.randn(*shape, value_dim).to(dtype),
        "q_start": _i32(start),
        "position": torch.tensor(position + [0] * dead, dtype=torch.int64),
        "slot": _i32(slot + [-1] * dead),
        "cache_len": paged.cache_len.clamp(min=0),
        "ancestors": None if words is None else torch.randint(-(2**63), 2**63 - 1, (tokens, words)),
        "block_table": paged.table,
        "sink_logits": rng.choice((None, torch.randn(kv_heads * group).to(dtype))),
        "slopes": rng.choice((None, torch.rand(kv_heads * group))),
        "scale": 0.125,
        "window": rng.choice((0, 0, 1, 20, 64)),
        "sink": rng.choice((0, 0, 1, 4, 70)),
        "softcap": rng.choice((0.0, 0.0, 30.0)),
        "rounds_bias": rng.choice((False, True)),
        "most_rows": rng.choice((0, 0, 1, 4)),
    }


def _attend_expanded(rng: random.Random) -> Arguments:
    made = _tree_attention(rng)
    for name in ("k", "v", "v_cache", "slopes", "window", "sink", "rounds_bias"):
        made.pop(name)
    heads, tokens, _ = made["q"].shape
    dtype, shape = made["q"].dtype, made["k_cache"].shape[:2]
    own, value_dim, rank, shared = (rng.choice((1, 3, 16, 20)) for _ in range(4))
    changes = {
        "absorbed": torch.randn(heads, tokens, value_dim).to(dtype),
        "q": torch.randn(heads, tokens, own + shared).to(dtype),
        "k_cache": torch.randn(*shape, 1, rank + shared).to(dtype),
        "up_k": torch.randn(heads, own, rank).to(dtype),
        "up_v": torch.randn(heads, value_dim, rank).to(dtype),
        "most_rows": rng.choice((1, 1, 4)),
    }
    return made | changes


def _block_mass(rng: random.Random) -> Arguments:
    made = _tree_attention(rng)
    left_out = ("k", "v", "v_cache", "sink_logits", "slopes", "window", "sink", "softcap")
    for name in (*left_out, "rounds_bias", "most_rows"):
        made.pop(name)
    batch, columns = made["block_table"].shape
    mass = torch.zeros(batch + rng.choice((0, 2)), rng.choice((columns, columns, columns + 3, 0)))
    mass[[b for b in range(batch) if rng.random() < 0.3]] = -1.0
    return {**made, "mass": mass}


def _blocks(rng: random.Random, n: int, k: int) -> Tensor:
    dtype = rng.choice((torch.float32, torch.bfloat16))
    unit = 1 if dtype == torch.float32 else 2
    return torch.randn(-(-n // 32), -(-k // unit), 32, unit).to(dtype)


def _linear(rng: random.Random) -> Arguments:
    n, k = rng.choice((0, 1, 31, 32, 33, 97)), rng.choice((0, 1, 2, 3, 127, 128, 129, 300))
    weight = _blocks(rng, n, k)
    return {
        "input": torch.randn(rng.choice((0, 1, 2, 13, 33)), k).to(weight.dtype),
        "weight": weight,
        "bias": rng.choice((None, torch.randn(n).to(weight.dtype))),
        "out_features": n,
    }


def _linear_q(rng: random.Random) -> Arguments:
    n, k = rng.choice((0, 1, 31, 32, 33, 97)), rng.choice((1, 2, 3, 127, 128, 129, 300))
    layouts = ("int8", "int4-g32", "int4-g128-zeros", "int8-g64-zeros", "fp8", "mxfp4")
    layout = QuantizedLayout.named(rng.choice(layouts))
    dtype = rng.choice((torch.float32, torch.bfloat16))
    return {
        "input": torch.randn(rng.choice((0, 1, 2, 13, 33)), k).to(dtype),
        "weight": torch.randint(0, 256, layout.stored_shape((n, k)), dtype=torch.uint8),
        "bias": rng.choice((None, torch.randn(n).to(dtype))),
        "out_features": n,
        "bits": layout.bits,
        "group": layout.group,
        "has_zeros": layout.has_zeros,
        "is_float": layout.is_float,
    }


def _grouped_mm_q(rng: random.Random) -> Arguments:
    made = _linear_q(rng)
    x, blocks, experts = made.pop("input"), made.pop("weight"), rng.choice((0, 1, 2, 5))
    made.pop("bias")
    ends = sorted(rng.randint(0, len(x)) for _ in range(experts))
    return {
        "x": x,
        "weight": blocks.repeat(experts, 1),
        "ends": torch.tensor(ends, dtype=torch.int32),
        **made,
    }


def _embedding_of_blocks(rng: random.Random) -> Arguments:
    n, width = rng.choice((1, 31, 32, 33, 97)), rng.choice(_WIDTHS)
    return {
        "weight": _blocks(rng, n, width),
        "tokens": torch.randint(0, n, (rng.choice((0, 1, 7)),)),
        "num_embeddings": n,
        "width": width,
    }


def _tree_expand(rng: random.Random) -> Arguments:
    vocab = rng.choice((1, 5, 16, 65, 257))
    logits = _floats(rng, rng.choice((0, 1, 3)), vocab)
    return {"logits": logits, "num_children": rng.randint(1, min(vocab, 20))}


def _accept_winners(rng: random.Random) -> Arguments:
    batch, nodes = rng.choice((0, 1, 3)), rng.choice((1, 2, 9, 66))
    tokens = _tokens(rng, batch, nodes)
    winners = torch.randint(-1, 5, (batch, nodes))
    parents = _parents(rng, batch, nodes)
    return {
        "winners": winners,
        "tokens": tokens,
        "parents": parents.reshape(batch, nodes),
        "max_depth": rng.randint(0, 9),
    }


def _commit_kv(rng: random.Random) -> Arguments:
    paged = _Paged(rng, 8)
    rows = paged.table.shape[1] * paged.block_size if paged.batch else 1
    moves = rng.choice((0, 1, 4))
    dtype = rng.choice((torch.int64, torch.int32))
    shape = (rng.choice((1, 2)), 2, paged.num_blocks, paged.block_size, 2, rng.choice(_WIDTHS))
    return {
        "slab": _floats(rng, *shape),
        "source": torch.randint(-1, rows, (paged.batch, moves), dtype=dtype),
        "target": torch.randint(-1, rows, (paged.batch, moves), dtype=dtype),
        "block_table": paged.table,
    }


def _slab_rows(rng: random.Random) -> tuple[Arguments, int, int]:
    """Slab, tokens and tables; how many tokens there are, and how many rows a sequence has."""
    paged = _Paged(rng, 8)
    counts = [rng.choice((0, 1, 3, 9)) for _ in range(paged.batch)]
    starts = _i32([0, *itertools.accumulate(counts)])
    slab = _floats(rng, paged.num_blocks, paged.block_size, rng.choice((0, *_WIDTHS)))
    rows = paged.table.shape[1] * paged.block_size if paged.batch else 1
    tokens = sum(counts) + rng.choice((0, 0, 2))
    return {"slab": slab, "q_start": starts, "block_table": paged.table}, tokens, rows


def _write_rows(rng: random.Random) -> Arguments:
    made, tokens, rows = _slab_rows(rng)
    x = torch.randn(tokens, made["slab"].shape[2]).to(made["slab"].dtype)
    return {**made, "x": x, "slot": torch.randint(-1, rows, (tokens,), dtype=torch.int32)}


def _take_rows(rng: random.Random) -> Arguments:
    made, tokens, rows = _slab_rows(rng)
    shape = tokens, rng.choice((0, 1, 1, 4))
    return {**made, "slots": torch.randint(-1, rows, shape, dtype=torch.int32)}


def _tree_rows(rng: random.Random) -> Arguments:
    count = rng.choice((0, 1, 9))
    return {
        "cache_len": torch.randint(-1, 99, (rng.choice((0, 1, 3)),), dtype=torch.int32),
        "nodes": torch.randint(-1, 9, (count,), dtype=torch.int32),
        "depths": torch.randint(0, 9, (count,), dtype=torch.int32),
    }


def _commit_rows(rng: random.Random) -> Arguments:
    batch, width, nodes = rng.choice((0, 1, 3)), rng.choice((0, 1, 5)), rng.choice((1, 9))
    shape = (nodes,) if rng.random() < 0.5 else (batch, nodes)
    return {
        "path": torch.randint(-1, nodes, (batch, width), dtype=torch.int32),
        "cache_len": torch.randint(-1, 99, (batch,), dtype=torch.int32),
        "slot_of": torch.randint(-1, nodes, shape, dtype=torch.int32),
    }


def _next_tokens(rng: random.Random) -> Arguments:
    batch, width = rng.choice((0, 1, 3)), rng.choice((1, 2, 7))
    return {
        "last_tokens": _tokens(rng, batch, rng.choice((1, 2, 4))),
        "output_tokens": _tokens(rng, batch, width),
        "num_accepted": torch.randint(0, width, (batch,), dtype=torch.int32),
    }


def _rules(rng: random.Random, batch: int) -> Arguments:
    """Sampling options of a batch, some of every rule."""
    values, words = [], []
    for _ in range(batch):
        values.append(
            [
                rng.choice((0.0, 0.7, 1.0, 2.0)), rng.choice((1.0, 0.9, 0.1)),
                rng.choice((0.0, 0.05, 0.5)), rng.choice((1.0, 1.0, 1.3)),
                rng.choice((0.0, 0.0, 0.5)), rng.choice((0.0, 0.0, -0.5)),
            ]
        )  # fmt: skip
        top_k = rng.choice((0, -1, 1, 3, 40))
        words.append([rng.getrandbits(63), top_k, rng.randrange(4), rng.choice((0, 3))])
    return {
        "values": torch.tensor(values, dtype=torch.float32).reshape(batch, 6),
        "words": torch.tensor(words, dtype=torch.int64).reshape(batch, 4),
    }


def _draft_children(rng: random.Random) -> Arguments:
    batch, frontier = rng.choice((0, 1, 3)), rng.choice((1, 2, 4))
    vocab = rng.choice((1, 5, 16, 65, 300, 1100))
    return {
        "logits": _floats(rng, batch * frontier, vocab),
        "num_children": rng.randint(1, min(vocab, 9)),
        "cache_len": torch.randint(-1, 99, (batch,), dtype=torch.int32),
        "columns": torch.arange(1, frontier + 1, dtype=torch.int32),
        "depth": rng.randint(0, 5),
        **_rules(rng, batch),
        "scored": rng.random() < 0.5,
    }


def _verified(rng: random.Random) -> tuple[Arguments, int, int, int]:
    """What `accept` and `node_winners` have in common; sequences, nodes and vocabulary of it."""
    paged = _Paged(rng, 8)
    nodes, vocab = rng.choice((1, 2, 5, 9)), rng.choice((1, 5, 65, 300))
    arguments = {
        "logits": _floats(rng, paged.batch * nodes, vocab),
        "tokens": _tokens(rng, paged.batch, nodes, min(vocab, 5)),
        "parents": _parents(rng, paged.batch, nodes).reshape(paged.batch, nodes),
        **_rules(rng, paged.batch),
        "cache_len": paged.cache_len,
        "history": paged.history(),
        "block_table": paged.table,
    }
    return arguments, paged.batch, nodes, vocab


def _accept(rng: random.Random) -> Arguments:
    arguments, batch, nodes, vocab = _verified(rng)
    arguments |= {"max_depth": rng.randint(0, nodes), "image": None, "q_rows": None}
    columns = nodes
    if rng.random() < 0.5:
        columns = nodes + rng.randint(0, 3)
        arguments["image"] = torch.randint(-1, nodes, (batch, columns), dtype=torch.int32)
    rows = [rng.choice((1, 2)) for _ in range(rng.choice((0, 1, 2)))]
    arguments["draft_logits"] = [_floats(rng, batch * count, vocab) for count in rows]
    if rows:
        arguments["q_rows"] = torch.randint(-1, sum(rows), (columns,), dtype=torch.int32)
    return arguments


def _node_winners(rng: random.Random) -> Arguments:
    arguments, batch, nodes, vocab = _verified(rng)
    first = rng.randrange(nodes)
    kept = arguments["logits"].reshape(batch, nodes, vocab)[:, first:]
    arguments["logits"] = kept.reshape(batch * (nodes - first), vocab).clone()
    return arguments | {"first_node": first}


def _column_winners(rng: random.Random) -> Arguments:
    rows, columns = rng.choice((0, 1, 7)), rng.choice((1, 5, 65, 300))
    first = rng.choice((0, 3, 512, 700))
    return {
        "logits": _floats(rng, rows, columns),
        "temperature": torch.tensor([rng.choice((0.0, 0.7, 1.0)) for _ in range(rows)]),
        "seeds": torch.randint(-(1 << 62), 1 << 62, (rows,)),
        "positions": torch.randint(0, 1 << 31, (rows,)),
        "first": first,
        "vocab_size": rng.choice((1, first + 1, first + columns, 1 << 20)),
    }


def _merge_trees(rng: random.Random) -> Arguments:
    batch, sizes = rng.choice((0, 1, 3)), [rng.choice((1, 2, 7)) for _ in range(rng.randint(1, 4))]
    trees = [_parents(rng, batch, size).reshape(batch, size) for size in sizes]
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return {
        "tokens": _tokens(rng, batch, sum(sizes)),
        "parents": torch.cat(trees, 1),
        "start": _i32(starts),
    }


def _rerank_tree(rng: random.Random) -> Arguments:
    batch, candidates = rng.choice((0, 1, 3)), rng.choice((1, 2, 9, 70))
    return {
        "tokens": _tokens(rng, batch, candidates),
        "parents": _parents(rng, batch, candidates).reshape(batch, candidates),
        "scores": torch.randn(batch, candidates),
        "num_nodes": rng.randint(1, candidates),
    }


def _ancestor_words(rng: random.Random) -> Arguments:
    batch, nodes = rng.choice((0, 1, 3)), rng.choice((1, 2, 63, 64, 65, 130))
    return {"parents": _parents(rng, batch, nodes).reshape(batch, nodes)}


def _image_slots(rng: random.Random) -> Arguments:
    batch, own, nodes = rng.choice((0, 1, 3)), rng.choice((1, 9)), rng.choice((1, 5, 9))
    shape = (own,) if rng.random() < 0.5 else (batch, own)
    return {
        "image": torch.randint(-1, nodes, (batch, own), dtype=torch.int32),
        "slots": torch.randint(-1, own, shape, dtype=torch.int32),
        "num_nodes": nodes,
    }


def _vote_chain(rng: random.Random) -> Arguments:
    batch, drafts, length = rng.choice((0, 1, 3)), rng.choice((0, 1, 4)), rng.choice((0, 1, 6))
    return {
        "tokens": torch.randint(-1, 3, (batch, drafts, length)),
        "weights": torch.rand(batch, drafts),
    }


def _lookup(rng: random.Random) -> Arguments:
    paged = _Paged(rng, 8)
    return {
        "history": paged.history(),
        "block_table": paged.table,
        "cache_len": paged.cache_len,
        "last_tokens": _tokens(rng, paged.batch, rng.choice((1, 3))),
        "ngram": rng.choice((1, 3, 40)),
        "num_tokens": rng.choice((1, 5, 9)),
    }


def _record_tokens(rng: random.Random) -> Arguments:
    paged, width = _Paged(rng, 8), rng.choice((1, 2, 7))
    return {
        "history": paged.history(),
        "block_table": paged.table,
        "cache_len": paged.cache_len,
        "last_tokens": _tokens(rng, paged.batch, rng.choice((1, 3))),
        "output_tokens": _tokens(rng, paged.batch, width),
        "num_accepted": torch.randint(0, width, (paged.batch,), dtype=torch.int32),
    }


def _all_reduce(rng: random.Random) -> Arguments:
    return {"x": _floats(rng, rng.choice((0, 1, 3)), rng.choice(_WIDTHS))}


def _gather_rows(rng: random.Random) -> Arguments:
    return {"x": _floats(rng, rng.choice((0, 1, 3)), rng.choice((0, 1, 7, 5000)))}


def _from_first(rng: random.Random) -> Arguments:
    return {"x": _tokens(rng, rng.choice((0, 1, 3)), rng.choice(_WIDTHS)).to(rng.choice(DTYPES))}


def _best_of_ranks(rng: random.Random) -> Arguments:
    shape = rng.choice((0, 1, 3)), rng.choice(_WIDTHS)
    return {"score": torch.randn(shape), "token": torch.randint(0, 9, shape)}


BUILDERS: dict[str, Builder] = {
    "tree_attention": _tree_attention,
    "attend_expanded": _attend_expanded,
    "block_mass": _block_mass,
    "linear": _linear,
    "linear_q": _linear_q,
    "grouped_mm_q": _grouped_mm_q,
    "embedding_of_blocks": _embedding_of_blocks,
    "tree_expand": _tree_expand,
    "accept_winners": _accept_winners,
    "commit_kv": _commit_kv,
    "write_rows": _write_rows,
    "take_rows": _take_rows,
    "tree_rows": _tree_rows,
    "commit_rows": _commit_rows,
    "next_tokens": _next_tokens,
    "draft_children": _draft_children,
    "accept": _accept,
    "node_winners": _node_winners,
    "column_winners": _column_winners,
    "merge_trees": _merge_trees,
    "rerank_tree": _rerank_tree,
    "ancestor_words": _ancestor_words,
    "image_slots": _image_slots,
    "vote_chain": _vote_chain,
    "lookup": _lookup,
    "record_tokens": _record_tokens,
    # in a group of one rank
    "all_reduce": _all_reduce,
    "gather_rows": _gather_rows,
    "from_first": _from_first,
    "best_of_ranks": _best_of_ranks,
}
