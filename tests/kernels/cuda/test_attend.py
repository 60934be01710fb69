"""`specc::attend` in Triton against its oracle."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from specc.artifact.kv_rows import FP8, INT8, QUANTIZED_ROWS, SCALE_BYTES
from specc.kernels.cuda import arrivals, attend_config
from specc.kernels.cuda import attend as module
from specc.kernels.cuda.launch import even_tokens
from specc.kernels.cuda.shipped import CAPABILITIES
from specc.kernels.reference.kv_rows import read_rows, store_rows
from tests.kernels.cuda.cases_attend import (
    BF16,
    CASES,
    F16,
    GPU_CASES,
    Call,
    Case,
    check_attend,
    check_bad_data,
    check_call,
    make_call,
    run,
)
from tests.kernels.cuda.cases_scores import (
    CHUNKED_CASES,
    CODED_CASES,
    SINK_CASES,
    SLOPED_CASES,
    SOFTCAP_CASES,
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


# a second of the interpreter, and half of those that cover pairs of properties
SLOW = {"many-sequences", *(f"pairs-{i}" for i in range(1, len(COVERING_CASES), 2))}


@pytest.mark.default(
    "plain-decode",
    "two-tokens-catch-up",
    "tree",
    "tree-odd-pages",
    "tree-dense",
    "tree-of-64",
    "tree-of-3-words",
    "tree-of-1024",
    "tree-aligned",
    "tree-window",
    "tree-window-sink",
    "tree-window-of-1",
    "tree-wide-window",
    "level-beyond-window",
    "prefill-window",
    "prefill-window-of-2",
    "dead-tokens",
    "dead-batch",
    "head-128",
    "head-8",
    "chosen-splits",
    "pairs-2",
    "pairs-6",
    "pairs-10",
    "pairs-14",
    "pairs-20",
)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in RUN]
)
def test_attend(name: str, device: torch.device) -> None:
    check_attend(RUN[name], device)


@pytest.mark.parametrize("name", CODED_CASES)
def test_codes(name: str, device: torch.device) -> None:
    """What codes and scales stand for, and of rows that nobody sees neither."""
    check_attend(CODED_CASES[name], device)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, F16])
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8])
def test_every_code_is_a_number(
    dtype: torch.dtype, stored: torch.dtype, device: torch.device
) -> None:
    """A token that sees itself alone gets its value: all codes but e4m3's two that are none."""
    rows = {torch.int8: INT8, torch.uint8: FP8}[stored]
    case = Case(((1, 0),), True, dtype, (1, 1), (256, 256), rows=rows)
    call = make_call(case, device)
    v_cache = call.args[2].clone()
    v_cache[..., :-SCALE_BYTES] = torch.arange(256, dtype=torch.uint8).view(stored)
    v_cache[..., :-SCALE_BYTES].view(torch.uint8)[..., [127, 255]] = 0
    v_cache[..., -SCALE_BYTES:] = torch.tensor([2.0**-3]).view(stored)
    out = module.attend(*call.args[:2], v_cache, *call.args[3:], **call.options)
    assert torch.equal(out[0, 0].float(), read_rows(v_cache)[0, 0, 0])


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("kind", QUANTIZED_ROWS)
@pytest.mark.parametrize("tokens", [2, 40])
def test_small_values(dtype: torch.dtype, kind: str, tokens: int, device: torch.device) -> None:
    """Scales below what float16 has: their weights and values are not."""
    case = Case(((tokens, 70),), True, dtype, (4, 2), rows=kind)
    call = make_call(case, device)
    cache = read_rows(call.args[2])
    small = store_rows(cache * 2e-4, call.args[2].dtype)
    check_call(case, Call((*call.args[:2], small, *call.args[3:]), call.options), run)


@pytest.mark.default(
    "tree",
    "tree-of-64-half",
    "tree-of-3-words",
    "tree-of-4-words",
    "tree-window-sink",
    "prefill",
    "wide",
    "few",
    "rounded",
)
@pytest.mark.parametrize("name", SLOPED_CASES)
def test_slopes(name: str, device: torch.device) -> None:
    """Whatever kernel a call without slopes takes, and whichever nodes are in the pass."""
    check_attend(SLOPED_CASES[name], device)


@pytest.mark.default(
    "plain-decode",
    "tree",
    "tree-of-several-chunks",
    "tree-of-64-half",
    "tree-of-3-words",
    "draft-level",
    "tree-window-sink",
    "prefill",
    "prefill-within",
    "prefill-crosses",
    "prefill-window-sink",
    "tree-sink-within",
    "wider-window",
    "dead-tokens",
    "few",
    "slopes-of-a-prefill",
)
@pytest.mark.parametrize("name", CHUNKED_CASES)
def test_chunks(name: str, device: torch.device) -> None:
    """Rows before a chunk are NaN: they are neither seen nor read."""
    check_attend(CHUNKED_CASES[name], device)


@pytest.mark.parametrize("name", SINK_CASES)
def test_sinks(name: str, device: torch.device) -> None:
    """A row's sink counts once, however many splits there are, and in the first if it is empty."""
    check_attend(SINK_CASES[name], device)


@pytest.mark.parametrize("name", SOFTCAP_CASES)
def test_softcap(name: str, device: torch.device) -> None:
    check_attend(SOFTCAP_CASES[name], device)


@pytest.mark.parametrize("softcap", [-1.0, float("inf"), float("nan")])
def test_a_softcap_is_finite(softcap: float, device: torch.device) -> None:
    call = make_call(Case(((2, 5),)), device)
    with pytest.raises(ValueError, match="found a softcap of"):
        module.attend(*call.args, **(call.options | {"softcap": softcap}))


