"""How many states of prefixes an engine keeps for later requests, and how far apart they are."""

from __future__ import annotations

from dataclasses import replace

import torch

from specc.artifact.manifest_entries import LimitsEntry
from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.passes.memory import cache_bytes, state_bytes
from specc.passes.program import Program

# tokens between two of them where nobody says: a pass over a prompt ends at each
_GRID = 256
# of the bytes of the KV cache, what they may take where nobody says how many
_SHARE = 4


def with_checkpoints(
    limits: LimitsEntry, config: CompileConfig, program: Program, dtype: torch.dtype
) -> LimitsEntry:
    """The limits, with what is kept of a target whose layers keep states.

    Where nobody says how many, they are as many as the KV cache has places for, but take no more
    than a quarter of its bytes; two for each sequence in any case: while one is decoded, another
    waits for its next turn.

    Args:
        program: of the target, after its last phase.
    Raises:
        ConfigError: options for states of a target without, or places where no block ends.
    """
    count, grid, size = config.state_checkpoints, config.state_grid, limits.block_size
    _check(limits, config, bool(program.state_layers))
    if not program.state_layers or count == 0 or not size:
        return limits
    grid = grid or -(-_GRID // size) * size
    if count is None:
        held = cache_bytes(program, dtype, limits.cache_rows())
        share = held // _SHARE // max(1, state_bytes(program))
        count = max(2 * limits.max_batch_size, min(share, limits.cache_rows() // grid))
    return replace(limits, state_checkpoints=count, state_grid=grid)


def _check(limits: LimitsEntry, config: CompileConfig, has_states: bool) -> None:
    count, grid, size = config.state_checkpoints, config.state_grid, limits.block_size
    given = [
        f"--{name} {value}"
        for name, value in (("state-checkpoints", count), ("state-grid", grid))
        if value
    ]
    if given and not has_states:
        raise ConfigError(
            f"{given[0]}, and a target that attends to all of its tokens",
            "a target whose layers keep states",
            f"leave out {given[0].split()[0]}",
        )
    if given and not size:
        raise ConfigError(
            f"{given[0]}, and a cache of one block a sequence",
            "a cache in blocks, which prefixes are found by",
            f"leave out {given[0].split()[0]}, or pass --block-size 16",
        )
    if grid and grid % size:
        raise ConfigError(
            f"--state-grid {grid}, and blocks of {size} tokens",
            "a multiple of --block-size: a prefix ends with a block",
            f"pass --state-grid {-(-grid // size) * size}",
        )
