"""Up to how many rows the loops between products run on one thread."""

from __future__ import annotations

from typing import Any

import pytest

from specc.runtime.backends.cpu.program import narrow_rows


def program(*inputs: dict[str, Any]) -> dict[str, Any]:
    norm = {"kind": "weight", "shape": [100_000]}
    cache = {"kind": "cache", "shape": [1, 1, 1, 90_000]}
    return {"inputs": [norm, cache, *inputs]}


def plain(outputs: int, inputs: int) -> dict[str, Any]:
    return {"kind": "weight", "shape": [outputs, inputs]}


@pytest.mark.parametrize(
    ("inputs", "rows"),
    [
        ([plain(2048, 256), plain(256, 768)], 53),
        ([plain(256, 5120), plain(10_240, 256)], 8),
        # narrow models are no exception to what all share at 64 rows
        ([plain(260, 32), plain(32, 64)], 64),
        ([plain(4096, 14_336)], 2),
        ([plain(8, 50_000)], 1),
        # in blocks, and as integers: the sizes that the matrix had
        ([{"kind": "weight", "shape": [8, 2560, 32, 2], "blocks_of": [256, 5120]}], 8),
        ([{"kind": "weight", "shape": [3, 896], "quantized_of": [80, 2400]}], 17),
        ([], 64),
    ],
)
def test_wide_products_share_their_loops_from_fewer_rows_on(
    inputs: list[dict[str, Any]], rows: int
) -> None:
    assert narrow_rows(program(*inputs)) == rows
