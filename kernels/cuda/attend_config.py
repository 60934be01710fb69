"""Launch parameters of `specc::attend`: tables keyed by shape and compute capability."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
import triton

MAX_SPLITS = 128
# programs of a launch over those that run at a time: for one sequence, for few tiles, for more
WAVES_ONE, WAVES_FEW, MAX_WAVES = 1, 2, 4
# rows of caches whose programs take so little that one that finds no work costs more than a share
# that is too long
SHORT_ROWS = 2048
# registers of a thread that parts which are loaded at a time take
_PART_REGISTERS = 64
# registers that a thread can have
MOST_REGISTERS = 255
# what the choice of splits assumes where there is no GPU, and every program takes its time
INTERPRETER_SMS = 1


@dataclass(frozen=True)
class AttendConfig:
    """Launch parameters of the first kernel.

    Args:
        block_m: packed rows of a tile.
        block_n: keys of a step; at most 64, the bits that a step takes from ancestor words.
        num_warps: warps of a program.
        num_stages: key blocks in flight.
        programs_per_sm: resident programs that the number of splits aims at.
        max_registers: registers that a thread may have. None leaves it to ptxas, which makes one
            more program fit a multiprocessor even if it then has to spill.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 2
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Options of a launch, as Triton calls them."""
        given = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return given if self.max_registers is None else given | {"maxnreg": self.max_registers}

    @property
    def min_blocks(self) -> int:
        """Fewest key blocks of a split: partial results are to cost less traffic than keys."""
        return max(1, 2 * self.block_m // self.block_n)

    def merged(self, columns: int) -> int:
        """Parts of a tile with so many columns that are loaded at a time."""
        return max(1, _PART_REGISTERS * 32 * self.num_warps // (self.block_m * columns))


@dataclass(frozen=True)
class Work:
    """How the keys of a batch are handed out; numbers of programs are those of one KV head.

    Args:
        num_programs: of the launch.
        num_parts: programs of tiles that are split, at most; 0 is none.
        num_splits: of every tile; 0: chosen on the device, by lengths.
        slots: programs that run at a time.
        waves: programs of live sequences over slots, at most.
    """

    num_programs: int
    num_parts: int
    num_splits: int
    slots: int
    waves: int


# (bytes of an element, padded head size, rows) → AttendConfig; rows are the largest of a tile
_TABLE = {
    (2, 64, 16): AttendConfig(16, 64, 4, 5),
    (2, 64, 32): AttendConfig(32, 64, 4, 5),
    (2, 64, 64): AttendConfig(64, 64, 4, 5),
    (2, 64, 128): AttendConfig(128, 64, 8, 5, 1),
    (2, 128, 16): AttendConfig(16, 64, 4, 5),
    # chains, in batches: five stages for long contexts. With two, the fastest of twelve on an H200
    # over 1024 keys, 32k take twice what they take one node; four warps are faster, and spill
    (2, 128, 32): AttendConfig(32, 64, 8, 5, 1),
    (2, 128, 64): AttendConfig(64, 32, 4, 5),
    (2, 128, 128): AttendConfig(128, 64, 8, 5, 1),
    (2, 256, 16): AttendConfig(16, 32, 8, 5, 1),
    (2, 256, 64): AttendConfig(64, 32, 8, 5, 1),
    (4, 64, 16): AttendConfig(16, 16, 4, 5),
    # 4 warps would need all registers that a thread can have, and a few more here and there
    (4, 128, 16): AttendConfig(16, 16, 8, 5, 1),
    (4, 256, 16): AttendConfig(16, 16, 8, 5, 1),
}
# (capability, bytes, padded head size, rows) → AttendConfig, where the one above does not fit
_EXCEPTIONS = {
    # mma.sync keeps accumulators and both operands in registers, where wgmma and tcgen05 read
    # shared and write tensor memory: the tiles above spill
    **{(c, 2, 128, rows): AttendConfig(64, 32, 8, 5, 1) for c in (80, 120) for rows in (64, 128)},
    **{(c, 2, 256, 64): AttendConfig(32, 32, 8, 5, 1) for c in (80, 120)},
    # with five stages ptxas makes three programs fit the registers, and spills
    (90, 2, 64, 32): AttendConfig(32, 64, 4, 4),
    # in four warps, Triton 3.6 spills with any number of stages
    (90, 4, 64, 16): AttendConfig(16, 16, 8, 5, 1),
    (90, 4, 128, 16): AttendConfig(16, 16, 8, 4, 1),
    # with 32 keys, too, and with fewer stages it lacks a few registers
    (100, 2, 128, 64): AttendConfig(64, 64, 4, 5),
    # left to itself, ptxas gives a thread so few registers that one program more fits, and spills
    **{(c, 4, 128, 16): AttendConfig(16, 16, 8, 5, 1, 255) for c in (100, 120)},
    (100, 2, 64, 16): AttendConfig(16, 64, 4, 5, 2, 255),
    # accumulators of 64 keys do not fit
    (120, 2, 64, 64): AttendConfig(64, 32, 4, 5),
    (120, 2, 64, 128): AttendConfig(128, 32, 8, 5, 1),
    # 100 KiB of a multiprocessor hold two programs with two key blocks each, not with four; ptxas
    # makes three fit, as above
    (120, 2, 64, 16): AttendConfig(16, 64, 4, 3),
    (120, 2, 128, 16): AttendConfig(16, 64, 4, 3, 2, 255),
    (120, 2, 128, 32): AttendConfig(32, 32, 4, 4),
}
# likewise over quantized caches: what they stand for takes registers beside them, so steps are
# shorter and tiles lower. Left to itself, ptxas makes one more program fit, and spills
_QUANTIZED_TABLE = {
    (2, 64, 16): AttendConfig(16, 32, 4, 5, 2, MOST_REGISTERS),
    (2, 64, 32): AttendConfig(32, 32, 4, 5, 2, MOST_REGISTERS),
    (2, 128, 16): AttendConfig(16, 32, 4, 5, 2, MOST_REGISTERS),
    (2, 128, 32): AttendConfig(32, 32, 8, 5, 1, MOST_REGISTERS),
    (2, 256, 16): AttendConfig(16, 32, 8, 5, 1, MOST_REGISTERS),
    (4, 64, 16): AttendConfig(16, 16, 8, 5, 1, MOST_REGISTERS),
    (4, 128, 16): AttendConfig(16, 16, 8, 5, 1, MOST_REGISTERS),
    (4, 256, 16): AttendConfig(16, 16, 8, 5, 1, MOST_REGISTERS),
}


def config(
    dtype: torch.dtype, head_dim: int, rows: int, capability: int, is_quantized: bool = False
) -> AttendConfig:
    """Launch parameters for tiles of up to `rows` packed rows.

    Args:
        dtype: of queries.
        head_dim: the larger one of keys and values.
        rows: packed rows of an average sequence.
        capability: 10 · major + minor.
        is_quantized: caches are quantized.
    """
    size = dtype.itemsize
    padded = max(64, triton.next_power_of_2(head_dim))
    table = _QUANTIZED_TABLE if is_quantized else _TABLE
    heights = [height for bytes_, width, height in table if (bytes_, width) == (size, padded)]
    height = next((height for height in heights if height >= rows), heights[-1])
    key = (size, padded, height)
    if is_quantized:
        return table[key]
    return _EXCEPTIONS.get((family(capability), *key), table[key])


def for_chunks(c: AttendConfig) -> AttendConfig:
    """Launch parameters of calls with chunks in place of others.

    Left to itself, ptxas makes one program more of some of them fit a multiprocessor, and spills:
    of tiles of 16 rows of a tree on sm_90, 16 bytes.
    """
    return replace(c, max_registers=MOST_REGISTERS)


def family(capability: int) -> int:
    """The capability that was looked at, of those that share its limits."""
    return 120 if capability in (86, 89) or capability >= 120 else capability // 10 * 10


def plan_work(
    num_tiles: int,
    most_tiles: int,
    num_kv_heads: int,
    num_seqs: int,
    slots: int,
    max_splits: int,
    *,
    num_splits: int | None = None,
    is_prompt: bool = False,
    is_short: bool = False,
) -> Work:
    """Programs of a launch from shapes, which is all that the host knows.

    Sequences of which none is padding and all have their share of tokens have `num_tiles` tiles.
    There are up to four waves of programs where these fill half of the machine: short sequences
    and padding leave what the splits of others take. Fewer tiles have less to gain, and programs
    that find no work cost something, too; those of one sequence are all alike.

    Where caches are short there is one wave. A program without work has to read all lengths to
    know, which took 3.5 µs a wave on an H200: of 16 sequences of 6 tokens over 1k, 448 programs of
    576, and of the 53.1 µs with the same shares as in the 40.6 of one split that the host chose. 22
    tokens: 53.5 and 40.9; one token, two splits: 33.4 and 28.7.

    Args:
        num_tiles: of evenly spread tokens.
        most_tiles: of tokens spread in any way.
        num_kv_heads: of the cache.
        num_seqs: padding among them.
        slots: programs that run at a time.
        max_splits: splits that the longest sequence is worth.
        num_splits: of every tile; None chooses.
        is_prompt: a chunk of a prompt: nothing is padding, and the longest programs start first.
        is_short: caches have SHORT_ROWS rows at most.
    """
    if num_splits is None and (is_prompt or max_splits <= 1):
        num_splits = even_splits(num_tiles * num_kv_heads, slots, max_splits)
    if num_splits is not None:
        count = most_tiles * num_splits
        return Work(count, count if num_splits > 1 else 0, num_splits, 0, 0)
    waves = WAVES_FEW if num_tiles * num_kv_heads <= 0.5 * slots else MAX_WAVES
    waves = WAVES_ONE if num_seqs == 1 or is_short else waves
    of_head = max(1, slots // num_kv_heads)
    # half of a batch of captured steps may be padding: each tile of it has a program, too
    beside = num_tiles // 2
    count = max(waves * of_head + beside, most_tiles + (beside if is_short else of_head))
    # either all programs of live tiles are within the waves, or besides one for each tile that is
    # split there is one for each share
    beyond = of_head + 1 + min(most_tiles, of_head + 1)
    return Work(count, min(count, max(waves * of_head, beyond)), 0, of_head, waves)


def even_splits(num_programs: int, slots: int, max_splits: int) -> int:
    """Splits of programs that are all alike: the fewest within 15 % of the best fill.

    Args:
        num_programs: programs of one split.
        slots: programs that run at a time.
        max_splits: splits that the longest sequence is worth.
    """
    max_splits = max(1, min(max_splits, MAX_SPLITS, slots))
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
