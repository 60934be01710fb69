"""Which program of `attend` takes what, and how long a machine is busy with it, by counting.

    PYTHONPATH=. python -P -m tests.kernels.cuda.attend_shares

The device's arithmetic once more, in Python, for decoding: it has no windows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from specc.kernels.cuda.attend_config import SHORT_ROWS, AttendConfig, Work, plan_work
from specc.kernels.cuda.attend_merge import GROUP
from specc.kernels.cuda.attend_work import MERGE_ROWS, START_BLOCKS

NUM_SMS = 132


@dataclass(frozen=True)
class Share:
    """Work of a program.

    Args:
        sequence, tile, split: whose it is.
        splits: of the tile.
        part: number of the tile's first split among those of tiles that are split.
        blocks: key blocks, more or less; 0 of padding.
    """

    sequence: int
    tile: int
    split: int
    splits: int
    part: int
    blocks: int


def work_of(
    lengths: Sequence[int], tokens: int, heads: tuple[int, int], capacity: int, c: AttendConfig
) -> Work:
    """What the host gives a launch for sequences of as many tokens each."""
    group = heads[0] // heads[1]
    num_tiles = len(lengths) * -(-tokens * group // c.block_m)
    return plan_work(
        num_tiles, num_tiles,
        heads[1], len(lengths), c.programs_per_sm * NUM_SMS,
        -(-capacity // c.block_n) // c.min_blocks,
        is_short=capacity <= SHORT_ROWS,
    )  # fmt: skip


def shares(
    lengths: Sequence[int],
    tokens: Sequence[int],
    group: int,
    capacity: int,
    c: AttendConfig,
    work: Work,
) -> list[Share]:
    """Of the programs of one KV head, in their order; those that have none are left out.

    Args:
        lengths: committed rows; negative: padding.
        group: query heads of a KV head.
        capacity: rows of a sequence's cache.
        work: what the host gives the launch.
    """
    tiles = [-(-count * group // c.block_m) for count in tokens]
    blocks = [
        -(-min(length + count, capacity) // c.block_n) if length >= 0 and count else 0
        for length, count in zip(lengths, tokens, strict=True)
    ]
    total = sum(t * n for t, n in zip(tiles, blocks, strict=True))
    num_live = sum(t for t, n in zip(tiles, blocks, strict=True) if n)
    most = max(1, *blocks)
    share, least = most, None
    for wave in range(0 if work.num_splits else work.waves + 1):
        room = min(
            wave * work.slots - num_live if wave else work.slots, work.num_programs - sum(tiles)
        )
        if room < 0:
            continue
        tried = min(max(-(-total // (room + 1)), c.min_blocks), most)
        cut = [max(1, -(-n // tried)) for n in blocks]
        longest = max(-(-n // k) for n, k in zip(blocks, cut, strict=True)) + START_BLOCKS.value
        count = sum(t * k for t, n, k in zip(tiles, blocks, cut, strict=True) if n)
        in_waves = -(-count // work.slots) * longest
        packed = -(-(total + count * START_BLOCKS.value) // work.slots) + longest
        cost = min(in_waves, packed)
        if least is None or (cost, -tried) < least:
            share, least = tried, (cost, -tried)
    if len(lengths) == 1 and not work.num_splits:
        share = share_of_one(blocks[0], tiles[0], c, work)
    found: list[Share] = []
    num_parts = 0
    for b, (count, num_blocks) in enumerate(zip(tiles, blocks, strict=True)):
        splits = max(1, -(-num_blocks // share))
        if work.num_splits:
            splits = max(1, min(num_blocks // c.min_blocks, work.num_splits))
        for i in range(count):
            for j in range(splits):
                own = -(-num_blocks * (j + 1) // splits) + (-num_blocks * j // splits)
                found.append(Share(b, i, j, splits, num_parts, own))
            num_parts += splits if splits > 1 else 0
    return found


def share_of_one(blocks: int, tiles: int, c: AttendConfig, work: Work) -> int:
    """Key blocks of a program of a single sequence: splits at no, one or two levels of merging."""
    most = max(1, min(work.slots // max(tiles, 1), -(-blocks // c.min_blocks)))
    level = max(1, MERGE_ROWS.value // c.block_m)
    costs = []
    for number, splits in enumerate((1, min(most, GROUP.value), most)):
        share = -(-blocks // splits)
        costs.append((share + number * level, number, share))
    return max(1, min(costs)[2])


def utilization(blocks: Sequence[int], slots: int) -> float:
    """Of a machine whose programs start in order as others end, and are as long as their blocks."""
    ends = [0] * slots
    for count in blocks:
        heapq.heapreplace(ends, ends[0] + count)
    return sum(blocks) / (slots * max(ends))


def utilization_of(
    lengths: Sequence[int], capacity: int, tokens: int = 1, heads: tuple[int, int] = (32, 8)
) -> float:
    """Of an H200 with tiles of 16 rows, head size 128, bfloat16."""
    c = AttendConfig(16, 64, 4, 5)
    work = work_of(lengths, tokens, heads, capacity, c)
    of_head = shares(lengths, [tokens] * len(lengths), heads[0] // heads[1], capacity, c, work)
    return utilization(
        [x.blocks for x in of_head for _ in range(heads[1])], c.programs_per_sm * NUM_SMS
    )


# one of 32k rows among 15 of 512
MIXED = (32_000, *(512,) * 15)


def main() -> None:
    for rows in (1024, 4096, 16_384):
        for count in range(17, 33):
            lengths = [rows] * count + [-(1 << 30)] * (32 - count)
            print(f"{count} of 32, {rows} rows: {utilization_of(lengths, 32_768):.2f}")
    print(f"32k among short ones: {utilization_of(MIXED, 32_768):.2f}")
    print(f"and in the last place: {utilization_of(MIXED[::-1], 32_768):.2f}")


if __name__ == "__main__":
    main()
