"""Calls of operators of layers that keep states, of random shapes, trees and values."""

from __future__ import annotations

import itertools
import random

import torch

from tests.kernels.cpu.call_parts import WIDTHS, Arguments, Builder, i32

_DTYPES = (torch.float32, torch.bfloat16)


def _sequences(rng: random.Random) -> tuple[Arguments, int, int, int]:
    """Tokens and places of a pass; how many tokens, states and replay rows there are."""
    batch = rng.choice((0, 1, 1, 2, 3))
    num_states, most = batch + rng.choice((0, 1, 3)), rng.choice((1, 4, 20, 70))
    places = rng.sample(range(num_states), batch)
    slot, states, counts, lengths = [], [], [], []
    for place in places:
        count, length = rng.randint(0, most), rng.choice((-1, 0, 1, 5, 130))
        certain = rng.choice((0, 1, 1, count))
        slot += [length + j if length >= 0 else -1 for j in range(count)]
        counts.append(count)
        lengths.append(length)
        states.append([place, certain])
    slot += [-1] * rng.choice((0, 0, 2))
    words = rng.choice((None, 0, 1, 2))
    made = {
        "q_start": i32([0, *itertools.accumulate(counts)]),
        "slot": i32(slot),
        "cache_len": i32(lengths),
        "ancestors": (
            None if words is None else torch.randint(-(2**63), 2**63 - 1, (len(slot), words))
        ),
        "states": i32(states).reshape(batch, 2),
    }
    return made, len(slot), num_states, most


def _tree_conv(rng: random.Random) -> Arguments:
    made, tokens, num_states, most = _sequences(rng)
    dtype, channels, width = rng.choice(_DTYPES), rng.choice((0, *WIDTHS)), rng.choice((1, 2, 3, 4))
    return {
        "x": torch.randn(tokens, channels).to(dtype),
        "weight": torch.randn(channels, width).to(dtype),
        "bias": rng.choice((None, torch.randn(channels).to(dtype))),
        "state": torch.randn(num_states, width - 1, channels).to(dtype),
        "rows": torch.randn(num_states, most, channels).to(dtype),
        **made,
        "activation": rng.choice(("", "silu")),
    }


def _tree_recurrence(rng: random.Random) -> Arguments:
    made, tokens, num_states, most = _sequences(rng)
    dtype, key_heads = rng.choice(_DTYPES), rng.choice((1, 2, 3))
    heads, key_dim, value_dim = (
        key_heads * rng.choice((1, 2)),
        rng.choice((1, 2, 7, 16)),
        rng.choice((1, 3, 16, 33)),
    )
    decays = rng.choice(((), (key_dim,)))
    has_beta = rng.random() < 0.5
    columns = key_heads * key_dim + heads * (value_dim + (key_dim if decays else 1) + has_beta)
    return {
        "q": torch.randn(tokens, key_heads, key_dim).to(dtype),
        "k": torch.randn(tokens, key_heads, key_dim).to(dtype),
        "v": torch.randn(tokens, heads, value_dim).to(dtype),
        "g": -torch.rand(tokens, heads, *decays),
        "beta": torch.rand(tokens, heads).to(dtype) if has_beta else None,
        "state": torch.randn(num_states, heads, key_dim, value_dim),
        "rows": torch.randn(num_states, most, columns),
        **made,
    }


def _folds(rng: random.Random) -> tuple[Arguments, int, int, int]:
    """Paths and places of a step; how many layers, states and replay rows there are."""
    batch = rng.choice((0, 1, 1, 2, 3))
    num_states, most = batch + rng.choice((0, 1, 3)), rng.choice((1, 4, 20))
    width = rng.choice((0, 1, 5))
    source, lengths = [], []
    for _ in range(batch):
        length = rng.choice((-1, 0, 1, 5, 130))
        nodes = sorted(rng.sample(range(most), rng.randint(0, min(most, width))))
        path = [length + node for node in nodes if length >= 0]
        source.append(path + [-1] * (width - len(path)))
        lengths.append(length)
    places = rng.sample(range(num_states), batch)
    made = {
        "source": i32(source).reshape(batch, width),
        "cache_len": i32(lengths),
        "states": i32([[place, rng.choice((0, 1, 1, 2))] for place in places]).reshape(batch, 2),
    }
    return made, rng.choice((0, 1, 3)), num_states, most


def _fold_conv(rng: random.Random) -> Arguments:
    made, layers, num_states, most = _folds(rng)
    dtype, channels = rng.choice(_DTYPES), rng.choice((0, *WIDTHS))
    return {
        "state": torch.randn(layers, num_states, rng.choice((0, 1, 3)), channels).to(dtype),
        "rows": torch.randn(layers, num_states, most, channels).to(dtype),
        **made,
    }


def _fold_recurrence(rng: random.Random) -> Arguments:
    made, layers, num_states, most = _folds(rng)
    of_pass = _tree_recurrence(rng)
    state, columns = of_pass["state"].shape[1:], of_pass["rows"].shape[2]
    return {
        "state": torch.randn(layers, num_states, *state),
        "rows": torch.rand(layers, num_states, most, columns) - 1,
        **made,
        "key_heads": of_pass["k"].shape[1],
        "has_beta": of_pass["beta"] is not None,
    }


RECURRENCE_BUILDERS: dict[str, Builder] = {
    "tree_conv": _tree_conv,
    "tree_recurrence": _tree_recurrence,
    "fold_conv": _fold_conv,
    "fold_recurrence": _fold_recurrence,
}
