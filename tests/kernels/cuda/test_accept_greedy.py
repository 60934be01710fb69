"""`accept_greedy` in Triton against its oracle."""

from __future__ import annotations

import pytest
import torch

from specc.kernels.cuda import accept_greedy as kernels
from tests.kernels.cuda import cases_accept_greedy as cases

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(
    ("batch", "num_nodes", "vocab", "max_depth", "dtype", "options"),
    [
        pytest.param(3, 13, 300, 12, torch.float32, {}, id="fp32-n13-v300"),
        pytest.param(2, 9, 1000, 8, torch.bfloat16, {"kind": "ties"}, id="bf16-n9-v1000-ties"),
        pytest.param(4, 7, 513, 6, torch.float16, {"kind": "masked"}, id="fp16-n7-v513-masked"),
        pytest.param(5, 12, 100, 11, torch.float32, {"kind": "nan"}, id="fp32-n12-v100-nan"),
        pytest.param(4, 10, 60, 9, torch.bfloat16, {"kind": "nan"}, id="bf16-n10-v60-nan"),
        pytest.param(1, 17, 40, 16, torch.float32, {"shape": "chain"}, id="fp32-n17-chain"),
        pytest.param(2, 20, 64, 3, torch.float16, {"shape": "star"}, id="fp16-n20-star"),
        pytest.param(3, 1, 700, 0, torch.bfloat16, {}, id="bf16-root-alone"),
        pytest.param(2, 7, 5000, 6, torch.bfloat16, {}, id="bf16-n7-v5000"),
        pytest.param(
            2, 5, 1900, 4, torch.float32, {"max_programs": 24, "kind": "ties"}, id="fp32-4-blocks"
        ),
        pytest.param(1, 130, 4, 30, torch.float32, {}, id="fp32-n130"),
        pytest.param(2, 8, 50, 20, torch.float32, {}, id="fp32-levels-that-the-tree-lacks"),
        pytest.param(2, 30, 40, 3, torch.float32, {"shape": "chain"}, id="fp32-walk-is-cut"),
        pytest.param(0, 4, 50, 3, torch.float32, {}, id="no-sequence"),
    ],
)
def test_accept_greedy(batch, num_nodes, vocab, max_depth, dtype, options, device):
    accepted = cases.check_accept_greedy(
        batch, num_nodes, vocab, max_depth, dtype, device, **options
    )
    # cases in which nothing is accepted would show nothing
    assert accepted >= min(batch, num_nodes - 1, 1)


@pytest.mark.parametrize(
    ("max_programs", "value"),
    [(1, 9.0), (1, float("nan")), (20, float("inf")), (2048, 9.0)],
    ids=["8-blocks", "8-blocks-nan", "4-blocks-inf", "1-block"],
)
def test_the_lower_of_equal_tokens_is_wanted(max_programs, value, device):
    cases.check_argmax(1900, max_programs, value, device)


def test_the_first_of_equal_siblings_is_followed(device):
    cases.check_equal_siblings(device)


def test_parents_shared_by_all_sequences(device):
    cases.check_shared_parents(device)


def test_cyclic_parents_end_the_walk(device):
    cases.check_cyclic_parents(device)


@pytest.mark.parametrize("num_rows", [1, 32, 1024, 16384], ids="r{}".format)
@pytest.mark.parametrize("vocab", [1, 4097, 151936, 262144], ids="v{}".format)
def test_parts_tile_the_vocabulary(num_rows, vocab):
    sizes = kernels.config(num_rows, vocab)
    part = sizes["NUM_BLOCKS"] * sizes["BV"]
    assert (sizes["num_parts"] - 1) * part < vocab <= sizes["num_parts"] * part
    assert sizes["num_parts"] == 1 or num_rows * sizes["num_parts"] <= kernels.MAX_PROGRAMS


def inputs(batch: int = 2, num_nodes: int = 3) -> dict:
    return {
        "logits": torch.zeros(batch * num_nodes, 5),
        "tokens": torch.zeros(batch, num_nodes, dtype=torch.int64),
        "parents": torch.zeros(batch, num_nodes, dtype=torch.int32),
        "max_depth": 2,
    }


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"logits": torch.zeros(6, 5, dtype=torch.float64)}, "torch.float64"),
        ({"logits": torch.zeros(5, 5)}, "5 rows of logits"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.int32)}, "torch.int32"),
        ({"parents": torch.zeros(2, 3, dtype=torch.int64)}, "parents of torch.int64"),
        ({"parents": torch.zeros(2, 4, dtype=torch.int32)}, r"parents \[2, 4\]"),
        ({"parents": torch.zeros(3, 2, dtype=torch.int32).T}, "strides"),
        ({"max_depth": -1}, "max_depth -1"),
        ({"max_depth": 1024}, "max_depth 1024"),
        (inputs(1, 1025), "1025 nodes"),
    ],
    ids=["fp64", "rows", "i32", "i64", "shape", "strides", "depth-1", "depth1024", "n1025"],
)
def test_bad_inputs_are_refused_with_their_values(change, found):
    with pytest.raises(ValueError, match=found):
        kernels.accept_greedy(**(inputs() | change))
