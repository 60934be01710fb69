"""Checks of `tree_expand` on any device."""

from __future__ import annotations

import torch

from specc.kernels.cuda import tree_expand as kernels
from specc.kernels.reference.core import tree_expand_reference


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


def check_tree_expand(
    num_rows: int,
    vocab: int,
    num_children: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    kind: str = "random",
) -> None:
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
