"""Whether a step stays inside of the cache: looked at on the host, before anything is queued.

Kernels mask what is out of range, so that nothing is read or written outside of a tensor; a result
would then be wrong without a word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specc.errors import EngineError


def check_step_bounds(
    cache_lens: Sequence[int],
    block_table: Tensor,
    num_nodes: int,
    num_blocks: int,
    rows_per_block: int,
) -> None:
    """Compare the rows that a step reads and writes with the blocks of its sequences.

    Args:
        cache_lens: committed rows of each sequence.
        block_table: [B, n] int32 on the host.
        num_nodes: rows after the committed ones that the step's tree takes.
        num_blocks: of the cache.
        rows_per_block: of a block.
    Raises:
        EngineError: a length below 0 or a tree past the blocks; a block that is not there.
    """
    columns = block_table.shape[1]
    lengths = torch.tensor(cache_lens)
    rows = lengths + num_nodes
    wrong = (lengths < 0) | (rows > columns * rows_per_block)
    if bool(wrong.any()):
        b = int(wrong.nonzero()[0])
        raise EngineError(
            f"sequence {b} of a step with {cache_lens[b]} committed rows and {num_nodes} nodes",
            f"0 or more, and at most {columns * rows_per_block} rows together: {columns} blocks of"
            f" {rows_per_block}",
            "end the sequence earlier, or compile with a larger --max-seq-len",
        )
    is_used = torch.arange(columns) * rows_per_block < rows[:, None]
    bad = is_used & ((block_table < 0) | (block_table >= num_blocks))
    if bool(bad.any()):
        b, column = bad.nonzero()[0].tolist()
        raise EngineError(
            f"block {int(block_table[b, column])} in column {column} of sequence {b}",
            f"one of the cache's blocks, 0 … {num_blocks - 1}",
            "pass block tables as the engine's cache makes them",
        )
