"""How `attend` hands out the keys of a batch: the device's arithmetic beside Python's."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl

from specc.kernels.cuda.attend_config import AttendConfig, Work, plan_work
from specc.kernels.cuda.attend_visible import divide
from specc.kernels.cuda.attend_work import find_work
from tests.kernels.cuda.attend_shares import MIXED, Share, shares, utilization_of, work_of
from tests.tiers import every

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.cuda.interpreted_calls import patch_calls

    patch_calls()

PADDING = -(1 << 30)
# an H200's tile of a few rows, and one of the interpreter's machine
DECODE, SMALL = AttendConfig(16, 64, 4, 5), AttendConfig(16, 16, 4, 5)


@triton.jit
def find_work_kernel(
    found,
    asked,
    num_programs,
    q_start,
    cache_len,
    num_seqs,
    num_tokens,
    tokens_each,
    group,
    reach,
    capacity,
    num_splits,
    slots,
    waves,
    MIN_BLOCKS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
):
    i = tl.program_id(0)
    i_program = tl.load(asked + i)
    i_b, i_tile, i_split, splits, i_part = find_work(
        i_program, num_programs,
        (q_start, cache_len, num_seqs, num_tokens, tokens_each, group, reach, capacity),
        num_splits, slots, waves, MIN_BLOCKS, BM, BN, BB,
    )  # fmt: skip
    tl.store(found + i * 5, i_b)
    tl.store(found + i * 5 + 1, i_tile)
    tl.store(found + i * 5 + 2, i_split)
    tl.store(found + i * 5 + 3, splits)
    tl.store(found + i * 5 + 4, i_part)


def find(
    programs: Sequence[int],
    lengths: Sequence[int],
    tokens: Sequence[int],
    group: int,
    capacity: int,
    c: AttendConfig,
    work: Work,
    is_even: bool,
    device: torch.device,
) -> list[list[int]]:
    """What these programs of one KV head find."""
    starts = torch.tensor([0, *tokens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    found = torch.full((len(programs), 5), 77, dtype=torch.int32, device=device)
    find_work_kernel[(len(programs),)](
        found, torch.tensor(programs, dtype=torch.int32, device=device), work.num_programs,
        starts, torch.tensor(lengths, dtype=torch.int32, device=device),
        len(lengths), sum(tokens), tokens[0] if is_even else 0, group, 1 << 30, capacity,
        work.num_splits, work.slots, work.waves,
        c.min_blocks, c.block_m, c.block_n, 64,
    )  # fmt: skip
    return found.tolist()


def check(
    lengths: Sequence[int],
    tokens: Sequence[int],
    group: int,
    capacity: int,
    c: AttendConfig,
    work: Work,
    device: torch.device,
    most: int = 12,
) -> list[Share]:
    """Compare programs, up to `most` of them, with Python's, of which none is left out or double.

    All programs compute the same plan, and each picks its place in it.
    """
    wanted = shares(lengths, tokens, group, capacity, c, work)
    assert len(wanted) <= work.num_programs
    tiles = [-(-count * group // c.block_m) for count in tokens]
    assert Counter((x.sequence, x.tile) for x in wanted if x.split == 0) == Counter(
        (b, i) for b, count in enumerate(tiles) for i in range(count)
    )
    places = Counter(x.part + x.split for x in wanted if x.splits > 1)
    assert {*places.values()} <= {1}
    assert max(places, default=-1) < work.num_parts
    edges = {0, len(wanted) - 1, len(wanted), work.num_programs - 1}
    rest = random.Random(len(wanted)).sample(range(work.num_programs), min(most, work.num_programs))
    programs = sorted({*rest[: most - len(edges)], *edges} & {*range(work.num_programs)})
    is_even = len({*tokens}) == 1
    rows = find(programs, lengths, tokens, group, capacity, c, work, is_even, device)
    for program, row in zip(programs, rows, strict=True):
        if program >= len(wanted):
            assert row[0] == -1
            continue
        want = wanted[program]
        assert row[:4] == [want.sequence, want.tile, want.split, want.splits]
        assert want.splits == 1 or row[4] == want.part
    if is_even:
        assert rows == find(programs, lengths, tokens, group, capacity, c, work, False, device)
    return wanted


@pytest.mark.parametrize("num_live", [17, 24])
def test_a_batch_with_padding(num_live: int, device: torch.device) -> None:
    lengths = [4096] * num_live + [PADDING] * (32 - num_live)
    work = work_of(lengths, 1, (32, 8), 32_768, DECODE)
    wanted = check(lengths, [1] * 32, 4, 32_768, DECODE, work, device)
    splits = Counter(x.sequence for x in wanted)
    assert len({splits[b] for b in range(num_live)}) == 1
    assert splits[0] >= 4
    assert {splits[b] for b in range(num_live, 32)} == {1}


def test_one_long_sequence_among_short_ones(device: torch.device) -> None:
    work = work_of(MIXED, 6, (32, 8), 32_768, DECODE)
    wanted = check(MIXED, [6] * 16, 4, 32_768, DECODE, work, device)
    splits = Counter((x.sequence, x.tile) for x in wanted)
    assert splits[0, 0] >= 16
    assert all(splits[b, 0] == 1 for b in range(1, 16))


def test_a_single_sequence_fills_the_machine_once(device: torch.device) -> None:
    work = work_of([32_000], 1, (32, 8), 131_072, DECODE)
    assert work.num_programs * 8 <= 2 * 132 + 8
    wanted = check([32_000], [1], 4, 131_072, DECODE, work, device)
    assert 30 <= len(wanted) <= 33


def test_a_short_sequence_is_merged_once(device: torch.device) -> None:
    """More splits than a group would be merged twice, which takes longer than their keys."""
    for length, most in ((100, 1), (400, 8), (1024, 8), (2000, 8)):
        work = work_of([length], 1, (32, 8), 4096, DECODE)
        wanted = check([length], [1], 4, 4096, DECODE, work, device)
        assert most // 2 < len(wanted) <= most, length
    work = work_of([16_000], 1, (32, 8), 32_768, DECODE)
    assert len(check([16_000], [1], 4, 32_768, DECODE, work, device)) > 8


def test_a_single_sequence_in_tiles(device: torch.device) -> None:
    """Parts of one tile come after those of the tile before it."""
    work = work_of([3000], 12, (32, 8), 4096, DECODE)
    wanted = check([3000], [12], 4, 4096, DECODE, work, device, most=40)
    assert {x.tile for x in wanted} == {0, 1, 2}
    assert min(x.splits for x in wanted) > 1


# as kernels of attention have them: Triton makes a constant of an integer that is 1
@triton.jit(do_not_specialize=["group", "count"])
def divide_kernel(found, group, count, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(found + o, divide(o, group), mask=o < count)


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(1, marks=pytest.mark.slow),
        3,
        pytest.param(4, marks=pytest.mark.slow),
        pytest.param(7, marks=pytest.mark.slow),
        41,
        pytest.param(64, marks=pytest.mark.slow),
        71,
    ],
)
def test_rows_are_divided_exactly(group: int, device: torch.device) -> None:
    # programs of a GPU are small; the interpreter is slow where there are many
    count, block = 1 << 22, 1 << (10 if device.type == "cuda" else 20)
    found = torch.empty(count, dtype=torch.int32, device=device)
    divide_kernel[(count // block,)](found, group, count, block)
    wanted = torch.arange(count, dtype=torch.int32, device=device) // group
    assert torch.equal(found, wanted)


@pytest.mark.default("1", "3", "9")
@pytest.mark.parametrize("seed", every(2, range(10), first=1))
def test_any_batch(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    num_seqs = rng.choice([1, 2, 5, 33, 70, 130])
    group, num_kv_heads = rng.choice([1, 4, 7]), rng.choice([1, 2, 8])
    capacity = rng.choice([40, 700, 5000])
    most = rng.choice([1, 6, 40])
    tokens = [rng.randrange(most + 1) for _ in range(num_seqs)]
    if rng.random() < 0.4:
        tokens = [most] * num_seqs
    tokens[0] += sum(tokens) == 0
    lengths = [rng.choice([0, rng.randrange(capacity), capacity, PADDING]) for _ in tokens]
    c = rng.choice([SMALL, DECODE, AttendConfig(64, 32, 4, 5)])
    rows = -(-sum(tokens) // num_seqs) * group
    for slots in (1, 4, 37, 264):
        work = plan_work(
            num_seqs * -(-rows // c.block_m),
            sum(tokens) * group // c.block_m + num_seqs,
            num_kv_heads, num_seqs, slots, -(-capacity // c.block_n) // c.min_blocks,
            num_splits=rng.choice([None, None, None, 1, 3]),
            is_short=capacity < 1000,
        )  # fmt: skip
        check(lengths, tokens, group, capacity, c, work, device)


def test_starts_that_the_launch_was_not_made_for(device: torch.device) -> None:
    """Of tiles that nobody counted no program writes a part: there is no place for it."""
    work = work_of([500] * 4, 1, (4, 1), 1000, DECODE)
    found = find(range(5), [500] * 4, [900] * 4, 4, 1000, DECODE, work, False, device)
    assert {row[0] for row in found} == {-1}


@pytest.mark.parametrize("num_live", range(17, 33))
def test_sequences_of_a_half_empty_bucket_fill_the_machine(num_live: int) -> None:
    """Padding is no work: before, as many programs for it made 52 to 73 % of 17 to 24 sequences."""
    lengths = [4096] * num_live + [PADDING] * (32 - num_live)
    assert utilization_of(lengths, 32_768) > (0.85 if num_live < 27 else 0.81)


def test_a_long_sequence_among_short_ones_fills_the_machine() -> None:
    """8 % when each sequence had as many splits as the others."""
    for lengths in (MIXED, MIXED[::-1]):
        assert utilization_of(lengths, 32_768) > 0.7


def test_short_caches_have_few_programs_without_work() -> None:
    """Each of which takes a tenth of what one of 1024 keys takes: there were 72 programs of 16."""
    lengths = [1024] * 16
    for tokens, c, programs, splits in (
        (1, DECODE, 41, 2),
        (6, AttendConfig(32, 64, 8, 5, 1), 24, 1),
        (22, AttendConfig(128, 64, 8, 5, 1), 24, 1),
    ):
        work = work_of(lengths, tokens, (32, 8), 1040, c)
        assert work.num_programs == programs
        found = shares(lengths, [tokens] * 16, 4, 1040, c, work)
        assert {share.splits for share in found} == {splits}
    assert work_of(lengths, 1, (32, 8), 2064, DECODE).num_programs > 41


def test_many_waves_are_not_split() -> None:
    lengths = [4000] * 256
    work = work_of(lengths, 1, (32, 8), 8192, DECODE)
    found = shares(lengths, [1] * 256, 4, 8192, DECODE, work)
    assert len(found) == 256


def test_chunks_of_prompts_are_not_cut_up_where_they_fill_the_machine() -> None:
    for num_tiles in (110, 132, 152, 264):
        work = plan_work(num_tiles, num_tiles, 1, 1, 132, 500, is_prompt=True)
        assert (work.num_splits, work.num_parts, work.num_programs) == (1, 0, num_tiles)
    few = plan_work(8, 8, 1, 1, 132, 500, is_prompt=True)
    assert 112 <= few.num_programs == 8 * few.num_splits == few.num_parts <= 132
