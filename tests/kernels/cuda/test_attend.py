"""`specc::attend` in Triton against its oracle."""

from __future__ import annotations

import itertools

import pytest
import torch

from specc.kernels.cuda import attend as module
from specc.kernels.cuda import attend_config
from specc.kernels.cuda.shipped import CAPABILITIES
from tests.kernels.cuda.cases_attend import (
    CASES,
    GPU_CASES,
    Case,
    check_attend,
    check_bad_data,
    make_call,
)
from tests.kernels.cuda.covering_attend import COVERING_CASES, FACTORS, ROWS, pairs_of

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_the_covering_holds_every_pair() -> None:
    met = set().union(*map(pairs_of, ROWS))
    for (a, first), (b, second) in itertools.combinations(FACTORS.items(), 2):
        for x, y in itertools.product(first, second):
            assert ((a, x), (b, y)) in met
    assert len(ROWS) <= 60


# the interpreter would take hours for the sizes of real models
RUN = {**CASES, **COVERING_CASES, **(GPU_CASES if torch.cuda.is_available() else {})}


def test_tiles_of_every_height_are_run() -> None:
    heights = set()
    for case in {**CASES, **COVERING_CASES}.values():
        num_tokens = sum(tokens for tokens, _ in case.seqs) + case.tail
        rows = -(-num_tokens // len(case.seqs)) * (case.heads[0] // case.heads[1])
        if case.dtype != torch.float32:
            heights.add(attend_config.config(case.dtype, max(case.sizes), rows, 90).block_m)
    assert heights == {16, 32, 64, 128}


@pytest.mark.parametrize("name", RUN)
def test_attend(name: str, device: torch.device) -> None:
    check_attend(RUN[name], device)


def test_bad_data_stays_inside(device: torch.device) -> None:
    check_bad_data(device)


def test_no_tokens(device: torch.device) -> None:
    call = make_call(Case(((2, 5),)), device)
    q, k_cache, v_cache, q_start, position, slot, cache_len, ancestors, table = call.args
    empty = (position[:0], slot[:0], cache_len, ancestors[:0], table)
    out = module.attend(q[:, :0], k_cache, v_cache, q_start * 0, *empty, scale=1.0)
    assert out.shape == (4, 0, 64)


NAMES = ("q", "k_cache", "v_cache", "q_start", "position", "slot", "cache_len", "ancestors")
BROKEN = {
    "dtypes": ("k_cache", lambda x: x.half(), "float16"),
    "unsupported-dtype": ("q", lambda x: x.double(), "float64"),
    "head-size": ("q", lambda x: x[..., :40], r"40\)"),
    "heads": ("q", lambda x: x[:3], "3 query heads on 2 KV heads"),
    "q-start": ("q_start", lambda x: x[:2], r"\(2,\)"),
    "cache-len": ("cache_len", lambda x: x[:1], r"\(1,\)"),
    "slot": ("slot", lambda x: x[:2], r"\(2,\)"),
    "words-dtype": ("ancestors", lambda x: x.int(), "int32"),
    "words-rows": ("ancestors", lambda x: x[:2], r"\(2, 1\)"),
    "no-words": ("ancestors", lambda x: x[:, :0], "words for 0 nodes"),
    "strides": ("v_cache", lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), "v_cache"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_refuses(broken: str, device: torch.device) -> None:
    call = make_call(Case(((3, 5), (2, 4))), device)
    name, change, found = BROKEN[broken]
    args = dict(zip((*NAMES, "block_table"), call.args, strict=True))
    args[name] = change(args[name])
    with pytest.raises(ValueError, match=f"found.*{found}.*needed"):
        module.attend(**args, **call.options)


def test_refuses_large_heads(device: torch.device) -> None:
    for size in (264, 20):
        call = make_call(Case(((1, 5),), heads=(1, 1), sizes=(size, size)), device)
        with pytest.raises(ValueError, match=f"found head size {size}; needed a multiple of 8"):
            module.attend(*call.args, **call.options)


@pytest.mark.parametrize(
    ("num_programs", "max_splits", "least", "most"),
    [
        pytest.param(8, 2000, 225, 264, id="batch-1-fills-the-machine"),
        pytest.param(128, 2000, 225, 264, id="batch-16"),
        pytest.param(300, 2000, 900, 1056, id="more-than-the-machine"),
        pytest.param(2000, 2000, 2000, 2000, id="many-waves-without"),
        pytest.param(300, 2, 600, 600, id="more-than-the-machine-short-cache"),
        pytest.param(1, 2000, 108, 128, id="one-program"),
        pytest.param(8, 3, 8, 24, id="short-cache"),
    ],
)
def test_choose_splits(num_programs: int, max_splits: int, least: int, most: int) -> None:
    splits = attend_config.choose_splits(num_programs, 2 * 132, max_splits)
    assert 1 <= splits <= max_splits
    assert least <= num_programs * splits <= most


@pytest.mark.parametrize("num_live", range(17, 33))
def test_sequences_of_a_half_empty_bucket_fill_the_machine(num_live: int) -> None:
    """17 to 24 sequences of 8 KV heads in a batch of 32 filled 52 to 73 % of 132 processors."""
    slots, num_heads, bucket = 2 * 132, 8, 32
    splits = attend_config.choose_splits(bucket * num_heads, slots, 500)
    waves = num_live * num_heads * splits / slots
    assert 2 < waves <= attend_config.MAX_WAVES
    assert waves / -(-waves // 1) > 0.68


def test_chunks_of_prompts_are_not_cut_up_where_they_fill_the_machine() -> None:
    for num_programs in (110, 132, 152, 264):
        assert attend_config.choose_splits(num_programs, 132, 500, is_even=True) == 1


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_size_has_a_configuration(capability: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_dim in range(8, 257, 8):
            for rows in (1, 16, 17, 64, 65, 128, 5000):
                found = attend_config.config(dtype, head_dim, rows, capability)
                assert found.block_m >= min(rows, found.block_m)
                # a step takes 64 bits of a row's words
                assert found.block_n in (16, 32, 64)
    names = [s.name for s in module.shipped(capability)]
    assert len(names) == len(set(names)) > 100
