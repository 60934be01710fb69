"""Blocks, slabs and block tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specc.artifact.cache_rows import CacheRows
from specc.runtime.scheduling.kv_cache import GROWTH, CacheShape, KVCache
from specc.system.huge_pages import zeroed_slab
from tests.mapping_flags import mapping_flags


@pytest.mark.parametrize(
    ("block_size", "rows", "per_sequence"),
    [pytest.param(16, 16, 7, id="paged"), pytest.param(0, 105, 1, id="dense")],
)
def test_shape(block_size: int, rows: int, per_sequence: int) -> None:
    shape = CacheShape(max_seq_len=100, max_nodes=5, block_size=block_size, max_num_seqs=3)
    assert shape.rows_per_block == rows
    assert shape.blocks_per_sequence == per_sequence
    assert shape.num_blocks == 3 * per_sequence
    # the worst case of any request fits, so a free slot always has its blocks
    assert shape.blocks_for(99, 10**6) == per_sequence


def test_blocks_for_covers_the_region_after_the_last_token() -> None:
    shape = CacheShape(max_seq_len=100, max_nodes=5, block_size=4, max_num_seqs=1)
    assert shape.blocks_for(3, 4) == 3  # 7 tokens and 5 nodes
    assert shape.blocks_for(3, 5) == 4


def test_slabs_and_environment() -> None:
    shape = CacheShape(max_seq_len=10, max_nodes=2, block_size=4, max_num_seqs=2)
    cache = KVCache(
        shape, {"target": [(3, 2, 8), (1, 1, 4)], "draft_0": [(1, 2, 8)]}, torch.bfloat16
    )
    assert cache.allocator.num_free == 6
    environment = cache.environment
    assert list(environment) == ["target_slab_0", "target_slab_1", "draft_0_slab_0", "history"]
    assert environment["target_slab_0"].shape == (3, 2, 6, 4, 2, 8)
    assert environment["target_slab_1"].shape == (1, 2, 6, 4, 1, 4)
    assert environment["history"].shape == (6, 4)
    dtypes = [value.dtype for value in environment.values()]
    assert dtypes == [torch.bfloat16] * 3 + [torch.int32]
    assert environment["target_slab_0"] is cache.slabs["target"][0]
    assert environment["history"] is cache.history
    # captured steps know the caches by identity
    assert cache.environment is environment


def test_slabs_hold_no_nan() -> None:
    """A masked row contributes 0 times its value, which NaN would spoil."""
    shape = CacheShape(max_seq_len=10, max_nodes=2, block_size=0, max_num_seqs=2)
    (slab,) = KVCache(shape, {"target": [(2, 1, 4)]}, torch.float32).slabs["target"]
    assert slab.isfinite().all()


@pytest.mark.parametrize("block_size", [pytest.param(4, id="paged"), pytest.param(0, id="dense")])
def test_tokens_are_recorded_at_the_places_of_their_rows(block_size: int) -> None:
    shape = CacheShape(max_seq_len=20, max_nodes=2, block_size=block_size, max_num_seqs=2)
    cache = KVCache(shape, {}, torch.float32)
    blocks = [5, 2, 7, 0, 1, 3] if block_size else [1]
    size, tokens = shape.rows_per_block, list(range(100, 115))
    wanted = torch.zeros_like(cache.history)
    for position, token in enumerate(tokens):
        wanted[blocks[position // size], position % size] = token
    # a prompt comes in chunks, which begin and end anywhere
    for start, end in ((0, 3), (3, 3), (3, 12), (12, 15)):
        rows = cache.history_rows(blocks, start, end)
        cache.record(rows, torch.tensor(tokens[start:end], dtype=torch.int64))
    assert torch.equal(cache.history, wanted)


def test_block_table_is_padded() -> None:
    shape = CacheShape(max_seq_len=10, max_nodes=2, block_size=4, max_num_seqs=2)
    table = KVCache(shape, {}, torch.float32).block_table([[4], [5, 1, 2]])
    assert table.dtype == torch.int32
    assert table.tolist() == [[4, 0, 0], [5, 1, 2]]


def test_a_growing_cache_keeps_what_it_holds() -> None:
    """Slabs with heads before rows begin short, and get longer in steps, up to all rows."""
    shape = CacheShape(max_seq_len=400, max_nodes=6, block_size=0, max_num_seqs=2)
    rows = CacheRows.of(400, 6, 2)
    specs = {"target": [(2, 3, 4)], "draft_0": [(1, 1, 4)]}
    cache = KVCache(shape, specs, torch.float32, rows=rows, grows=True)
    environment = cache.environment
    assert cache.length == GROWTH < rows.total
    assert environment["target_slab_0"].shape == (2, 2, 2, 3, GROWTH, 4)
    assert environment["history"].shape == (2, 406)
    before = {name: slab.normal_().clone() for name, slab in environment.items() if "slab" in name}

    # what is before the slots counts
    assert cache.reserve(GROWTH - rows.front) == GROWTH
    assert all(environment[name].data_ptr() for name in before)
    assert cache.reserve(GROWTH - rows.front + 1) == 2 * GROWTH
    for name, old in before.items():
        slab = environment[name]
        assert slab.shape == (*old.shape[:4], 2 * GROWTH, 4)
        assert torch.equal(slab[..., :GROWTH, :], old)
        # 0 · NaN is NaN: rows that nobody wrote are masked, and multiplied all the same
        assert not slab[..., GROWTH:, :].any()
    assert environment is cache.environment
    assert environment["target_slab_0"] is cache.slabs["target"][0]
    assert cache.reserve(406) == cache.length == rows.total
    assert cache.reserve(3) == rows.total


def test_a_cache_that_does_not_grow_has_all_rows() -> None:
    shape = CacheShape(max_seq_len=400, max_nodes=6, block_size=0, max_num_seqs=2)
    rows = CacheRows.of(400, 6, 2)
    cache = KVCache(shape, {"target": [(1, 1, 4)]}, torch.float32, rows=rows)
    slab = cache.environment["target_slab_0"]
    assert slab.shape[4] == rows.total
    assert cache.reserve(406) == rows.total
    assert cache.environment["target_slab_0"] is slab


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages"
)
def test_slabs_ask_for_huge_pages() -> None:
    slab = zeroed_slab((3, 4 << 20), torch.bfloat16)
    assert slab.shape == (3, 4 << 20)
    assert slab.dtype == torch.bfloat16
    assert not slab.any()
    assert "hg" in mapping_flags(slab.data_ptr() + slab.nbytes // 2)


def test_slabs_of_no_page() -> None:
    assert not zeroed_slab((3, 5), torch.float32).any()
    assert zeroed_slab((2, 0, 5), torch.float32).shape == (2, 0, 5)
