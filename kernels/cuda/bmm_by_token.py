"""`specc::bmm_by_token`: the library's product of heads, with those of a token side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.kernels.cuda.strided_rows import check


def bmm_by_token(x: Tensor, weight: Tensor) -> Tensor:
    """See `bmm_by_token_reference`; the library writes rows at any distance."""
    check(
        x.dim() == weight.dim() == 3 and x.shape[::2] == weight.shape[:2],
        "bmm_by_token",
        f"x {list(x.shape)}, weight {list(weight.shape)}",
        "[H, Nt, K] and [H, K, N]",
    )
    out = x.new_empty(x.shape[1], x.shape[0], weight.shape[2]).transpose(0, 1)
    return torch.bmm(x, weight, out=out)
