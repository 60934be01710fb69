"""`specc::block_mass` in Triton: the cases of its oracle, and what it refuses."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.kernels.cuda.block_mass import block_mass
from tests.kernels.attention_loops import (
    BUSHY,
    CHAIN,
    DEAD,
    STAR,
    causal_tokens,
    random_parents,
    tree_tokens,
)
from tests.kernels.test_block_mass import Pass

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.cuda.interpreted_calls import patch_calls

    patch_calls()

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def on(device: torch.device) -> Callable[..., None]:
    """The operator for tensors of the host: they go to a device, and what it changed comes back."""

    def call(*arguments: Tensor | None, scale: float) -> None:
        *others, mass = (None if x is None else x.to(device) for x in arguments)
        assert mass is not None
        assert block_mass(*others, mass, scale=scale) is None
        last = arguments[-1]
        assert last is not None
        last.copy_(mass)

    return call


def trees(*parents: list[int], lengths: tuple[int, ...]) -> list[list[Any]]:
    return [tree_tokens(p, n) for p, n in zip(parents, lengths, strict=True)]


CASES: dict[str, Callable[[], Pass]] = {
    "trees": lambda: Pass([0, 5, 17, 16], trees(BUSHY, [-1], CHAIN, STAR, lengths=(0, 5, 17, 16))),
    "pages-of-16": lambda: Pass([0, 5], trees(BUSHY, STAR, lengths=(0, 5)), block_size=16),
    "dense": lambda: Pass([7, 5], trees(BUSHY, STAR, lengths=(7, 5)), block_size=0),
    "heads": lambda: Pass([70], trees(BUSHY, lengths=(70,)), capacity=90, heads=6, kv_heads=2),
    "prompts": lambda: Pass(
        [0, 8, 15], [causal_tokens(0, 40), causal_tokens(8, 17), causal_tokens(15, 16)], causal=True
    ),
    "words": lambda: Pass(
        [11], trees(random_parents(130), lengths=(11,)), capacity=160, block_size=16
    ),
    "dead": lambda: Pass([6], [[DEAD] * 5 + tree_tokens(BUSHY, 6) + [DEAD] * 40]),
    "dead-between": lambda: Pass(
        [6], [[t for token in tree_tokens(random_parents(36), 6) for t in (token, DEAD)]]
    ),
    "bf16": lambda: Pass([30], trees(BUSHY, lengths=(30,)), dtype=torch.bfloat16, dim=20),
    "large": lambda: Pass([30], trees(BUSHY, lengths=(30,)), dim=16),
}


@pytest.mark.default("trees", "pages-of-16", "dense", "words", "dead", "dead-between", "bf16")
@pytest.mark.parametrize("name", CASES)
def test_block_mass(name: str, device: torch.device) -> None:
    made = CASES[name]()
    if name == "large":
        made.scale = 300.0
    everyone = list(range(len(made.tokens)))
    made.check(on(device), everyone, before=0.5)
    made.check(on(device), everyone[1:])


@pytest.mark.parametrize("name", ["trees", "heads", "prompts", "bf16"])
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8])
def test_codes(name: str, stored: torch.dtype, device: torch.device) -> None:
    made = CASES[name]()
    made.quantize_caches(stored)
    made.check(on(device), list(range(len(made.tokens))))


def test_nobody(device: torch.device) -> None:
    made = Pass([6], trees(CHAIN, lengths=(6,)))
    made.call(on(device), torch.zeros(4, 0))


BROKEN: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "dtype": ("q", lambda x: x.double(), "float64"),
    "cache-dtype": ("k_cache", lambda x: x.half(), "float16"),
    "mass-dtype": ("mass", lambda x: x.double(), "mass torch.float64"),
    "head-size": ("q", lambda x: x[..., :3], "head sizes 3 and 4"),
    "heads": ("q", lambda x: x[:3], "3 heads and 2 KV heads"),
    "columns": ("mass", lambda x: x[:, :4], "4 columns"),
    "rows": ("mass", lambda x: x[:0], "0 rows"),
    "strides": ("q", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "of q;"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_refuses(broken: str, device: torch.device) -> None:
    made = Pass([6], trees(CHAIN, lengths=(6,)))
    names = ("q", "k_cache", "q_start", "position", "slot", "cache_len", "ancestors", "block_table")
    given = dict(zip(names, (made.q, made.world.caches[0], *made.inputs), strict=True))
    given["mass"] = torch.zeros(1, 16)
    name, change, found = BROKEN[broken]
    given[name] = change(given[name])
    call = functools.partial(block_mass, *(x.to(device) for x in given.values()))
    with pytest.raises(ValueError, match=f"block_mass: found.*{found}.*needed"):
        call(scale=1.0)