def test_sinks_are_those_of_all_heads(device: torch.device) -> None:
    call = make_call(SINK_CASES["tree"], device)
    for sinks in (call.options["sink_logits"][:1], call.options["sink_logits"].half()):
        with pytest.raises(ValueError, match="found sinks"):
            module.attend(*call.args, **(call.options | {"sink_logits": sinks}))


def test_a_chunk_has_positions(device: torch.device) -> None:
    call = make_call(CHUNKED_CASES["tree"], device)
    with pytest.raises(ValueError, match="found a chunk of -16"):
        module.attend(*call.args, **(call.options | {"chunk": -16}))


def test_slopes_are_those_of_all_heads(device: torch.device) -> None:
    call = make_call(SLOPED_CASES["tree"], device)
    for slopes in (call.options["slopes"][:1], call.options["slopes"].double()):
        with pytest.raises(ValueError, match="found slopes"):
            module.attend(*call.args, **(call.options | {"slopes": slopes}))


def test_a_scale_is_positive(device: torch.device) -> None:
    call = make_call(Case(((2, 5),)), device)
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="found scale"):
            module.attend(*call.args, **(call.options | {"scale": scale}))


@pytest.mark.parametrize("chunk", [0, 16])
def test_bad_data_stays_inside(device: torch.device, chunk: int) -> None:
    check_bad_data(device, chunk)


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


# one group of splits, two levels of groups, and splits that the device chooses, with padding
SPLIT_CASES = {
    "one-group": Case(((3, 300), (2, 40)), heads=(4, 2), sizes=(16, 16), splits=6),
    "groups": Case(((3, 600), (2, 300)), heads=(2, 1), sizes=(16, 16), splits=19),
    "groups-of-groups": Case(((1, 1100),), False, F16, (2, 1), (16, 16), 64, splits=9),
    "chosen": Case(((2, 900), (2, 30), (2, 70)), heads=(2, 1), sizes=(16, 16), splits=None),
}


@contextlib.contextmanager
def programs_in(order: Callable[[int], Sequence[int]], device: torch.device) -> Iterator[None]:
    """Have the interpreter run the programs of a launch in `order(number of programs)`."""
    if device.type != "cpu":
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder

    set_index = InterpreterBuilder.set_grid_idx

    def set_another(builder: InterpreterBuilder, x: int, y: int, z: int) -> None:
        assert builder.grid_dim[1:] == (1, 1)
        set_index(builder, order(builder.grid_dim[0])[x], y, z)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "set_grid_idx", set_another)
        yield


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=pytest.mark.slow) if x in ("groups-of-groups", "chosen") else x
        for x in SPLIT_CASES
    ],
)
def test_a_replay_gives_the_same_bits_whichever_is_last(name: str, device: torch.device) -> None:
    """Programs run in another order each time, and find the counters as the first launch did."""
    case = SPLIT_CASES[name]
    check_attend(case, device)
    call = make_call(case, device)
    outputs = []
    # a GPU has an order of its own in every launch
    for order in (range, lambda n: range(n - 1, -1, -1), lambda n: (*range(2, n), 0, 1)):
        with programs_in(order, device):
            outputs.append(module.attend(*call.args, **call.options, num_splits=case.splits))
        assert torch.equal(outputs[0], outputs[-1])
        assert not arrivals.counters(call.args[1], 1).any()


@pytest.fixture
def machine_of_8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many multiprocessors, so that splits are chosen among many."""
    machine = attend_config.machine
    monkeypatch.setattr(module, "machine", lambda device: (machine(device)[0], 8))


CHOSEN = (
    "plain-decode", "two-tokens-catch-up", "tree-odd-pages", "tree-dense", "draft-level",
    "tree-window", "tree-window-sink", "tree-in-window", "prefill", "prefill-window",
    "dead-tokens", "dead-batch", "head-256", "value-size", "no-prefix", "many-sequences",
)  # fmt: skip
CHOSEN_CASES = {
    **{name: CASES[name] for name in CHOSEN},
    "long-among-short": Case(((2, 20), (2, 1500), (2, 9)), True, F16, (4, 2), (16, 16)),
    "long-chain": Case(((6, 700), (6, 30)), True, BF16, (4, 1), (16, 16)),
}
# the others take half a minute
SHORT = {"plain-decode", "tree-window", "prefill-window", "dead-batch", "no-prefix", "long-chain"}


@pytest.mark.default("plain-decode", "tree-window", "prefill-window", "dead-batch", "no-prefix")
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in SHORT else pytest.mark.slow) for x in CHOSEN_CASES],
)
@pytest.mark.usefixtures("machine_of_8")
def test_splits_by_lengths(name: str, device: torch.device) -> None:
    check_attend(dataclasses.replace(CHOSEN_CASES[name], splits=None), device)


EVEN = ("plain-decode", "two-tokens-catch-up", "tree-aligned", "sink-beyond-window")


@pytest.mark.parametrize("name", EVEN)
def test_even_sequences_need_no_starts(name: str, device: torch.device) -> None:
    """What tells where tokens begin is not read, and the bits are the same."""
    case = CASES[name]
    call = make_call(case, device)
    want = module.attend(*call.args, **call.options, num_splits=case.splits)
    args = [*call.args]
    args[3] = torch.full_like(args[3], 1 << 30)
    with even_tokens():
        found = module.attend(*args, **call.options, num_splits=case.splits)
    assert torch.equal(found, want)


def test_counters_are_kept_and_apart() -> None:
    one, other = torch.zeros(3), torch.zeros(3)
    first = arrivals.counters(one, 5)
    assert arrivals.counters(one[1:], 7) is first
    assert arrivals.counters(other, 5) is not first
    assert arrivals.counters(one, 5000).numel() >= 5000
    assert arrivals.counters(one, 5) is first


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
