"""Which request uses which block, and what free blocks still hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specc.runtime.scheduling.block_pool import BlockPool


@given(st.lists(st.integers(0, 6)), st.randoms())
def test_allocator_hands_out_every_block_once(sizes: list[int], random) -> None:
    allocator = BlockPool(16)
    held: list[list[int]] = []
    for size in sizes:
        if size > allocator.num_free and held:
            allocator.free(held.pop(random.randrange(len(held))))
        if size <= allocator.num_free:
            held.append(allocator.allocate(size))
        used = [block for blocks in held for block in blocks]
        assert len(used) == len(set(used)) == 16 - allocator.num_free
        assert set(used) <= set(range(16))
    for blocks in held:
        allocator.free(blocks)
    assert allocator.num_free == 16


def test_double_free_and_foreign_blocks_are_detected() -> None:
    allocator = BlockPool(4)
    blocks = allocator.allocate(2)
    allocator.free(blocks)
    with pytest.raises(RuntimeError, match="freed but not in use"):
        allocator.free(blocks)
    with pytest.raises(RuntimeError, match="block 9"):
        allocator.free([9])
    with pytest.raises(RuntimeError, match="5 blocks asked for, 4 free"):
        allocator.allocate(5)
    assert allocator.num_free == 4


KEY = b"key"


def test_a_published_block_is_found_until_it_is_handed_out_again() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    assert pool.publish(first, KEY)
    assert pool.find(KEY) == first
    pool.free([first])
    assert (pool.num_free, pool.num_cached) == (2, 1)
    # the block that never held anything goes first
    (third,) = pool.allocate(1)
    assert third not in (first, second)
    assert pool.find(KEY) == first
    assert pool.allocate(1) == [first]
    assert pool.find(KEY) is None
    assert not pool.has_key(first)


def test_a_shared_block_is_free_when_its_last_user_is_gone() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, KEY)
    pool.share(block)
    pool.free([block])
    assert pool.is_used(block)
    assert pool.num_free == 1
    pool.free([block])
    assert pool.num_free == 2
    pool.share(block)
    assert pool.num_free == 1
    pool.free([block])
    with pytest.raises(RuntimeError, match="freed but not in use"):
        pool.free([block])


def test_the_prefix_unused_for_longest_goes_first_and_its_end_before_its_begin() -> None:
    pool = BlockPool(4)
    old, new = pool.allocate(2), pool.allocate(2)
    for block in (*old, *new):
        pool.publish(block, bytes([block]))
    pool.free(old)
    pool.free(new)
    assert pool.allocate(4) == [old[1], old[0], new[1], new[0]]


def test_one_key_names_one_block() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.publish(first, KEY)
    assert pool.publish(first, KEY)
    assert not pool.publish(second, KEY)
    pool.free([second])
    assert pool.find(KEY) == first
    # a block without a key does not outlive its user
    assert pool.num_cached == 0


def test_drafts_of_a_block() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.publish(block, KEY)
    pool.add_draft(block, 1)
    assert pool.drafts_of(block) == 0b10
    pool.free([block])
    pool.allocate(1)
    pool.publish(block, KEY)
    assert pool.drafts_of(block) == 0


def test_forgetting_keeps_users() -> None:
    pool = BlockPool(2)
    (used,), (kept,) = pool.allocate(1), pool.allocate(1)
    pool.publish(used, b"used")
    pool.publish(kept, b"kept")
    pool.free([kept])
    pool.forget_all()
    assert pool.find(b"used") is pool.find(b"kept") is None
    assert (pool.num_free, pool.num_cached) == (1, 0)
    pool.free([used])
    assert pool.allocate(2) == [0, 1]
