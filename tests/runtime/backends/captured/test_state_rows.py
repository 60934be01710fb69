"""The state of sequences on the device follows them from batch to batch, ahead of the host."""

from __future__ import annotations

import random

import pytest
import torch

from specc.runtime.backends.captured.step_buffers import PADDING, StepBuffers
from specc.runtime.backends.step_io import StepInputs
from tests.runtime.backends.captured.simulated_device import LateDevice

MAX_BATCH, WIDTH = 4, 3


class Steps:
    """Steps that put out a new token a sequence, which follows from what they start from."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.buffers = StepBuffers(device, MAX_BATCH, WIDTH, 2, num_last=2)
        self.tapes = {}
        for bucket in (1, 2, MAX_BATCH):
            self.tapes[bucket] = device.capture(lambda bucket=bucket: self._step(bucket))

    def _step(self, bucket: int) -> None:
        last, lens = self.buffers.last_tokens[:bucket], self.buffers.cache_len[:bucket]
        table = self.buffers.block_table[:bucket]
        made = last[:, 0] * 3 + last[:, 1] * 5 + table[:, 0] + 1
        made = made.remainder(1009)
        self.buffers.results[:bucket].copy_(torch.stack([made, lens.long()], 1))
        moved = torch.stack([last[:, 1], made], 1)
        last.copy_(moved)
        lens.copy_(lens + 1 + made.remainder(3).int())

    def queue(self, rows, names, is_carried, bucket, places=None):
        """Queue a step; returns where its results will be."""
        with self.device.active():
            if rows is not None:
                count = len(rows)
                table = torch.tensor([[ord(name)] * WIDTH for name in names], dtype=torch.int32)
                values, words = torch.zeros(count, 6), torch.zeros(count, 4, dtype=torch.int64)
                self.buffers.copy_from(StepInputs(rows, table, values, words), bucket, places)
                self.buffers.state.route(names, is_carried, bucket, places)
            self.tapes[bucket].replay()
            self.buffers.state.stepped()
            return self.buffers.read_results()


def expected(last: list[int], length: int, name: str) -> tuple[int, list[int], int]:
    made = (last[0] * 3 + last[1] * 5 + ord(name) + 1) % 1009
    return made, [last[1], made], length + 1 + made % 3


@pytest.mark.parametrize("seed", range(12))
def test_rows_are_carried_from_batch_to_batch(seed: int) -> None:
    """Batches of any composition, order and place; the host reads up to six of them late."""
    dice = random.Random(seed)
    device = LateDevice()
    steps = Steps(device)
    # what the device will have done, and what the host has read of it
    state = {
        name: ([dice.randrange(99), dice.randrange(99)], dice.randrange(99)) for name in "abcdef"
    }
    read = dict(state)
    in_flight: list[tuple[list[str], list[int], list[tuple[int, int]], dict, object]] = []
    num_carried = num_repeated = num_mixed = 0
    last: tuple[list[str], list[int], int] | None = None
    for _ in range(120):
        names = dice.sample("abcdef", dice.randint(1, MAX_BATCH))
        places = list(range(len(names)))
        if dice.random() < 0.3:
            places = dice.sample(range(MAX_BATCH), len(names))
        flying = {name for batch, *_ in in_flight for name in batch}
        if last is not None and dice.random() < 0.3 and flying >= set(last[0]):
            names, places, bucket = last
            rows = None
            num_repeated += 1
        else:
            bucket = next(size for size in steps.tapes if size > max(places))
            rows, is_carried = [], []
            for name in names:
                tokens, length = read[name]
                is_carried.append(name in flying)
                rows.append((-5, -6, 7) if name in flying else (*tokens, length))
            num_carried += any(is_carried)
            num_mixed += len(set(is_carried)) == 2
        ordered = None if places == list(range(len(names))) else places
        results = steps.queue(rows, names, is_carried if rows else None, bucket, ordered)
        last = (names, places, bucket)
        wanted, after = [], {}
        for name in names:
            tokens, length = state[name]
            made, tokens, moved = expected(tokens, length, name)
            wanted.append((made, length))
            state[name] = after[name] = (tokens, moved)
        in_flight.append((names, places, wanted, after, results))
        while in_flight and (len(in_flight) > 6 or dice.random() < 0.4):
            _, rows_of, found, moved, results = in_flight.pop(0)
            values = results.wait()[rows_of]
            assert [tuple(row) for row in values.tolist()] == found
            read |= moved
    assert num_carried > 20
    assert min(num_mixed, num_repeated) > 5


@pytest.mark.parametrize("is_first", [False, True], ids=["after", "before"])
def test_padding_stays_padding_whoever_comes_and_goes(is_first) -> None:
    """After the sequences' rows, and before them, where what theirs leave comes last."""
    steps = Steps(LateDevice())
    for turn in range(4):
        names = ["ab", "c", "cab", "b"][turn]
        rows = [(1, 2, 3)] * len(names)
        bucket = max(steps.tapes)
        places = list(range(bucket - len(names), bucket)) if is_first else None
        steps.queue(rows, list(names), [turn > 0] * len(names), bucket, places).wait()
        padding = slice(bucket - len(names)) if is_first else slice(len(names), bucket)
        assert len(steps.buffers.cache_len[padding]) > 0
        assert (steps.buffers.cache_len[padding] < PADDING // 2).all()


def test_a_slot_is_given_to_another_only_where_none_is_free() -> None:
    """Those that were used longest ago lose theirs, and are no longer known; never one's own."""
    steps = Steps(LateDevice())
    state = steps.buffers.state
    for i in range(4 * MAX_BATCH):
        steps.queue([(1, 2, 3)], [chr(65 + i)], [False], 1)
    assert all(state.knows(chr(65 + i)) for i in range(4 * MAX_BATCH))
    steps.queue([(1, 2, 3)], ["A"], [True], 1)
    steps.queue([(1, 2, 3)] * 2, ["x", "B"], [False] * 2, 2)
    assert state.knows("A")
    assert state.knows("B")
    assert not state.knows("C")


def test_steps_without_names_leave_no_state() -> None:
    """A call with inputs alone neither takes nor leaves anything; nor does it touch others."""
    device = LateDevice()
    steps = Steps(device)
    steps.queue([(1, 2, 3)], ["a"], [False], 1)
    with device.active():
        values, words = torch.zeros(1, 6), torch.zeros(1, 4, dtype=torch.int64)
        table = torch.zeros(1, WIDTH, dtype=torch.int32)
        steps.buffers.copy_from(StepInputs([(7, 8, 9)], table, values, words), 1)
        steps.tapes[1].replay()
        steps.buffers.state.stepped()
        steps.buffers.read_results().wait()
    _, tokens, length = expected([1, 2], 3, "a")
    found = steps.queue([(0, 0, 0)], ["a"], [True], 1).wait()
    assert found[0].tolist() == [expected(tokens, length, "a")[0], length]


def test_results_wait_in_staging_memory_of_their_own() -> None:
    """More steps in flight than a few: none of them waits, and no result is lost."""
    device = LateDevice()
    steps = Steps(device)
    device.run_all()
    before = device.num_waits
    pending = [steps.queue([(i, 2, i)], ["a"], [False], 1) for i in range(12)]
    # inputs and routes have four sets of staging memory, each fenced; results what they need
    assert device.num_waits - before == 2 * (12 - 4)
    for i in (11, 0, 5, *range(1, 5), *range(6, 11)):
        assert pending[i].wait()[0].tolist() == [expected([i, 2], i, "a")[0], i]
