"""Which part of a batch a program of `attend` takes: a tile of rows, and a share of its keys.

The host knows shapes; how long sequences are, and which of them are padding, is read by each
program. All compute the same shares from the lengths, and each finds its own place in them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.attend_merge import GROUP
from specc.kernels.cuda.attend_rows import find_tokens
from specc.kernels.cuda.attend_visits import NEVER
from specc.kernels.cuda.dependent import load_early

# what a program takes before its first key and after its last, in key blocks; assumed
START_BLOCKS = tl.constexpr(2)
# merging parts takes as long as key blocks of tiles of so many rows: four of 16; assumed
MERGE_ROWS = tl.constexpr(64)
# one more than the most waves, at least, and a power of two
BW = tl.constexpr(8)


@triton.jit
def _work(i_first, batch, BM: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr):
    """Tiles of sequences i_first …, and the key blocks of each of their tiles: 0 for padding."""
    q_start, cache_len, num_seqs, num_tokens, tokens_each, group, reach, capacity = batch
    o_b = i_first + tl.arange(0, BB)
    m_b = o_b < num_seqs
    if tokens_each > 0:
        b_first = o_b * tokens_each
        b_last = b_first + tokens_each
    else:
        b_first = tl.maximum(load_early(q_start + o_b, m_b, 0), 0)
        b_last = tl.minimum(load_early(q_start + o_b + 1, m_b, 0), num_tokens)
    b_length = load_early(cache_len + o_b, m_b, -1)
    # rows after the last sequence are dead tokens of it
    b_end = tl.where(o_b == num_seqs - 1, num_tokens, b_last)
    b_tiles = (tl.maximum(b_end - b_first, 0) * group + BM - 1) // BM
    b_tiles = tl.where(m_b, b_tiles, 0)
    b_keys = tl.minimum(tl.minimum(b_length, reach) + tl.maximum(b_last - b_first, 1), capacity)
    b_blocks = tl.where((b_length >= 0) & (b_tiles > 0), (b_keys + BN - 1) // BN, 0)
    return b_tiles, b_blocks


@triton.jit
def _choose_share(
    num_programs, batch, slots, waves, MIN_BLOCKS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Key blocks of a program, at most: of the number of waves that is done first."""
    num_seqs = batch[2]
    total = 0
    num_tiles = 0
    num_live = 0
    most = 1
    for i in range(0, num_seqs, BB):
        b_tiles, b_blocks = _work(i, batch, BM, BN, BB)
        total += tl.sum(b_tiles * b_blocks, 0)
        num_tiles += tl.sum(b_tiles, 0)
        num_live += tl.sum(tl.where(b_blocks > 0, b_tiles, 0), 0)
        most = tl.maximum(most, tl.max(b_blocks, 0))
    # shares of total / (n + 1) blocks or more make at most n programs more than there are live
    # tiles, as only the last share of a tile is not full
    o_w = tl.arange(0, BW)  # waves; of 0: one for each tile, and as many more as run at a time
    b_room = tl.where(o_w == 0, slots, o_w * slots - num_live)
    b_room = tl.minimum(b_room, num_programs - num_tiles) + 1
    m_w = (b_room > 0) & (o_w <= waves)
    b_room = tl.maximum(b_room, 1)
    b_share = tl.maximum((total + b_room - 1) // b_room, MIN_BLOCKS)
    b_share = tl.minimum(b_share, most)  # [BW]

    b_count = tl.zeros([BW], tl.int32)
    b_longest = tl.zeros([BW], tl.int32)
    for i in range(0, num_seqs, BB):
        b_tiles, b_blocks = _work(i, batch, BM, BN, BB)
        b_splits = (b_blocks[None, :] + b_share[:, None] - 1) // b_share[:, None]  # [BW, BB]
        b_count += tl.sum(b_tiles[None, :] * b_splits, 1)
        b_splits = tl.maximum(b_splits, 1)
        b_own = (b_blocks[None, :] + b_splits - 1) // b_splits
        b_longest = tl.maximum(b_longest, tl.max(b_own, 1))
    # two bounds of what programs take that start as others end: as many waves as there are, all as
    # long as the longest; and all of a wave's slots busy until the longest one starts, last of all
    b_longest += START_BLOCKS
    b_waves = (b_count + slots - 1) // slots * b_longest
    b_packed = (total + b_count * START_BLOCKS + slots - 1) // slots + b_longest
    b_cost = tl.where(m_w, tl.minimum(b_waves, b_packed), NEVER)
    # of equal ones the largest share: fewest programs
    share = tl.max(tl.where(m_w & (b_cost == tl.min(b_cost, 0)), b_share, 0), 0)
    return tl.where(share > 0, share, most)


@triton.jit
def _splits_of_one(blocks, num_tiles, slots, MIN_BLOCKS: tl.constexpr, BM: tl.constexpr):
    """Splits of each tile of a single sequence: those with which the last program ends first.

    Merging takes as long as some key blocks, and twice that where groups are merged, too. Of what
    takes equally long the fewest splits.
    """
    LEVEL_BLOCKS: tl.constexpr = MERGE_ROWS // BM if MERGE_ROWS > BM else 1
    most = tl.minimum(slots // tl.maximum(num_tiles, 1), (blocks + MIN_BLOCKS - 1) // MIN_BLOCKS)
    most = tl.maximum(most, 1)
    few = tl.minimum(most, GROUP)
    share = blocks
    cost = blocks
    few_share = (blocks + few - 1) // few
    if few_share + LEVEL_BLOCKS < cost:
        share = few_share
        cost = few_share + LEVEL_BLOCKS
    most_share = (blocks + most - 1) // most
    if most_share + 2 * LEVEL_BLOCKS < cost:
        share = most_share
    share = tl.maximum(share, 1)
    return tl.maximum((blocks + share - 1) // share, 1)


@triton.jit
def _find_of_one(
    i_program, num_programs, batch, slots, MIN_BLOCKS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """`find_work` of a single sequence: numbers instead of vectors that programs have to reduce."""
    q_start, cache_len, _, num_tokens, tokens_each, group, reach, capacity = batch
    first, last, _ = find_tokens(q_start, 0, num_tokens, 1, tokens_each)
    length = load_early(cache_len, True, -1)
    num_tiles = (tl.maximum(num_tokens - first, 0) * group + BM - 1) // BM
    keys = tl.minimum(tl.minimum(length, reach) + tl.maximum(last - first, 1), capacity)
    blocks = tl.where((length >= 0) & (num_tiles > 0), (keys + BN - 1) // BN, 0)
    splits = _splits_of_one(blocks, num_tiles, slots, MIN_BLOCKS, BM)
    total = num_tiles * splits
    i_b = tl.where((i_program < total) & (total <= num_programs), 0, -1)
    i_tile = i_program // splits
    return i_b, i_tile, i_program - i_tile * splits, splits, i_tile * splits


@triton.jit
def find_work(
    i_program,
    num_programs,
    batch,  # q_start, cache_len, num_seqs, num_tokens, tokens_each, group, reach, capacity
    num_splits,
    slots,
    waves,
    MIN_BLOCKS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    """The sequence, tile and share of keys of a program.

    Of a KV head's `num_programs` it is number `i_program`. Sequences have `tokens_each` tokens, or
    as q_start says where that is 0, and `capacity` rows at most; a row sees `reach` committed keys.
    Every tile that is no padding has `num_splits` splits, or, where that is 0, as many as its
    length is worth, in up to `waves` waves of `slots` programs that run at a time.

    Returns:
        the sequence, -1 for a program without work; the tile of it; the split; the splits of the
        tile; the number of the tile's first split among all of tiles that are split.
    """
    if (batch[2] == 1) & (num_splits == 0):
        i_b, i_tile, i_split, splits, i_part = _find_of_one(
            i_program, num_programs, batch, slots, MIN_BLOCKS, BM, BN
        )
    else:
        i_b, i_tile, i_split, splits, i_part = _find_among(
            i_program, num_programs, batch, num_splits, slots, waves, MIN_BLOCKS, BM, BN, BB
        )
    return i_b, i_tile, i_split, splits, i_part


@triton.jit
def _find_among(
    i_program, num_programs, batch, num_splits, slots, waves, MIN_BLOCKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """`find_work` of several sequences, or of a number of splits that the host has chosen."""
    num_seqs = batch[2]
    share = 1
    if num_splits == 0:
        share = _choose_share(num_programs, batch, slots, waves, MIN_BLOCKS, BM, BN, BB)
    i_b = -1
    i_own = 0
    splits = 1
    i_part = 0
    total = 0
    for i in range(0, num_seqs, BB):
        b_tiles, b_blocks = _work(i, batch, BM, BN, BB)
        b_splits = (b_blocks + share - 1) // share
        b_splits = tl.where(
            num_splits == 0, b_splits, tl.minimum(b_blocks // MIN_BLOCKS, num_splits)
        )
        b_splits = tl.maximum(b_splits, 1)
        b_programs = b_tiles * b_splits
        b_end = total + tl.cumsum(b_programs, 0)
        b_begin = b_end - b_programs
        m_own = (b_begin <= i_program) & (i_program < b_end)
        i_b += tl.sum(tl.where(m_own, i + tl.arange(0, BB) + 1, 0), 0)
        i_own += tl.sum(tl.where(m_own, i_program - b_begin, 0), 0)
        splits += tl.sum(tl.where(m_own, b_splits - 1, 0), 0)
        # programs of the tiles before that are split
        m_part = (b_end <= i_program) & (b_splits > 1)
        i_part += tl.sum(tl.where(m_part, b_programs, 0), 0)
        total += tl.sum(b_programs, 0)
    # starts of sequences that a launch was not made for: it has no place for their parts
    i_b = tl.where(total <= num_programs, i_b, -1)
    i_tile = i_own // splits
    return i_b, i_tile, i_own - i_tile * splits, splits, i_part + i_tile * splits
