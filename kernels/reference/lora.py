"""The oracle of low-rank terms beside a product, which adapters add for some tokens."""

from __future__ import annotations

from torch import Tensor

# columns of a row of `pieces`
ADAPTER, COLUMN, COLUMNS, ROW, RANK = range(5)


def add_lora_reference(
    base: Tensor,
    input: Tensor,
    adapters: Tensor,
    down: Tensor,
    up: Tensor,
    pieces: Tensor,
    scales: Tensor,
) -> Tensor:
    """Add scale · B · (A · x) of each token's own adapter to a product of x (LoRA, 2106.09685).

    Each row is computed by itself, in float64, and rounded once.

    Args:
        base: [T, N] product of `input` by the weight that adapters are beside.
        input: [T, K] x, in the dtype of base.
        adapters: [T, 1] int32 adapter of each token; -1 is none. Where it is none, or has no piece
            here, the row is that of base, to the bit.
        down: [R, K] rows of all A, in the dtype of base.
        up: [U] the transposes of all B, [rank, columns] each, in the order of the pieces; in the
            dtype of base.
        pieces: [P, 5] int32 of each low-rank term: its adapter; the first column of base that it
            adds to, and how many; its first row of down, and its rank. Those of an adapter add to
            different columns.
        scales: [P] float32 factor of each.
    Returns:
        [T, N].
    Raises:
        ValueError: a piece reaches beyond what there is.
    """
    check_pieces(base, adapters, down, up, pieces)
    out = base.clone()
    start = 0
    for piece, scale in zip(pieces.tolist(), scales.tolist(), strict=True):
        adapter, column, columns, row, rank = piece
        a = down[row : row + rank].double()
        b = up[start : start + rank * columns].view(rank, columns).double()
        start += rank * columns
        for token in (adapters[:, 0] == adapter).nonzero()[:, 0].tolist():
            own = slice(column, column + columns)
            term = (a * input[token].double()).sum(1) * scale
            out[token, own] = (base[token, own].double() + (term[:, None] * b).sum(0)).to(out.dtype)
    return out


def check_pieces(base: Tensor, adapters: Tensor, down: Tensor, up: Tensor, pieces: Tensor) -> None:
    """Raises ValueError: pieces reach beyond what there is, or adapters are no row a token."""
    if pieces.dim() != 2 or pieces.shape[1] != 5 or adapters.shape != (base.shape[0], 1):
        raise ValueError("pieces are [P, 5], and adapters a row for each token")
    needed = 0
    for adapter, column, columns, row, rank in pieces.tolist():
        if min(adapter, column, columns, row, rank) < 0:
            raise ValueError("pieces are numbers of 0 or more")
        if column + columns > base.shape[1] or row + rank > down.shape[0]:
            raise ValueError("a piece lies within base and down")
        needed += rank * columns
    if needed != len(up):
        raise ValueError(f"up has {len(up)} numbers, the pieces {needed}")
