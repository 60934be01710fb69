"""Attention over latents in Triton against its oracle.

Cases are those of `cases_attend` with one KV head and a cache of keys alone, so what no live token
may see is NaN here, too; `sizes` are columns of keys, and the first of them, which are values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from specc.kernels.cuda import arrivals, attend_latent
from specc.kernels.cuda import attend as module
from specc.kernels.cuda.attend import attend
from specc.kernels.cuda.launch import even_tokens
from specc.kernels.cuda.shipped import CAPABILITIES
from specc.kernels.cuda.tree_attention import write_kv
from specc.kernels.reference.core import write_kv_reference
from tests.kernels.cuda.cases_attend import (
    BAD_CASE,
    BF16,
    F16,
    Call,
    Case,
    check_bad_call,
    check_call,
    make_call,
    run,
)
from tests.kernels.cuda.test_attend import programs_in

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CASES = {
    "plain-decode": Case(((1, 40), (1, 0), (1, 33)), False, heads=(4, 1), sizes=(40, 32), splits=2),
    "tree": Case(((7, 40), (1, 10), (5, 32)), heads=(4, 1), sizes=(28, 20), splits=2),
    "tree-odd-pages": Case(((5, 70), (0, 12), (9, 130)), True, F16, (6, 1), (40, 32), 7, splits=2),
    "tree-dense": Case(((6, 70), (3, 101)), True, BF16, (2, 1), (72, 64), 0),
    "tree-whole-pages": Case(((9, 100), (3, 63)), True, F16, (3, 1), (40, 32), 64, splits=2),
    "tree-tiles": Case(((37, 90), (2, 5)), True, BF16, (7, 1), (40, 32), splits=2),
    "tree-window-sink": Case(((7, 200), (3, 10)), True, F16, (4, 1), (24, 16), window=20, sink=5),
    "sink-beyond-window": Case(
        ((2, 50), (2, 20)), heads=(2, 1), sizes=(24, 16), window=8, sink=70
    ),
    "prefill": Case(((40, 0), (23, 50)), False, F16, (2, 1), (40, 32)),
    "prefill-fp32": Case(((19, 30), (1, 77)), False, heads=(2, 1), sizes=(40, 32), splits=2),
    "prefill-window": Case(((40, 60), (1, 100), (9, 0)), False, BF16, (2, 1), (24, 16), window=20),
    "prefill-of-70": Case(((70, 10),), False, F16, (1, 1), (24, 16), splits=None),
    # with a position of 0 a dead token would see what windows cut from others
    "dead-window": Case(((5, 90),), heads=(4, 1), sizes=(24, 16), dead=(1,), window=20),
    "dead-batch": Case(((2, 7), (1, 3)), heads=(4, 1), sizes=(24, 16), dead=(0, 1, 2), splits=2),
    # DeepSeek's latent, one of two halves that are not full, and one that no power of two is
    "deepseek": Case(((2, 140), (1, 40)), True, BF16, (8, 1), (576, 512), splits=2),
    "deepseek-16-heads": Case(((3, 40), (1, 90)), True, F16, (16, 1), (576, 512), splits=None),
    "deepseek-fp32": Case(((2, 20),), True, heads=(2, 1), sizes=(576, 512)),
    "two-halves": Case(((3, 200),), True, BF16, (4, 1), (328, 296), splits=2),
    "two-halves-fp32": Case(((2, 20),), False, heads=(3, 1), sizes=(300, 280), splits=2),
    "minicpm": Case(((3, 40),), True, F16, (5, 1), (288, 256)),
    "rank-80": Case(((3, 40),), True, BF16, (4, 1), (90, 80)),
    "sinks": Case(((7, 40), (1, 10)), heads=(4, 1), sizes=(28, 20), splits=2, sinks=3.0),
    "softcap": Case(((3, 200),), True, BF16, (4, 1), (328, 296), splits=2, softcap=0.7),
    "softcap-prefill": Case(
        ((40, 0), (23, 50)), False, F16, (2, 1), (40, 32), softcap=1.0, sinks=2.0
    ),
    "many-heads": Case(((2, 20),), False, BF16, (128, 1), (40, 32), splits=2),
}  # fmt: skip
# sizes that only a GPU computes in time
GPU_CASES = {
    "long-tree": Case(((32, 131_000),), True, BF16, (16, 1), (576, 512), splits=None),
    "batch-16": Case(((8, 16_000),) * 16, True, BF16, (128, 1), (576, 512), splits=None),
    "chunk": Case(((512, 3000), (1, 17)), False, F16, (16, 1), (576, 512), splits=None),
    "chunk-window": Case(((700, 900),), False, BF16, (8, 1), (288, 256), window=256, sink=4),
    "nodes-1024": Case(((1024, 500),), True, BF16, (4, 1), (576, 512), splits=None),
    "batch-1024": Case(((1, 40),) * 1024, False, BF16, (16, 1), (576, 512), splits=None),
    "fp32": Case(((5, 3000), (2, 900)), True, heads=(16, 1), sizes=(576, 512), splits=None),
}


def make_latent_call(case: Case, device: torch.device) -> Call:
    """Arguments of `attend`; values are columns of keys, in one memory."""
    call = make_call(case, device)
    q, k_cache, _, *others = call.args
    values = k_cache[..., : case.sizes[1]]
    return replace(
        call, args=(q, k_cache, values, *others), options=call.options | {"values_in_keys": True}
    )


def check_attend_latent(case: Case, device: torch.device) -> None:
    """Compare a case with the oracle; raises AssertionError."""
    check_call(case, make_latent_call(case, device), run)


# the interpreter would take hours for the sizes of real models
RUN = {**CASES, **(GPU_CASES if torch.cuda.is_available() else {})}


@pytest.mark.default(
    "plain-decode",
    "tree",
    "tree-odd-pages",
    "tree-whole-pages",
    "sink-beyond-window",
    "prefill",
    "prefill-of-70",
    "dead-window",
    "dead-batch",
    "deepseek",
    "two-halves",
    "two-halves-fp32",
)
@pytest.mark.parametrize("name", RUN)
def test_attend_latent(name: str, device: torch.device) -> None:
    check_attend_latent(RUN[name], device)


def test_bad_data_stays_inside(device: torch.device) -> None:
    """`attend` over broken lengths and blocks of latents."""
    check_bad_call(make_latent_call(replace(BAD_CASE, sizes=(24, 16)), device), run)


def test_a_replay_gives_the_same_bits_whichever_is_last(device: torch.device) -> None:
    """Of a latent in two halves, whose parts are merged one half after the other."""
    case = Case(((1, 700),), False, F16, (2, 1), (328, 296), splits=10)
    check_attend_latent(case, device)
    call = make_latent_call(case, device)
    outputs = []
    for order in (range, lambda n: range(n - 1, -1, -1), lambda n: (*range(2, n), 0, 1)):
        with programs_in(order, device):
            outputs.append(run(call, case.splits))
        assert torch.equal(outputs[0], outputs[-1])
        assert not arrivals.counters(call.args[1], 1).any()


@pytest.mark.parametrize(
    ("rows", "splits", "is_equal", "num_programs"),
    [
        # two waves of 132 programs and one for each tile that may be padding; one over short caches
        (4096, None, False, 2 * 132 + 8),
        (2048, None, False, 132 + 8),
        # tokens spread in any way have a tile more in each sequence
        (4096, 1, False, 24),
        (4096, 1, True, 16),
    ],
)
def test_no_more_programs_than_may_have_work(
    monkeypatch: pytest.MonkeyPatch, rows: int, splits: int | None, is_equal: bool,
    num_programs: int,
) -> None:  # fmt: skip
    """16 sequences of one token and 16 heads each, which are 16 tiles, on an H200."""
    grids: list[tuple[int, ...]] = []

    class Launcher:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: grids.append(grid)

    monkeypatch.setattr(module, "machine", lambda device: (90, 132))
    monkeypatch.setattr(module, "attend_kernel", Launcher())
    q = torch.zeros(16, 16, 24, dtype=BF16)
    k_cache = torch.zeros(1, rows, 1, 24, dtype=BF16)
    i32 = torch.arange(17, dtype=torch.int32)
    args = (i32, i32[:16].long(), i32[:16], i32[:16], None, torch.zeros(16, 1, dtype=torch.int32))
    options = {"values_in_keys": True, "scale": 1.0, "num_splits": splits}
    with even_tokens() if is_equal else contextlib.nullcontext():
        attend(q, k_cache, k_cache[..., :16], *args, **options)
    assert grids == [(num_programs,)]


def test_the_operator_reads_keys_alone(device: torch.device) -> None:
    """Of the value's cache the width; heads with caches of their own go to their kernel."""
    case = Case(((3, 20), (2, 9)), heads=(4, 1), sizes=(24, 16))
    call = make_latent_call(case, device)
    want = call.reference()
    q, k_cache, values, *others = call.args
    lost = torch.full(values.shape, float("nan"), device=device)
    found = attend(q, k_cache, lost, *others, **call.options)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    options = call.options | {"values_in_keys": False}
    torch.testing.assert_close(attend(*call.args, **options), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, F16, BF16])
