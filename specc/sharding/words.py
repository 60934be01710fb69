"""A cut in words: what tables and pictures of it say of a weight."""

from __future__ import annotations

import re

from specc.sharding.shard_plan import Cut, WeightCut

# of a layer, in the name of a weight; layers that are alike are one line
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def short_name(key: str) -> str:
    """`a.q_proj.weight+a.k_proj.weight` as `a.q_proj.weight + k_proj`."""
    first, *others = key.split("+")
    parts = first.split(".")
    names = []
    for other in others:
        own = [part for part in other.split(".") if part not in parts]
        names.append(".".join(own) or other)
    return " + ".join([first, *names])


def words_of(weight: WeightCut) -> str:
    """Which dimension is cut into what."""
    if weight.is_first_only:
        return "rank 0: all; others: zeros"
    found = [
        f"{_dimension(dim, weight)} {_cut_words(cut)}"
        for dim, cut in enumerate(weight.cuts)
        if any(interval.parts > 1 for interval in cut)
    ]
    return ", ".join(found) or "all"


def _dimension(dim: int, weight: WeightCut) -> str:
    last = len(weight.shape) - 1
    return "rows" if dim == 0 else "columns" if dim == last else f"dimension {dim}"


def _cut_words(cut: Cut) -> str:
    words = []
    for interval in cut:
        text = f"{interval.local_size} of {interval.stop - interval.start}"
        if interval.copies > 1:
            text += f" (each on {interval.copies} ranks)"
        words.append(text)
    return " | ".join(words)
