"""Tables that are written as requests grow equal those that are built anew."""

from __future__ import annotations

import random

import pytest
import torch

from specc.runtime.execution.batch_rows import BlockRows
from specc.runtime.scheduling.kv_cache import CacheShape, KVCache
from specc.runtime.scheduling.request import Request
from specc.runtime.scheduling.request_blocks import RequestBlocks
from specc.sampling.params import SamplingParams
from specc.speculation.plans import OFF, SpecPlan

TREE = SpecPlan.from_widths((2, 1, 1))


@pytest.mark.parametrize("seed", range(8))
def test_rows_follow_their_sequences(seed: int) -> None:
    """Requests come, grow, give blocks back, are preempted and come again, or leave."""
    dice = random.Random(seed)
    shape = CacheShape(60, 8, 4, max_num_seqs=3, pool_blocks=40)
    cache = KVCache(shape, {}, torch.float32)
    blocks, rows = RequestBlocks(cache, shares_prefixes=False), BlockRows(shape)
    running: list[Request] = []
    preempted: list[Request] = []
    num_changed = num_same = 0
    for step in range(400):
        action = dice.choice(["come", "grow", "grow", "trim", "preempt", "leave", "look", "look"])
        if action == "come" and len(running) < 3:
            params = SamplingParams(temperature=0, max_tokens=50)
            new = Request(str(step), [0] * dice.randrange(1, 9), params, max_seq_len=60)
            one = preempted.pop() if preempted and dice.random() < 0.5 else new
            if blocks.admit(one, running):
                one.cache_len = one.prefill_end
                running.append(one)
        elif running:
            one = dice.choice(running)
            if action == "grow":
                one.cache_len = min(one.cache_len + dice.randrange(9), 52)
                blocks.grow(one, TREE, dice.choice([0, 30]))
            elif action == "trim":
                blocks.trim(one, OFF)
            elif action in ("preempt", "leave"):
                running.remove(one)
                blocks.preempt(one)
                preempted += [one] if action == "preempt" else []
            else:
                batch = dice.sample(running, dice.randint(1, len(running)))
                if rows.write(batch):
                    num_changed += 1
                else:
                    num_same += 1
                wanted = cache.block_table([request.blocks for request in batch])
                assert torch.equal(rows.select(batch), wanted), step
    assert min(num_changed, num_same) > 10


def test_what_has_not_changed_is_not_written() -> None:
    shape = CacheShape(64, 8, 4, max_num_seqs=2)
    cache = KVCache(shape, {}, torch.float32)
    blocks, rows = RequestBlocks(cache, shares_prefixes=False), BlockRows(shape)
    one = Request("a", [0] * 5, SamplingParams(temperature=0, max_tokens=50), max_seq_len=64)
    assert blocks.admit(one, [])
    assert rows.write([one])
    assert not rows.write([one])
    before = len(one.blocks)
    rows._table[:] = 777
    assert blocks.grow(one, TREE, 20)
    assert rows.write([one])
    (row,) = rows.select([one]).tolist()
    assert row[:before] == [777] * before, "blocks that were there are left alone"
    assert row[before : len(one.blocks)] == one.blocks[before:]
    kept = rows.select([one])
    blocks.grow(one, TREE, 40)
    rows.write([one])
    assert kept[0].tolist() == row, "a table that was given out does not change"
