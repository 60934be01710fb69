"""Cases of `attend` in which every two values of different properties meet (pairwise covering).

Hand-made cases look at what is known to be difficult; these at what nobody thought of.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from tests.kernels.cuda.cases_attend import BF16, F16, Case

FACTORS: Mapping[str, Sequence[Any]] = {
    "dtype": (Case.dtype, F16, BF16),
    "size": (64, 80, 96, 128, 256),
    "heads": ((2, 2), (4, 1), (6, 2)),
    "block_size": (0, 7, 16, 64),
    # causal, a tree, a draft level after three nodes that are in the cache
    "kind": ("causal", "tree", "level"),
    "seqs": (((5, 37),), ((3, 70), (0, 12), (6, 0)), ((1, 63), (2, 64), (1, 65))),
    "window": ((0, 0), (20, 0), (20, 5), (1, 0)),
    "dead": ((), (1, 3)),
    "splits": (1, 2, 3),
}
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    return set(itertools.combinations(row.items(), 2))


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> set[Pair]:
    names = itertools.combinations(factors, 2)
    return {
        ((a, x), (b, y)) for a, b in names for x, y in itertools.product(factors[a], factors[b])
    }


def covering(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Rows, one value of each factor, that hold all pairs of values; greedy, always the same."""
    missing, rows = all_pairs(factors), []
    chance = random.Random(seed)
    while missing:
        best: dict[str, Any] = {}
        for _ in range(200):
            # a pair that is missing, the other values at random
            row = {name: chance.choice(values) for name, values in factors.items()}
            row |= dict(chance.choice(sorted(missing, key=repr)))
            if len(pairs_of(row) & missing) > len(pairs_of(best) & missing):
                best = row
        missing -= pairs_of(best)
        rows.append(best)
    return rows


def case_of(row: Mapping[str, Any]) -> Case:
    window, sink = row["window"]
    return Case(
        row["seqs"],
        is_tree=row["kind"] != "causal",
        dtype=row["dtype"],
        heads=row["heads"],
        sizes=(row["size"], row["size"]),
        block_size=row["block_size"],
        first_node=3 if row["kind"] == "level" else 0,
        window=window,
        sink=sink,
        dead=row["dead"],
        splits=row["splits"],
    )


ROWS = covering(FACTORS)
COVERING_CASES = {f"pairs-{i}": case_of(row) for i, row in enumerate(ROWS)}
