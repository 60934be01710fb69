"""Cases of `attend_latent` and how one is checked, without pytest.

They are those of `cases_attend` with one KV head and a cache of keys alone, so what no live token
may see is NaN here, too; `sizes` are columns of keys, and the first of them, which are values.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specc.kernels.cuda.attend_latent import attend_latent
from tests.kernels.cuda.cases_attend import (
    BAD_CASE,
    BF16,
    F16,
    Call,
    Case,
    check_bad_call,
    check_call,
    make_call,
)

CASES = {
    "plain-decode": Case(((1, 40), (1, 0), (1, 33)), False, heads=(4, 1), sizes=(40, 32), splits=2),
    "tree": Case(((7, 40), (1, 10), (5, 32)), heads=(4, 1), sizes=(28, 20), splits=2),
    "tree-odd-pages": Case(((5, 70), (0, 12), (9, 130)), True, F16, (6, 1), (40, 32), 7, splits=2),
    "tree-dense": Case(((6, 70), (3, 101)), True, BF16, (2, 1), (72, 64), 0),
    "tree-whole-pages": Case(((9, 100), (3, 63)), True, F16, (3, 1), (40, 32), 64, splits=2),
    "tree-of-3-words": Case(((65, 61),), True, F16, (1, 1), (24, 16), first_node=65),
    "tree-tiles": Case(((37, 90), (2, 5)), True, BF16, (7, 1), (40, 32), splits=2),
    "tree-window-sink": Case(((7, 200), (3, 10)), True, F16, (4, 1), (24, 16), window=20, sink=5),
    "tree-window-of-1": Case(((3, 40),), heads=(2, 1), sizes=(24, 16), window=1, splits=2),
    "sink-beyond-window": Case(
        ((2, 50), (2, 20)), heads=(2, 1), sizes=(24, 16), window=8, sink=70
    ),
    "level-beyond-window": Case(
        ((2, 3),), True, heads=(1, 1), sizes=(24, 16), first_node=140, window=2
    ),
    "draft-level": Case(((4, 70), (4, 31)), heads=(4, 1), sizes=(24, 16), first_node=9, splits=2),
    "prefill": Case(((40, 0), (23, 50)), False, F16, (2, 1), (40, 32)),
    "prefill-fp32": Case(((19, 30), (1, 77)), False, heads=(2, 1), sizes=(40, 32), splits=2),
    "prefill-window": Case(((40, 60), (1, 100), (9, 0)), False, BF16, (2, 1), (24, 16), window=20),
    "prefill-of-70": Case(((70, 10),), False, F16, (1, 1), (24, 16), splits=None),
    "dead-tokens": Case(
        ((5, 70), (2, 9), (4, 20)), heads=(4, 1), sizes=(24, 16), dead=(1, 5, 6, 10), tail=3,
        splits=2,
    ),
    # with a position of 0 a dead token would see what windows cut from others
    "dead-window": Case(((5, 90),), heads=(4, 1), sizes=(24, 16), dead=(1,), window=20),
    "dead-batch": Case(((2, 7), (1, 3)), heads=(4, 1), sizes=(24, 16), dead=(0, 1, 2), splits=2),
    # DeepSeek's latent, one of two halves that are not full, and one that no power of two is
    "deepseek": Case(((2, 70),), True, BF16, (8, 1), (576, 512), splits=2),
    "deepseek-16-heads": Case(((3, 40), (1, 90)), True, F16, (16, 1), (576, 512), splits=None),
    "deepseek-fp32": Case(((2, 20),), True, heads=(2, 1), sizes=(576, 512)),
    "two-halves": Case(((3, 200),), True, BF16, (4, 1), (328, 296), splits=2),
    "two-halves-fp32": Case(((2, 20),), False, heads=(3, 1), sizes=(300, 280), splits=2),
    "minicpm": Case(((3, 40),), True, F16, (5, 1), (288, 256)),
    "rank-80": Case(((3, 40),), True, BF16, (4, 1), (90, 80)),
    "empty-splits": Case(((3, 40), (2, 0)), True, heads=(2, 1), sizes=(24, 16), splits=8),
    "chosen-splits": Case(((2, 150),), heads=(2, 1), sizes=(24, 16), splits=None),
    "many-heads": Case(((2, 20),), False, BF16, (128, 1), (24, 16), splits=2),
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


def run(call: Call, splits: int | None) -> torch.Tensor:
    q, k_cache, values, *others = call.args
    options = {name: call.options[name] for name in ("scale", "window", "sink")}
    return attend_latent(q, k_cache, values.shape[3], *others, **options, num_splits=splits)


def check_attend_latent(case: Case, device: torch.device) -> None:
    """Compare a case with the oracle; raises AssertionError."""
    check_call(case, make_latent_call(case, device), run)


def check_bad_data(device: torch.device) -> None:
    """`attend_latent` over broken lengths and blocks."""
    check_bad_call(make_latent_call(replace(BAD_CASE, sizes=(24, 16)), device), run)
