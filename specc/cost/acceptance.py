"""How likely each child of a node is the accepted one, by depth and sibling rank.

`acceptance[d][r]` is the probability that, at an accepted node of depth d, its child of rank r is
accepted: the draft's first choice has rank 0. At most one child is, so a row sums to 1 at most.
The last row stands for every greater depth, so one row alone means the same at all depths. Ranks
that a row does not list were not measured and count as never accepted.

Source: Sequoia, arXiv:2402.12374 §3, there with one row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from specc.errors import ConfigError
from specc.speculation.tree import TokenTree

Rows = tuple[tuple[float, ...], ...]
_EXAMPLE = "for example [[0.7, 0.1, 0.05], [0.6, 0.1]]: depth 0, then all greater depths"


def parse_acceptance(text: str, option: str) -> list[list[float]]:
    """Read `0.73,0.1/0.75,0.1`: ranks with commas between them, depths with slashes.

    Args:
        text: as users write it.
        option: of the command line, for errors.
    Raises:
        ConfigError: no numbers, or no table of probabilities.
    """
    do = f"for example {option} 0.73,0.1/0.75,0.1/0.8: depth 1, 2 and 3, by sibling rank"
    needed = "numbers: probabilities by sibling rank, and after a slash those of the next depth"
    try:
        rows = [[float(value) for value in row.split(",")] for row in text.split("/")]
    except ValueError:
        raise ConfigError(f"{option} {text}", needed, do) from None
    try:
        check_acceptance(rows)
    except ConfigError as error:
        raise ConfigError(f"{option} {text}: {error.found}", error.needed, do) from None
    return rows


def parse_ranks(text: str, option: str) -> list[float]:
    """Read `0.7,0.1`: acceptance by sibling rank, the same at every depth.

    Args:
        text: as users write it.
        option: of the command line, for errors.
    Raises:
        ConfigError: no numbers, no probabilities, or several depths.
    """
    first, *deeper = parse_acceptance(text, option)
    if deeper:
        raise ConfigError(
            f"{option} {text}: {1 + len(deeper)} depths",
            "one row, which holds at every depth",
            f"for example {option} 0.7,0.1,0.05",
        )
    return first


def check_acceptance(acceptance: Sequence[Sequence[float]]) -> Rows:
    """Validate a table, and leave out the ranks that end a row and are never accepted.

    Raises:
        ConfigError: no row, a number outside 0 … 1, or a row with a sum above 1.
    """
    if not acceptance:
        raise ConfigError("acceptance without rows", "one row or more", _EXAMPLE)
    rows = []
    for depth, given in enumerate(acceptance):
        row = [float(value) for value in given]
        # written so that NaN fails
        if not all(0 <= value <= 1 for value in row):
            raise ConfigError(
                f"acceptance at depth {depth}: {_listed(row)}",
                "probabilities, each in 0 … 1",
                _EXAMPLE,
            )
        if sum(row) > 1 + 1e-6:
            raise ConfigError(
                f"acceptance at depth {depth}: {_listed(row)}, {sum(row):g} in sum",
                "at most 1 in sum: one of the siblings is accepted, or none",
                _EXAMPLE,
            )
        while row and row[-1] == 0:
            row.pop()
        rows.append(tuple(row))
    return tuple(rows)


def row_at(rows: Rows, depth: int) -> tuple[float, ...]:
    """Acceptance by rank of the children of a node of this depth."""
    return rows[min(depth, len(rows) - 1)]


def is_falling(rows: Rows) -> bool:
    """Whether no sibling is likelier than the one before it, at any depth."""
    return all(a >= b for row in rows for a, b in itertools.pairwise(row))


def node_acceptance(tree: TokenTree, acceptance: Sequence[Sequence[float]]) -> list[float]:
    """Probability of each node that it is accepted where its parent is; the root's is 1.

    Args:
        tree: the i-th child of a node, in node order, has rank i.
        acceptance: as in this module's docstring.
    Raises:
        ConfigError: see `check_acceptance`.
    """
    rows = check_acceptance(acceptance)
    num_children = [0] * tree.num_nodes
    shares = [1.0]
    for node, parent in enumerate(tree.parents[1:], start=1):
        row, rank = row_at(rows, tree.depths[node] - 1), num_children[parent]
        num_children[parent] += 1
        shares.append(row[rank] if rank < len(row) else 0.0)
    return shares


def path_probabilities(tree: TokenTree, acceptance: Sequence[Sequence[float]]) -> list[float]:
    """Probability of each node that it is accepted; the root's is 1.

    Args:
        tree: see `node_acceptance`.
        acceptance: likewise.
    Raises:
        ConfigError: see `check_acceptance`.
    """
    paths = [1.0]
    shares = node_acceptance(tree, acceptance)
    for parent, share in zip(tree.parents[1:], shares[1:], strict=True):
        paths.append(paths[parent] * share)
    return paths


def expected_tokens(tree: TokenTree, acceptance: Sequence[Sequence[float]]) -> float:
    """Tokens that a step with this tree emits on average, bonus token included.

    The root's 1 is that of the bonus token. Source: Sequoia §3.1.

    Raises:
        ConfigError: see `check_acceptance`.
    """
    return sum(path_probabilities(tree, acceptance))


def _listed(row: Sequence[float]) -> str:
    text = ", ".join(f"{value:g}" for value in row[:8])
    return text if len(row) <= 8 else f"{text}, … ({len(row)} ranks)"
