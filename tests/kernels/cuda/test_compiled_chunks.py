"""Attention within chunks of positions, compiled for a GPU ahead of time.

It does not ship as a configuration of its own, so no table has it: numbers are here. Beside those
of attention without chunks, tiles of 32 rows and more spill, as the first slot of each row's chunk
stays in registers with the rest; no GPU has said what that costs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.cuda.aot import Usage
from tests.kernels.cuda.test_budgets import PINNED, SHARED, compile_kernels, read_table

# Llama 4's
CHUNK = 8192
# the nodes of a tree, and rows of prompts by wgmma, with what they use on sm_90
FOUND = {
    "attend-bf16-d128-rows16-page16-tree": Usage(209, 0, 0, 28672, 0, 64),
    "attend-bf16-d128-rows128-page0-causal": Usage(255, 2204, 840, 65536, 0, 24),
}


@pytest.mark.parametrize("name", FOUND)
def test_it_compiles_for_a_gpu(name: str, tmp_path: Path) -> None:
    options = ["--capabilities", "90", "--only", "attend", "--names", f"sm_90/attend/{name}"]
    (usage,) = compile_kernels(tmp_path, [*options, "--set", f"CHUNK={CHUNK}"], PINNED).values()
    assert usage == FOUND[name]
    plain = read_table(PINNED, 90)[f"attend/{name}"]
    # the same products, in memory that a multiprocessor has
    assert usage.tensor_core == plain.tensor_core > 0
    assert usage.shared < SHARED[90]
    # what is compiled knows of chunks
    assert usage != plain
