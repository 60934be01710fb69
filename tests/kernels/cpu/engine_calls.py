"""Calls of the native operators that an engine could make, of random shapes and values."""

from __future__ import annotations

import random

import torch

from tests.kernels.cpu.call_parts import (
    DTYPES,
    WIDTHS,
    Arguments,
    Builder,
    Paged,
    i32,
    random_floats,
    random_parents,
    random_tokens,
)
from tests.kernels.cpu.fused_calls import FUSED_BUILDERS
from tests.kernels.cpu.model_calls import MODEL_BUILDERS
from tests.kernels.cpu.recurrence_calls import RECURRENCE_BUILDERS


def _tree_expand(rng: random.Random) -> Arguments:
    vocab = rng.choice((1, 5, 16, 65, 257))
    logits = random_floats(rng, rng.choice((0, 1, 3)), vocab)
    return {"logits": logits, "num_children": rng.randint(1, min(vocab, 20))}


def _accept_winners(rng: random.Random) -> Arguments:
    batch, nodes = rng.choice((0, 1, 3)), rng.choice((1, 2, 9, 66))
    tokens = random_tokens(rng, batch, nodes)
    winners = torch.randint(-1, 5, (batch, nodes))
    parents = random_parents(rng, batch, nodes)
    return {
        "winners": winners,
        "tokens": tokens,
        "parents": parents.reshape(batch, nodes),
        "max_depth": rng.randint(0, 9),
    }


def _commit_kv(rng: random.Random) -> Arguments:
    paged = Paged(rng, 8)
    rows = paged.table.shape[1] * paged.block_size if paged.batch else 1
    moves = rng.choice((0, 1, 4))
    dtype = rng.choice((torch.int64, torch.int32))
    shape = (rng.choice((1, 2)), 2, paged.num_blocks, paged.block_size, 2, rng.choice(WIDTHS))
    return {
        "slab": random_floats(rng, *shape),
        "source": torch.randint(-1, rows, (paged.batch, moves), dtype=dtype),
        "target": torch.randint(-1, rows, (paged.batch, moves), dtype=dtype),
        "block_table": paged.table,
    }


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
        "last_tokens": random_tokens(rng, batch, rng.choice((1, 2, 4))),
        "output_tokens": random_tokens(rng, batch, width),
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
        "logits": random_floats(rng, batch * frontier, vocab),
        "num_children": rng.randint(1, min(vocab, 9)),
        "cache_len": torch.randint(-1, 99, (batch,), dtype=torch.int32),
        "columns": torch.arange(1, frontier + 1, dtype=torch.int32),
        "depth": rng.randint(0, 5),
        **_rules(rng, batch),
        "scored": rng.random() < 0.5,
    }


def _verified(rng: random.Random) -> tuple[Arguments, int, int, int]:
    """What `accept` and `node_winners` have in common; sequences, nodes and vocabulary of it."""
    paged = Paged(rng, 8)
    nodes, vocab = rng.choice((1, 2, 5, 9)), rng.choice((1, 5, 65, 300))
    arguments = {
        "logits": random_floats(rng, paged.batch * nodes, vocab),
        "tokens": random_tokens(rng, paged.batch, nodes, min(vocab, 5)),
        "parents": random_parents(rng, paged.batch, nodes).reshape(paged.batch, nodes),
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
    arguments["draft_logits"] = [random_floats(rng, batch * count, vocab) for count in rows]
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
        "logits": random_floats(rng, rows, columns),
        "temperature": torch.tensor([rng.choice((0.0, 0.7, 1.0)) for _ in range(rows)]),
        "seeds": torch.randint(-(1 << 62), 1 << 62, (rows,)),
        "positions": torch.randint(0, 1 << 31, (rows,)),
        "first": first,
        "vocab_size": rng.choice((1, first + 1, first + columns, 1 << 20)),
    }


def _merge_trees(rng: random.Random) -> Arguments:
    batch, sizes = rng.choice((0, 1, 3)), [rng.choice((1, 2, 7)) for _ in range(rng.randint(1, 4))]
    trees = [random_parents(rng, batch, size).reshape(batch, size) for size in sizes]
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return {
        "tokens": random_tokens(rng, batch, sum(sizes)),
        "parents": torch.cat(trees, 1),
        "start": i32(starts),
    }


def _rerank_tree(rng: random.Random) -> Arguments:
    batch, candidates = rng.choice((0, 1, 3)), rng.choice((1, 2, 9, 70))
    return {
        "tokens": random_tokens(rng, batch, candidates),
        "parents": random_parents(rng, batch, candidates).reshape(batch, candidates),
        "scores": torch.randn(batch, candidates),
        "num_nodes": rng.randint(1, candidates),
    }


def _ancestor_words(rng: random.Random) -> Arguments:
    batch, nodes = rng.choice((0, 1, 3)), rng.choice((1, 2, 63, 64, 65, 130))
    return {"parents": random_parents(rng, batch, nodes).reshape(batch, nodes)}


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
    paged = Paged(rng, 8)
    return {
        "history": paged.history(),
        "block_table": paged.table,
        "cache_len": paged.cache_len,
        "last_tokens": random_tokens(rng, paged.batch, rng.choice((1, 3))),
        "ngram": rng.choice((1, 3, 40)),
        "num_tokens": rng.choice((1, 5, 9)),
    }


def _record_tokens(rng: random.Random) -> Arguments:
    paged, width = Paged(rng, 8), rng.choice((1, 2, 7))
    return {
        "history": paged.history(),
        "block_table": paged.table,
        "cache_len": paged.cache_len,
        "last_tokens": random_tokens(rng, paged.batch, rng.choice((1, 3))),
        "output_tokens": random_tokens(rng, paged.batch, width),
        "num_accepted": torch.randint(0, width, (paged.batch,), dtype=torch.int32),
    }


def _all_reduce(rng: random.Random) -> Arguments:
    return {"x": random_floats(rng, rng.choice((0, 1, 3)), rng.choice(WIDTHS))}


def _gather_rows(rng: random.Random) -> Arguments:
    return {"x": random_floats(rng, rng.choice((0, 1, 3)), rng.choice((0, 1, 7, 5000)))}


def _from_first(rng: random.Random) -> Arguments:
    return {
        "x": random_tokens(rng, rng.choice((0, 1, 3)), rng.choice(WIDTHS)).to(rng.choice(DTYPES))
    }


def _best_of_ranks(rng: random.Random) -> Arguments:
    shape = rng.choice((0, 1, 3)), rng.choice(WIDTHS)
    return {"score": torch.randn(shape), "token": torch.randint(0, 9, shape)}


BUILDERS: dict[str, Builder] = {
    **MODEL_BUILDERS,
    **FUSED_BUILDERS,
    **RECURRENCE_BUILDERS,
    "tree_expand": _tree_expand,
    "accept_winners": _accept_winners,
    "commit_kv": _commit_kv,
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
