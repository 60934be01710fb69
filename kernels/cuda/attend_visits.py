"""Which key blocks a split of a tile visits, and which of them every row sees, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from specc.kernels.cuda.dependent import load_early

# a window that cuts nothing
NO_WINDOW = tl.constexpr(1 << 30)
NEVER = tl.constexpr(2147483647)


@triton.jit
def find_blocks(
    b_slot, is_live, position, o_s, last, length, capacity, BN: tl.constexpr, IS_TREE: tl.constexpr
):
    """The key after a sequence's last, its blocks that every row sees, and all of its blocks.

    Args:
        b_slot: slots of all of its tokens.
        is_live: which of them are not dead.
        o_s: their numbers, below `last`.
    """
    if IS_TREE:
        end = tl.max(tl.where(is_live, b_slot, -1), 0) + 1
        full = tl.minimum(length, capacity)
    else:
        b_place = load_early(position + o_s, o_s < last, 0).to(tl.int32)
        end = tl.max(tl.where(is_live, b_place, -1), 0) + 1
        full = tl.min(tl.where(is_live, b_place, NEVER - 1), 0) + 1
    end = tl.minimum(end, capacity)
    return end, tl.minimum(full, end) // BN, (end + BN - 1) // BN


@triton.jit
def find_few(
    slot, position, first, last, last_row, length, capacity, max_splits, COUNT: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, BN: tl.constexpr, IS_TREE: tl.constexpr,
):  # fmt: skip
    """Of all COUNT tokens of a sequence, at most: what every program finds by itself, and alike.

    Returns:
        as `find_blocks`; splits of a tile; the first row that the kernel before may write.
    """
    o_s = first + tl.arange(0, COUNT)
    b_slot = load_early(slot + o_s, o_s < last_row, -1)
    is_live = (b_slot >= 0) & (o_s < last)
    # and all from here on
    first_new = tl.min(tl.where(b_slot >= 0, b_slot, NEVER), 0)
    end, full, num_visits = find_blocks(
        b_slot, is_live, position, o_s, last, length, capacity, BN, IS_TREE
    )
    splits = tl.minimum((num_visits + MIN_BLOCKS - 1) // MIN_BLOCKS, max_splits)
    return end, full, num_visits, tl.maximum(splits, 1), first_new


@triton.jit
def find_bounds(
    first, last, length, capacity, window, m_live, b_position, IS_TREE: tl.constexpr
):  # fmt: skip
    """Keys 0 … likely - 1 are there, more or less; those from `low` to `full` every row sees.

    Returns:
        likely, low, the first key `start` that some row's window leaves, full.
    """
    likely = tl.minimum(tl.minimum(length, capacity) + (last - first), capacity)
    low = 0
    start = 0
    if window < NO_WINDOW:
        low = tl.maximum(tl.max(tl.where(m_live, b_position, -1), 0) - window + 1, 0)
        start = tl.min(tl.where(m_live, b_position, NEVER), 0)
        start = tl.maximum(start - window + 1, 0)
        if IS_TREE:
            start = tl.minimum(start, length)
    if IS_TREE:
        full = tl.minimum(length, capacity)
    else:
        full = tl.min(tl.where(m_live, b_position, NEVER), 0)
        full = tl.where(full < NEVER, tl.minimum(full + 1, capacity), 0)
    return likely, low, start, full


@triton.jit
def share_blocks(likely, low, start, full, sink, i_split, splits, BN: tl.constexpr):
    """The blocks to visit, numbered 0 … : sinks, then those from `start` on; and a split's share.

    Returns:
        its first block and the one after its last, of blocks that every row sees likewise, how
        many blocks have sinks, how many are skipped after those.
    """
    i_start = tl.minimum(start, likely) // BN
    num_sinks = tl.minimum((tl.minimum(sink, likely) + BN - 1) // BN, i_start)
    skip = i_start - num_sinks
    num_visits = (likely + BN - 1) // BN - skip
    # the last split has blocks that only some rows see: it is one of the shorter ones
    i_first = (num_visits * i_split + splits - 1) // splits
    i_last = (num_visits * (i_split + 1) + splits - 1) // splits
    i_full = tl.minimum(tl.maximum((low + BN - 1) // BN - skip, i_first), i_last)
    i_rest = tl.minimum(tl.maximum(full // BN - skip, i_full), i_last)
    return i_first, i_last, i_full, i_rest, num_sinks, skip


@triton.jit
def find_end(
    slot, first, last, m_live, b_position, capacity, BB: tl.constexpr, IS_TREE: tl.constexpr
):
    """The key after the last one that is there; 0 of a tile without live rows."""
    if IS_TREE:
        last_slot = -1
        for i in range(first, last, BB):
            o_s = i + tl.arange(0, BB)
            b_slot = tl.load(slot + o_s, mask=o_s < last, other=-1)
            last_slot = tl.maximum(last_slot, tl.max(b_slot, 0))
        end = last_slot + 1
    else:
        end = tl.max(tl.where(m_live, b_position, -1), 0) + 1
    return tl.where(tl.max(m_live.to(tl.int32), 0) > 0, tl.minimum(end, capacity), 0)


@triton.jit
def extend_share(i_last, i_rest, end, skip, i_split, splits, BN: tl.constexpr):
    """The block after a split's last: the last split has what is more than likely, too."""
    num_visits = (end + BN - 1) // BN - skip
    i_last = tl.where(i_split == splits - 1, num_visits, tl.minimum(i_last, num_visits))
    return tl.maximum(i_last, i_rest)
