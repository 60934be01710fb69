"""What a step would do outside of the cache is refused on the host, with the values."""

from __future__ import annotations

import pytest
import torch

from specc.errors import EngineError
from specc.runtime.backends.captured.step_bounds import check_step_bounds

# three blocks of 4 rows for each of two sequences, of a cache of 6
TABLE = torch.tensor([[0, 1, 2], [5, 4, 3]], dtype=torch.int32)


def check(lengths: list[int], table: torch.Tensor = TABLE, num_nodes: int = 5) -> None:
    check_step_bounds(lengths, table, num_nodes, num_blocks=6, rows_per_block=4)


def test_what_fits_passes() -> None:
    check([0, 7])
    check([11, 3], num_nodes=1)


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        ([3, 8], "sequence 1 of a step with 8 committed rows and 5 nodes"),
        ([1 << 40, 0], "sequence 0 of a step with 1099511627776 committed rows"),
        ([0, -1], "sequence 1 of a step with -1 committed rows"),
    ],
)
def test_rows_beyond_the_blocks(lengths: list[int], found: str) -> None:
    with pytest.raises(EngineError, match=f"{found}(.|\n)*at most 12 rows together: 3 blocks of 4"):
        check(lengths)


@pytest.mark.parametrize("block", [-1, 6, 1_000_000])
def test_a_block_that_is_not_there(block: int) -> None:
    table = TABLE.clone()
    table[1, 2] = block
    found = f"block {block} in column 2 of sequence 1(.|\n)*one of the cache's blocks, 0 … 5"
    with pytest.raises(EngineError, match=found):
        check([0, 4], table)
    # nothing reaches that column: it may hold what it likes
    check([0, 3], table)
