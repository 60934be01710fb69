"""What calls of native operators are made of: blocks of sequences, trees, numbers of any type."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]
Builder = Callable[[random.Random], Arguments]

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
    torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
# a head has no more, so that a word's end, a tile's and a register's are met
WIDTHS = (1, 2, 3, 7, 8, 15, 16, 17, 32, 33, 64, 65)


def i32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_floats(rng: random.Random, *shape: int) -> Tensor:
    return torch.randn(shape).to(rng.choice((torch.float32, torch.bfloat16)))


def random_parents(rng: random.Random, batch: int, nodes: int) -> Tensor:
    return i32([[-1, *(rng.randrange(i) for i in range(1, nodes))] for _ in range(batch)])


def random_tokens(rng: random.Random, batch: int, nodes: int, vocab: int = 5) -> Tensor:
    return torch.randint(0, vocab, (batch, nodes))


class Paged:
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
        self.table = i32(order[: self.batch * columns]).reshape(self.batch, columns)
        self.cache_len = i32(self.lengths)

    def history(self) -> Tensor:
        return torch.randint(0, 5, (self.num_blocks, self.block_size), dtype=torch.int32)
