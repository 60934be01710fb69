"""Ranges of shapes that a TensorRT engine is built for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specc.errors import TensorRTError

Range = tuple[int, int, int]


@dataclass(frozen=True)
class ShapeProfile:
    """One optimization profile: (smallest, tuned for, largest) of every dynamic size.

    Args:
        name: what it is for: `prefill`, `decode`, `draft level 2`, `tree 3,2,1`.
        nodes: tokens of each sequence in one pass.
        rows: nodes of all sequences that get logits.
    """

    name: str
    batch: Range
    nodes: Range
    rows: Range


def merge_profiles(
    profiles: Sequence[ShapeProfile], cache_rows: int
) -> list[tuple[ShapeProfile, tuple[str, ...]]]:
    """Check profiles and drop repeated ranges.

    Args:
        profiles: in the order of the engine's.
        cache_rows: rows of a cache: a pass writes one for each node.
    Returns:
        the first of each, in order, with the names of all that equal it.
    Raises:
        TensorRTError: none is given, or one has sizes that no pass can have.
    """
    if not profiles:
        raise TensorRTError("no profile", "one for each shape that the engine runs with", "add one")
    merged: dict[tuple[Range, ...], tuple[ShapeProfile, tuple[str, ...]]] = {}
    for profile in profiles:
        _check(profile, cache_rows)
        key = (profile.batch, profile.nodes, profile.rows)
        first, names = merged.get(key, (profile, ()))
        merged[key] = (first, (*names, profile.name))
    return list(merged.values())


def loosen_batch(profile: ShapeProfile) -> ShapeProfile:
    """Let a fixed batch grow by one where nodes vary: TensorRT-RTX 1.7 fails on a fixed one."""
    low, tuned, high = profile.batch
    if low == high and profile.nodes[0] != profile.nodes[2]:
        return dataclasses.replace(profile, batch=(low, tuned, high + 1))
    return profile


def profile_shapes(
    profile: ShapeProfile, dims: Mapping[str, tuple[int | str, ...]]
) -> dict[str, tuple[list[int], list[int], list[int]]]:
    """Shapes of every input that has a dynamic dimension: (smallest, tuned for, largest).

    Args:
        dims: input → dimensions; a name is `batch`, `nodes` or `rows`.
    Raises:
        TensorRTError: a dimension has another name.
    """
    ranges = {"batch": profile.batch, "nodes": profile.nodes, "rows": profile.rows}
    shapes = {}
    for name, sizes in dims.items():
        for size in sizes:
            if isinstance(size, str) and size not in ranges:
                raise TensorRTError(
                    f"input {name} with a dimension {size or 'without a name'}",
                    f"fixed sizes, or one of {', '.join(ranges)}",
                    "compile the model again with specc",
                )
        if any(isinstance(size, str) for size in sizes):
            smallest, tuned, largest = (
                [ranges[size][i] if isinstance(size, str) else size for size in sizes]
                for i in range(3)
            )
            shapes[name] = (smallest, tuned, largest)
    return shapes


def _check(profile: ShapeProfile, cache_rows: int) -> None:
    for name in ("batch", "nodes", "rows"):
        low, tuned, high = getattr(profile, name)
        if not 1 <= low <= tuned <= high:
            raise TensorRTError(
                f"profile {profile.name} with {name} {low}, {tuned}, {high}",
                "1 <= smallest <= tuned for <= largest",
                "correct the profile",
            )
    for i, which in enumerate(("smallest", "tuned for", "largest")):
        if profile.rows[i] > profile.batch[i] * profile.nodes[i]:
            raise TensorRTError(
                f"profile {profile.name} with {profile.rows[i]} rows ({which}) of "
                f"{profile.batch[i]} × {profile.nodes[i]} nodes",
                "no more rows of logits than nodes",
                "correct the profile",
            )
    if profile.nodes[2] > cache_rows:
        raise TensorRTError(
            f"profile {profile.name} with {profile.nodes[2]} nodes, caches of {cache_rows} rows",
            "a row for every node: TensorRT drops writes past the end without a word",
            "lower the prefill chunk or the tree, or compile with a larger --max-seq-len",
        )
