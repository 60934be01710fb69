"""Checks of `draft_children` on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specc.kernels.cuda.draft_children import draft_children
from specc.kernels.reference.accept import draft_children_reference
from tests.kernels.cuda.cases_accept import SMALL
from tests.kernels.cuda.near_ties import are_scores, check_equal_or_near, permitted_children
from tests.kernels.cuda.typed_trees import Row, inside, options_of, peaked, sizes


def logits_of(kind: str, num_rows: int, vocab: int, seed: int) -> Tensor:
    """Logits of rows that rank by chance, with ties, with few tokens, or of greedy rows alone."""
    generator = torch.Generator().manual_seed(seed)
    logits = peaked(generator, num_rows, vocab)
    if kind == "ties":
        logits = logits.round()
    elif kind == "masked":
        logits[torch.rand(logits.shape, generator=generator) < 0.98] = -torch.inf
        logits[:, vocab // 2] = 1.0
    elif kind == "nan":
        logits[:, vocab // 3 :: 5] = torch.nan
        logits[-1] = -torch.inf
    return logits


def check_draft_children(
    rows: Sequence[Row],
    columns: Sequence[int],
    vocab: int,
    num_children: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    depth: int = 0,
    scored: bool = True,
    kind: str = "peaked",
    is_small: bool = False,
) -> None:
    """Tokens are the oracle's, scores to 1e-5; padding draws tokens that a model can be fed.

    On a GPU a filter may fall to the other side of a near tie: children may be the same then, and
    their scores those of the tokens that it left.
    """
    k = num_children
    values, words, cache_len = options_of(rows, vocab)
    frontier = len(columns)
    logits = logits_of(kind, len(rows) * frontier, vocab, vocab + depth).to(dtype)
    first = torch.tensor(columns, dtype=torch.int32)
    tokens, scores = draft_children_reference(
        logits, num_children, cache_len, first, depth, values, words, scored
    )  # fmt: skip
    # every second column of a wider row
    spread = torch.full((frontier, 2), 99, dtype=torch.int32)
    spread[:, 0] = first
    with sizes(**(SMALL if is_small else {})):
        found, found_scores = draft_children(
            inside(logits, float("nan"), device), num_children, cache_len.to(device),
            spread.to(device)[:, 0], depth, inside(values, 0.5, device),
            inside(words, 1, device), scored,
        )  # fmt: skip
    assert (found.dtype, found_scores.dtype) == (torch.int64, torch.float32)
    is_real = (cache_len >= 0).repeat_interleave(frontier)
    found, found_scores = found.cpu(), found_scores.cpu()
    assert (found[~is_real] == 0).all()
    assert found_scores.shape == scores.shape

    def is_permitted(r: int) -> bool:
        b, column = r // frontier, int(first[r % frontier])
        options = (int(cache_len[b]), column, depth, values[b], words[b])
        # children and scores of one and the same answer
        return any(
            torch.equal(found[r], own)
            and are_scores(found_scores[r], own_scores[: int(scored) * k])
            for own, own_scores in permitted_children(logits[r], k, *options)
        )

    real = torch.nonzero(is_real).flatten().tolist()
    check_equal_or_near(
        [(found[r], found_scores[r]) for r in real],
        [(tokens[r], scores[r]) for r in real],
        device,
        lambda i: is_permitted(real[i]),
        _are_equal,
    )


def _are_equal(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    """Tokens to the last bit, scores to 1e-5."""
    (tokens, scores), (wanted, wanted_scores) = one, other
    return torch.equal(tokens, wanted) and torch.allclose(
        scores, wanted_scores, rtol=1e-5, atol=1e-5, equal_nan=True
    )
