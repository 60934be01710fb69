"""Whether a mask cuts positions into chunks: a token sees those of its own chunk before it."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from specc.passes.rewrite.mask_evaluator import MaskEvaluator, name_of, numbers_of

QUOTIENT = "floor_divide"
# widths and first positions at which every mask of chunks is evaluated
_PROBES = ((2048, 0), (48, 0), (48, 100), (301, 7))
# of numbers below 2, each of which may move an edge by a chunk, a mask has fewer than these
_CHUNKS = 8
# a chunk too large to evaluate so many of is replaced by these in turn
_STAND_INS = (150, 250)
_WIDEST = 2048


def find_chunk(evaluate: MaskEvaluator) -> int:
    """Positions of a chunk of a mask that lets a token see its own chunk up to itself.

    Such a mask compares quotients of positions. An edge may lie as far out as a quotient times the
    chunk, so no other number may place one, and several chunks are evaluated; of a large chunk a
    smaller one in its place, twice, since its size must be what the mask follows.

    Returns:
        0 where the mask has no quotients.
    Raises:
        UnsupportedAttentionError: it has, and is not that.
    """
    quotients = [node for node in evaluate.calls() if name_of(node) == QUOTIENT]
    if not quotients:
        return 0
    chunk = _divisor(quotients)
    if chunk is None or chunk < 1:
        raise evaluate.error("neither causal nor one sliding window: it divides by several numbers")
    evaluate.require_linear(besides=(QUOTIENT,))
    others = [value for value in evaluate.constants() if value != chunk]
    if others:
        raise evaluate.error(
            "neither causal nor one sliding window: chunks of positions, and edges at"
            f" {', '.join(f'{value:g}' for value in sorted(set(others)))}"
        )
    if chunk * _CHUNKS <= _WIDEST:
        _require_chunks(evaluate, chunk, None)
    else:
        for stand_in in _STAND_INS:
            _require_chunks(evaluate, stand_in, (chunk, stand_in))
    return chunk


def _divisor(quotients: list[fx.Node]) -> int | None:
    """The one number that all of them divide by, if there is one."""
    found = {
        node.args[1] if isinstance(node.args[0], fx.Node) and len(numbers_of(node)) == 1 else None
        for node in quotients
    }
    (divisor,) = found if len(found) == 1 else (None,)
    return divisor if type(divisor) is int else None


def _require_chunks(
    evaluate: MaskEvaluator, chunk: int, substitute: tuple[float, int] | None
) -> None:
    for width, first in _PROBES:
        found = evaluate(width, first, substitute)
        # of a sequence that begins at 0, places in the pass are positions
        if not any(torch.equal(found, chunks_of(width, chunk, start)) for start in {0, first}):
            raise evaluate.error("neither causal nor one sliding window, nor chunks of positions")


def chunks_of(width: int, chunk: int, first: int = 0) -> Tensor:
    """[width, width] bool of positions first … first + width - 1, causal within each chunk."""
    place = torch.arange(first, first + width)
    row, column = place[:, None], place[None]
    return (column <= row) & (column // chunk == row // chunk)
