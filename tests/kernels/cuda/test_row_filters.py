"""`row_filters` in Triton keeps what the oracle keeps, by whichever way it gets there."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from specc.kernels.cuda import row_filters
from specc.kernels.cuda.arrivals import is_last
from specc.kernels.cuda.row_noise import order_of
from specc.kernels.cuda.row_scan import NUM_PIVOTS, PIVOTS, measure, number_of, pivot_of
from specc.sampling.rows import Rule
from tests.kernels.cuda import cases_accept as cases
from tests.kernels.cuda.typed_trees import PADDING, Row

# the interpreter takes logarithms of 0
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

slow = pytest.mark.slow
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

FILTERS = (
    Row(top_p=0.9, length=1),
    Row(top_p=0.3, temperature=0.5),
    Row(Rule.MSS, top_k=1),
    Row(top_k=5, temperature=2.0),
    Row(top_k=300),
    Row(Rule.DELTA, min_p=0.1),
    Row(min_p=1.0),
    Row(Rule.SWOR, top_p=0.0),
    Row(top_p=0.8, min_p=0.01, top_k=60),
    Row(top_p=0.999, top_k=7, temperature=1e-4),
    Row(Rule.MSS),
    Row(top_p=0.99999, temperature=3.0),
    Row(top_p=0.6, top_k=200, temperature=4.0),
    # the last of these tokens are lighter than what top_p drops of a whole row
    Row(top_p=0.3, top_k=600, temperature=2.0),
    Row(Rule.MSS, top_p=0.7, min_p=0.02, temperature=1.5),
    Row(temperature=0.0, top_p=0.5),
    Row(top_p=0.5, length=PADDING),
)


def logits_of(kind: str, vocab: int, num_rows: int = len(FILTERS)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(num_rows, vocab, generator=generator) * 2
    if kind == "ties":
        logits = (logits * 2).round() / 2
    elif kind == "masked":
        logits[torch.rand(logits.shape, generator=generator) < 0.97] = -torch.inf
        logits[:, vocab // 2] = 1.0
    elif kind == "equal":
        logits[:] = -3.0
    elif kind == "tiny":
        # far closer to 0 than to each other's neighbors in value: -0 and 0 are one
        logits = logits * 1e-30
        logits[:, ::7], logits[:, 1::7] = 0.0, -0.0
    elif kind == "below":
        # the best is -0
        logits = torch.where(logits > 1.5, -0.0, -logits.abs())
    return logits


@pytest.mark.parametrize(
    ("vocab", "kind", "dtype", "is_small", "listed"),
    [
        pytest.param(704, "normal", F32, True, None, id="v704-passes"),
        pytest.param(704, "normal", F32, True, 32, id="v704-two-rounds", marks=slow),
        pytest.param(704, "normal", F32, False, None, id="v704", marks=slow),
        pytest.param(464, "ties", BF16, True, None, id="bf16-v464-ties", marks=slow),
        pytest.param(300, "masked", F16, True, None, id="fp16-v300-masked", marks=slow),
        pytest.param(272, "equal", F32, True, None, id="v272-equal", marks=slow),
        pytest.param(208, "tiny", F32, True, None, id="v208-tiny", marks=slow),
        pytest.param(160, "below", F32, True, None, id="v160-below", marks=slow),
        pytest.param(1, "normal", F32, False, None, id="v1"),
    ],
)
def test_filters_keep_what_the_oracle_keeps(vocab, kind, dtype, is_small, listed, device):
    logits = logits_of(kind, vocab).to(dtype)
    num_dropped = cases.check_filters(FILTERS, logits, device, is_small=is_small, listed=listed)
    assert vocab == 1 or kind == "equal" or num_dropped > 3 * vocab


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_filters_of_every_kind_at_once(seed, device):
    """Random options and lists of all sizes; numbers from continuous ranges tie with nothing."""
    generator = torch.Generator().manual_seed(seed)

    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    vocab = int(between(20, 900))
    rows = [
        Row(
            list(Rule)[i % 4],
            temperature=between(0.1, 3.0),
            top_p=between(0.05, 0.999) if i & 1 else 1.0,
            min_p=between(0.001, 0.3) if i & 2 else 0.0,
            top_k=int(between(1, vocab)) if i & 4 else 0,
        )
        for i in range(8)
    ]
    kind = ("normal", "ties", "masked")[seed % 3]
    logits = logits_of(kind, vocab, len(rows)).to((F32, BF16, F16)[seed % 3])
    listed = (16, 64, 256, 4096)[seed % 4]
    cases.check_filters(rows, logits, device, is_small=True, listed=listed)


@pytest.mark.parametrize("num_rows", [1, 32, 1024, 16384], ids="r{}".format)
@pytest.mark.parametrize("vocab", [1, 4097, 151936, 262144], ids="v{}".format)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_parts_tile_the_vocabulary(num_rows, vocab, dtype):
    c = row_filters.config(num_rows, vocab, dtype)
    part = c["num_blocks"] * c["BR"] * c["W"]
    assert (c["num_parts"] - 1) * part < vocab <= c["num_parts"] * part
    assert c["num_parts"] <= c["BP"]
    assert c["num_parts"] == 1 or num_rows * c["num_parts"] <= row_filters.MAX_PROGRAMS
    # rows that are not aligned have no wide loads
    assert c["W"] * dtype.itemsize == (dtype.itemsize if vocab % 16 else 16)
    assert c["BR"] % c["BM"] == 0


def test_many_parts_read_a_row_of_a_large_vocabulary():
    """One row of 128k tokens: sixteen programs, and four wide loads of a thread in a pass."""
    c = row_filters.config(1, 131072, BF16)
    assert (c["num_parts"], c["num_blocks"], c["BR"] // (32 * row_filters.WARPS)) == (16, 4, 1)


@triton.jit
def _pivots_kernel(logits, bounds, pivots, numbers, vocab, BR: tl.constexpr, W: tl.constexpr):
    """Pivots as rounds look for them, and what a pass measures at them."""
    low = order_of(tl.load(bounds)).to(tl.int64)
    high = order_of(tl.load(bounds + 1)).to(tl.int64)
    o_j = tl.arange(0, PIVOTS)
    b_number, _ = measure((logits, vocab, 1.0), 0.0, low, high, 0, 1, BR, W)
    tl.store(pivots + o_j, number_of(pivot_of(o_j, low, high)))
    tl.store(numbers + o_j, b_number)


@pytest.mark.parametrize(("low", "high"), [(2.0, 17.0), (-7.25, -0.375), (-40.0, 1.7)])
def test_a_pass_counts_from_the_pivots_that_rounds_look_for(low, high, device):
    """To the last bit: tokens on either side of each pivot are next to it."""
    bounds = torch.tensor([low, high], device=device)
    logits = torch.zeros(128, device=device)
    pivots = torch.empty(NUM_PIVOTS, device=device)
    numbers = torch.empty(NUM_PIVOTS, dtype=torch.int32, device=device)
    args = (logits, bounds, pivots, numbers, 3 * NUM_PIVOTS)
    _pivots_kernel[(1,)](*args, BR=64, W=2, enable_fp_fusion=False)
    above, below = (pivots.nextafter(pivots.new_tensor(end)) for end in (1e38, -1e38))
    logits[: 3 * NUM_PIVOTS] = torch.cat([above, pivots, below])
    _pivots_kernel[(1,)](*args, BR=64, W=2, enable_fp_fusion=False)
    wanted = (logits[: 3 * NUM_PIVOTS, None] >= pivots).sum(0)
    assert numbers.tolist() == wanted.tolist()


@triton.jit
def _sums_kernel(numbers, sums, arrived, num_programs, BN: tl.constexpr):
    """Each program brings a number; the last of a group adds them up."""
    i_g, i_p = tl.program_id(0), tl.program_id(1)
    tl.store(numbers + i_g * num_programs + i_p, i_g * 100 + i_p)
    if is_last(arrived + i_g, num_programs):
        o = tl.arange(0, BN)
        b = tl.load(numbers + i_g * num_programs + o, mask=o < num_programs, other=0)
        tl.store(sums + i_g, tl.sum(b, 0))


def test_the_last_program_sees_what_all_have_stored_at_every_replay(device):
    num_groups, num_programs = 3, 5
    arrived = torch.zeros(num_groups, dtype=torch.int32, device=device)
    for _ in range(3):
        numbers = torch.full((num_groups, num_programs), -(10**6), dtype=torch.int32, device=device)
        sums = torch.full((num_groups,), -1, dtype=torch.int32, device=device)
        _sums_kernel[(num_groups, num_programs)](numbers, sums, arrived, num_programs, BN=8)
        assert sums.tolist() == [10 + 500 * group for group in range(num_groups)]
        assert arrived.tolist() == [0] * num_groups