def test_rows_are_written_once(dtype: torch.dtype, device: torch.device) -> None:
    """Rows of live tokens, in keys; the value's cache is not touched, nor are other rows."""
    k = torch.randn(1, 5, 576, device=device).to(dtype)
    caches = [torch.full((4, 2, 1, size), 7.0, dtype=dtype, device=device) for size in (576, 512)]
    places = [
        torch.tensor([0, 2, 5], dtype=torch.int32, device=device),
        torch.tensor([1, -1, 0, 2, 3], dtype=torch.int32, device=device),
        torch.tensor([[3, 0], [1, 2]], dtype=torch.int32, device=device),
    ]
    want = [cache.clone() for cache in caches]
    write_kv_reference(k, k[..., :512], *want, *places, values_in_keys=True)
    write_kv(k, k[..., :512], *caches, *places, values_in_keys=True)
    for own, other in zip(caches, want, strict=True):
        assert torch.equal(own, other)
    assert torch.equal(caches[0][3, 1, 0], k[0, 0])
    assert bool((caches[1] == 7).all())
    assert bool((caches[0][3, 0] == 7).all())


NAMES = ("q", "k_cache", "values", "q_start", "position", "slot", "cache_len", "ancestors")
BROKEN: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "quantized": ("k_cache", lambda x: x.to(torch.int8), "int8"),
    "columns": ("q", lambda x: x[..., :20], r"20\)"),
    "heads": ("k_cache", lambda x: torch.cat([x, x], 2), r"2, 24\)"),
    "no-shared-part": ("values", lambda x: x.new_empty(1, 1, 1, 24), "24 columns and 0"),
    "wide-shared-part": ("values", lambda x: x[..., :0], "latents of 0 columns"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_refuses(broken: str, device: torch.device) -> None:
    case = Case(((3, 5), (2, 4)), heads=(4, 1), sizes=(24, 16))
    call = make_latent_call(case, device)
    name, change, found = BROKEN[broken]
    place = (*NAMES, "block_table").index(name)
    changed = change(call.args[place])
    args = (*call.args[:place], changed, *call.args[place + 1 :])
    with pytest.raises(ValueError, match=f"found.*{found}.*needed"):
        attend(*args, **call.options)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_size_has_a_configuration(capability: int) -> None:
    for dtype in (BF16, F16, torch.float32):
        # a step takes 64 bits of a row's words
        assert attend_latent.config(dtype, capability).block_n in (16, 32, 64)
    names = [s.name for s in attend_latent.shipped(capability)]
    assert len(names) == len(set(names)) >= 10
