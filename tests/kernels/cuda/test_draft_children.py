"""`draft_children` in Triton against its oracle."""

from __future__ import annotations

import pytest
import torch

from specc.kernels.cuda import child_keys
from specc.kernels.cuda.draft_children import draft_children
from specc.kernels.cuda.tree_expand import MAX_CANDIDATES
from specc.sampling.rows import Rule
from tests.kernels.cuda import cases_draft_children as cases
from tests.kernels.cuda.typed_trees import MIXED, PADDING, Row, options_of

# the interpreter takes logarithms of 0
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
GREEDY = Row(temperature=0.0, top_k=2)
SHARP = (Row(Rule.MSS, 0.2), Row(Rule.SWOR, top_k=2), Row(top_k=3), Row(Rule.DELTA, top_k=1))


@pytest.mark.default("mixed-bf16-v37-ties", "bf16-v9-all", "v1", "swor-k20-sorted", "mss-k20")
@pytest.mark.parametrize(
    ("rows", "columns", "vocab", "num_children", "dtype", "options"),
    [
        pytest.param(
            MIXED, (1, 9), 600, 3, F32, {"depth": 2}, id="mixed-v600-k3", marks=pytest.mark.slow
        ),
        pytest.param(MIXED[:7], (5,), 37, 4, BF16, {"kind": "ties"}, id="mixed-bf16-v37-ties"),
        pytest.param(
            MIXED[4:],
            (2,),
            530,
            1,
            F16,
            {"is_small": True},
            id="mixed-fp16-v530-k1",
            marks=pytest.mark.slow,
        ),
        pytest.param(SHARP, (1,), 1100, 5, F32, {"kind": "masked"}, id="few-tokens-v1100-k5"),
        pytest.param(SHARP, (3, 700), 9, 9, BF16, {"scored": False}, id="bf16-v9-all"),
        pytest.param((*SHARP, GREEDY), (7,), 1, 1, F32, {}, id="v1"),
        pytest.param((GREEDY,) * 2, (1, 2), 513, 6, F32, {"kind": "nan"}, id="greedy-nan"),
        pytest.param((Row(Rule.SWOR),), (4,), 300, 20, F32, {}, id="swor-k20-sorted"),
        pytest.param((Row(Rule.MSS),), (4,), 40, 20, F16, {}, id="mss-k20"),
        pytest.param((Row(length=PADDING),), (4,), 40, 2, F32, {}, id="padding-alone"),
    ],
)
def test_draft_children(rows, columns, vocab, num_children, dtype, options, device):
    cases.check_draft_children(rows, columns, vocab, num_children, dtype, device, **options)


@pytest.mark.parametrize("vocab", [1, 4096, 4097, 32000, 151936, 262144], ids="v{}".format)
@pytest.mark.parametrize("num_children", [1, 16, 17, 64, 128], ids="k{}".format)
def test_blocks_hold_the_vocabulary_and_all_candidates(vocab, num_children):
    """Parts tile the row, hold their children, and their children fit one program."""
    c = child_keys.config(vocab, num_children)
    assert (c["num_parts"] - 1) * c["BQ"] * 4 < vocab <= c["num_parts"] * c["BQ"] * 4
    assert num_children <= c["BK"] <= c["BQ"] * 4
    assert max(c["BK"], c["num_parts"] * num_children) <= c["BC"] <= MAX_CANDIDATES
    assert c["num_parts"] <= c["BS"]


def test_no_rows(device):
    values, words, cache_len = (x[:0].to(device) for x in options_of([GREEDY], 0))
    columns = torch.zeros(2, dtype=torch.int32, device=device)
    logits = torch.empty(0, 9, device=device)
    tokens, scores = draft_children(logits, 3, cache_len, columns, 0, values, words, True)
    assert (tokens.shape, scores.shape) == ((0, 3), (0, 3))


def inputs_of(**change) -> dict:
    values, words, cache_len = options_of([GREEDY, Row()], 0)
    return {
        "logits": torch.zeros(2, 300),
        "num_children": 2,
        "cache_len": cache_len,
        "columns": torch.zeros(1, dtype=torch.int32),
        "depth": 0,
        "values": values,
        "words": words,
    } | change


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"logits": torch.zeros(2, 5, dtype=torch.float64)}, "torch.float64"),
        ({"logits": torch.zeros(3, 5)}, "3 rows of logits"),
        ({"columns": torch.zeros(0, dtype=torch.int32)}, r"columns \[0\]"),
        ({"columns": torch.zeros(1, dtype=torch.int64)}, "torch.int64"),
        ({"num_children": 0}, "found 0 children"),
        ({"num_children": 129}, "needed 1 … 128"),
        ({"logits": torch.zeros(2, 5), "num_children": 6}, "6 children of a vocabulary of 5"),
        ({"logits": torch.zeros(2, 600_000), "num_children": 128}, "needed at most 8192"),
        ({"values": torch.zeros(2, 7)}, r"values \[2, 7\]"),
        ({"words": torch.zeros(2, 4, dtype=torch.int32)}, "words .* of torch.int32"),
        ({"cache_len": torch.zeros(2)}, "cache_len .* of torch.float32"),
    ],
    ids=["fp64", "rows", "f0", "i64", "k0", "k129", "k-above-v", "v600k", "values", "words", "len"],
)
def test_bad_inputs_are_refused_with_their_values(change, found):
    with pytest.raises(ValueError, match=found):
        draft_children(**inputs_of(**change))
