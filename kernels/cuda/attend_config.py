"""Launch parameters of `specc::attend`: tables keyed by shape and compute capability."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton

MAX_SPLITS = 128
# programs of a launch over those that run at a time, where there are more than a few
MAX_WAVES = 4
# what the choice of splits assumes where there is no GPU, and every program takes its time
INTERPRETER_SMS = 1


@dataclass(frozen=True)
class Config:
    """Launch parameters of the first kernel.

    Args:
        block_m: packed rows of a tile.
        block_n: keys of a step; at most 64, the bits that a step takes from ancestor words.
        num_warps: warps of a program.
        num_stages: key blocks in flight.
        programs_per_sm: resident programs that the number of splits aims at.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 2

    @property
    def min_blocks(self) -> int:
        """Fewest key blocks of a split: partial results are to cost less traffic than keys."""
        return max(1, 2 * self.block_m // self.block_n)


# (bytes of an element, padded head size, rows) → Config; rows are the largest of a tile
_TABLE = {
    (2, 64, 16): Config(16, 64, 4, 5),
    # chains: six nodes of four query heads
    (2, 64, 32): Config(32, 64, 4, 5),
    (2, 64, 64): Config(64, 64, 4, 5),
    (2, 64, 128): Config(128, 64, 8, 5, 1),
    (2, 128, 16): Config(16, 64, 4, 5),
    (2, 128, 32): Config(32, 32, 4, 5),
    (2, 128, 64): Config(64, 32, 4, 5),
    (2, 128, 128): Config(128, 64, 8, 5, 1),
    (2, 256, 16): Config(16, 32, 8, 5, 1),
    (2, 256, 64): Config(64, 32, 8, 5, 1),
    (4, 64, 16): Config(16, 16, 4, 5),
    # 4 warps would need all registers that a thread can have, and a few more here and there
    (4, 128, 16): Config(16, 16, 8, 5, 1),
    (4, 256, 16): Config(16, 16, 8, 5, 1),
}
# (capability, bytes, padded head size, rows) → Config, where the one above does not fit
_EXCEPTIONS = {
    # mma.sync keeps accumulators and both operands in registers, where wgmma and tcgen05 read
    # shared and write tensor memory: the tiles above spill
    **{(c, 2, 128, rows): Config(64, 32, 8, 5, 1) for c in (80, 120) for rows in (64, 128)},
    **{(c, 2, 256, 64): Config(32, 32, 8, 5, 1) for c in (80, 120)},
    # with 32 keys ptxas makes three programs fit the registers, and spills
    (100, 2, 128, 64): Config(64, 64, 4, 4),
    # 100 KiB of a multiprocessor hold two programs with two key blocks each, not with four; of
    # head size 64 ptxas makes three fit, as above
    **{(120, 2, size, 16): Config(16, 64, 4, 3) for size in (64, 128)},
    (120, 2, 128, 32): Config(32, 32, 4, 4),
}


def config(dtype: torch.dtype, head_dim: int, rows: int, capability: int) -> Config:
    """Launch parameters for tiles of up to `rows` packed rows.

    Args:
        dtype: of queries and cache.
        head_dim: the larger one of keys and values.
        rows: packed rows of an average sequence.
        capability: 10 · major + minor.
    """
    size = dtype.itemsize
    padded = max(64, triton.next_power_of_2(head_dim))
    heights = [height for bytes_, width, height in _TABLE if (bytes_, width) == (size, padded)]
    height = next((height for height in heights if height >= rows), heights[-1])
    key = (size, padded, height)
    return _EXCEPTIONS.get((_family(capability), *key), _TABLE[key])


def _family(capability: int) -> int:
    """The capability that was looked at, of those that share its limits."""
    return 120 if capability in (86, 89) or capability >= 120 else capability // 10 * 10


def choose_splits(num_programs: int, slots: int, max_splits: int, *, is_even: bool = False) -> int:
    """How many splits of the keys a launch has programs for; how many are used a device finds out.

    Programs that fill half of the machine or more are cut up to fill it up to `MAX_WAVES` times:
    rows of a batch that are padding, and short sequences, then leave room that the parts of others
    take, and the last wave is a small share. Fewer than that are cut up to fill it once: fewest
    splits within 15 % of the best fill.

    Args:
        num_programs: programs of one split, padding among them.
        slots: programs that run at a time.
        max_splits: splits that the longest sequence is worth.
        is_even: a chunk of a prompt: nothing is padding, and the longest programs start first.
    """
    max_splits = max(1, min(max_splits, MAX_SPLITS, slots))
    if num_programs >= 0.5 * slots and not is_even:
        return max(1, min(max_splits, MAX_WAVES * slots // num_programs))
    if num_programs >= 0.8 * slots:
        return 1

    def fill(splits: int) -> float:
        waves = num_programs * splits / slots
        return waves / math.ceil(waves)

    best = max(fill(splits) for splits in range(1, max_splits + 1))
    return next(splits for splits in range(1, max_splits + 1) if fill(splits) >= 0.85 * best)


@functools.cache
def machine(device: torch.device) -> tuple[int, int]:
    """Compute capability and number of multiprocessors."""
    if device.type != "cuda":
        return 90, INTERPRETER_SMS
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count
