"""`tree_expand` in Triton against its oracle."""

from __future__ import annotations

import pytest
import torch

from specc.kernels.cuda import tree_expand as kernels
from specc.kernels.reference.core import tree_expand_reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def logits_of(kind: str, num_rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits with ties across all parts of a row, masked tokens, NaN or signed zeros."""
    generator = torch.Generator().manual_seed(num_rows * vocab)
    logits = torch.randn(num_rows, vocab, generator=generator)
    if kind == "ties":
        logits = logits.round()
    elif kind == "equal":
        logits = torch.full((num_rows, vocab), -2.5)
    elif kind == "masked":
        logits[torch.rand(num_rows, vocab, generator=generator) < 0.995] = float("-inf")
        logits[-1] = float("-inf")
    elif kind == "nan":
        logits[torch.rand(num_rows, vocab, generator=generator) < 0.01] = float("nan")
        logits[:, vocab // 3] = float("inf")
        logits[-1, -1] = -float("nan")
    elif kind == "edges":
        # the first and the last tokens of parts are the best, and differ
        edges = [t for e in range(0, vocab, 256) for t in (e, e - 1) if t >= 0] + [vocab - 1]
        logits[:, edges] = 10.0 + torch.arange(len(edges))
    elif kind == "zeros":
        logits = torch.where(logits > 0, 0.0, -0.0)
        logits[:, ::2] = -1.0
    return logits.to(dtype)


@pytest.mark.parametrize(
    ("num_rows", "vocab", "num_children", "dtype", "kind"),
    [
        pytest.param(3, 1000, 1, torch.float32, "random", id="fp32-v1000-k1"),
        pytest.param(2, 1000, 3, torch.float16, "ties", id="fp16-v1000-k3-ties"),
        pytest.param(3, 513, 8, torch.bfloat16, "random", id="bf16-v513-k8"),
        pytest.param(2, 700, 4, torch.bfloat16, "ties", id="bf16-v700-k4-ties"),
        pytest.param(2, 600, 5, torch.float32, "equal", id="fp32-v600-k5-equal"),
        pytest.param(3, 1300, 6, torch.float32, "masked", id="fp32-v1300-k6-masked"),
        pytest.param(3, 999, 16, torch.float16, "nan", id="fp16-v999-k16-nan"),
        pytest.param(2, 300, 2, torch.bfloat16, "nan", id="bf16-v300-k2-nan"),
        pytest.param(2, 520, 7, torch.float32, "zeros", id="fp32-v520-k7-zeros"),
        pytest.param(2, 1024, 6, torch.float32, "edges", id="fp32-v1024-k6-edges"),
        pytest.param(4, 9, 9, torch.float32, "ties", id="fp32-v9-k9-all"),
        pytest.param(1, 1, 1, torch.float16, "random", id="fp16-v1-k1"),
        pytest.param(1, 5000, 2, torch.bfloat16, "ties", id="bf16-v5000-k2"),
        pytest.param(1, 270, 20, torch.float32, "ties", id="fp32-v270-k20-sorted"),
        pytest.param(1, 257, 64, torch.bfloat16, "nan", id="bf16-v257-k64-sorted"),
        pytest.param(0, 300, 3, torch.float32, "random", id="no-rows"),
    ],
)
def test_tree_expand(num_rows, vocab, num_children, dtype, kind, device):
    """What lies after a row would be its first child."""
    logits = logits_of(kind, num_rows, vocab, dtype)
    wanted = tree_expand_reference(logits, num_children)
    buffer = torch.full((num_rows, vocab + 16), float("nan"), dtype=dtype, device=device)
    rows = buffer[:, :vocab]
    rows.copy_(logits)
    tokens = kernels.tree_expand(rows, num_children)
    assert tokens.dtype == torch.int64
    assert tokens.is_contiguous()
    assert tokens.tolist() == wanted.tolist()
    assert torch.equal(rows.cpu().view(torch.uint8), logits.view(torch.uint8))


@pytest.mark.parametrize("vocab", [1, 4096, 4097, 32000, 151936, 262144], ids="v{}".format)
@pytest.mark.parametrize("num_children", [1, 16, 17, 64, 128], ids="k{}".format)
def test_blocks_hold_the_vocabulary_and_all_candidates(vocab, num_children):
    """Parts tile the row, hold their children, and their children fit one program."""
    sizes = kernels.config(vocab, num_children)
    assert (sizes["num_parts"] - 1) * sizes["BV"] < vocab <= sizes["num_parts"] * sizes["BV"]
    assert num_children <= sizes["BK"] <= sizes["BV"]
    assert max(sizes["BK"], sizes["num_parts"] * num_children) <= sizes["BC"]
    assert sizes["BC"] <= kernels.MAX_CANDIDATES


@pytest.mark.parametrize(
    ("logits", "num_children", "found"),
    [
        (torch.zeros(2, 5, dtype=torch.float64), 1, "torch.float64"),
        (torch.zeros(5, 2).T, 1, "strides"),
        (torch.zeros(7), 1, r"\[7\]"),
        (torch.zeros(2, 0), 1, r"\[2, 0\]"),
        (torch.zeros(2, 5), 6, "found 6 children of a vocabulary of 5"),
        (torch.zeros(2, 5), 0, "found 0 children"),
        (torch.zeros(1, 300), 129, "needed 1 … 128"),
        (torch.zeros(1, 600_000), 128, "candidates; needed at most 8192"),
    ],
    ids=["fp64", "columns", "1d", "v0", "k-above-v", "k0", "k129", "v600k-k128"],
)
def test_bad_inputs_are_refused_with_their_values(logits, num_children, found):
    with pytest.raises(ValueError, match=found):
        kernels.tree_expand(logits, num_children)
